"""What queries read and write, by the names that OpenLineage's conventions have for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

#: What Spark calls sources and sinks that have a path, as it describes them in the progress of a query.
_WITH_PATH = ("FileStreamSource", "FileSink", "DeltaSource", "DeltaSink")
#: Where a source has no name of OpenLineage's own, Spark's description of it is the name.
_SPARK = "spark"
#: What is another text each time in such a description: ids of expressions and of Java's objects.
_CHANGING = re.compile(r"#\d+L?|@[0-9a-f]+$")
#: A user with a password in a URI. A container of Azure's is one without.
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*:[^/@\s]*@")


class DatasetName(NamedTuple):
    """A data set by OpenLineage's conventions."""

    namespace: str
    name: str


def without_password(text: str) -> str:
    """Return a text whose URIs have no user with a password any more."""
    return _PASSWORD.sub("", text)


def datasets_of(description: str, kafka: Sequence[Mapping[str, str | None]] = ()) -> list[DatasetName]:
    """Return the data sets that a source or sink has a path or topics for; none for another one.

    The description is Spark's in the progress of a query. `kafka` has, of each source of Kafka and of the sink, the option
    ``subscribe`` or ``topic``, and its bootstrap ``servers``.
    """
    if match := re.fullmatch(r"Kafka(?:V2|Source)\[Subscribe\[(.*)\]\]", description):
        return [DatasetName(_cluster(topic, kafka), topic) for topic in match[1].split(", ")]
    if (match := re.fullmatch(r"(\w+)\[(.*)\]", description)) and match[1] in _WITH_PATH:
        return [_at_path(match[2])]
    return []


def input_datasets(description: str, kafka: Sequence[Mapping[str, str | None]] = ()) -> list[DatasetName]:
    """Return the data sets of a source: one by its description if there is no other; see :func:`datasets_of`."""
    return datasets_of(description, kafka) or [DatasetName(_SPARK, _CHANGING.sub("", without_password(description)))]


def output_datasets(description: str, kafka: Sequence[Mapping[str, str | None]] = ()) -> list[DatasetName]:
    """Return the data sets of a sink; none if its rows name their topics; see :func:`datasets_of`."""
    sinks = ((of.get("topic"), of["servers"]) for of in kafka)
    return datasets_of(description) or [DatasetName(_kafka(servers), topic) for topic, servers in sinks if topic]


def _cluster(topic: str, kafka: Sequence[Mapping[str, str | None]]) -> str:
    fitting = [source for source in kafka if topic in re.split(r"\s*,\s*", source["subscribe"] or "")]
    return _kafka(next((source["servers"] for source in (*fitting, *kafka)), None))


def _kafka(servers: str | None) -> str:
    return f"kafka://{(servers or '').partition(',')[0].strip()}"


def _at_path(uri: str) -> DatasetName:
    parts = urlsplit(without_password(uri))
    if parts.scheme in ("", "file"):
        return DatasetName("file", parts.path)
    scheme = "s3" if parts.scheme in ("s3a", "s3n") else parts.scheme
    # An object's key does not begin with a slash.
    path = parts.path if scheme == "hdfs" else parts.path.strip("/") or "/"
    return DatasetName(f"{scheme}://{parts.netloc}", path)

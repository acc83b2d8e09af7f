"""Spark's connectors to Kafka, Avro, Delta Lake and Iceberg: their jars, checked by SHA-256, and the settings that they need.

Jars come from Maven Central, or from the repositories of the user's Ivy settings, by the Apache Ivy that is part of PySpark. They
are downloaded once and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

import pyspark

from coordinator.model.errors import InvalidRequestError, SetupError
from spark_jobs.session.java import choose_java_home

#: Spark's setting for a file of Ivy's settings, which names other repositories than Maven Central.
IVY_SETTINGS = "spark.jars.ivySettings"
#: Settings whose values are lists: a connector's and the user's are joined.
_LISTS = ("spark.jars", "spark.sql.extensions")
_DOWNLOAD_DEADLINE_S = 900


class Jar(NamedTuple):
    """A jar by its Maven coordinate and content."""

    group: str
    artifact: str
    version: str
    sha256: str
    classifier: str = ""

    @classmethod
    def parse(cls, line: str) -> Jar:
        """Read ``group:artifact:version SHA-256``, or ``group:artifact:version:classifier SHA-256``."""
        coordinate, sha256 = line.split()
        group, artifact, version, *classifier = coordinate.split(":")
        return cls(group, artifact, version, sha256, *classifier)

    @property
    def coordinate(self) -> str:
        """``group:artifact:version``, as ``spark.jars.packages`` has it."""
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"{'-'.join(filter(None, (self.artifact, self.version, self.classifier)))}.jar"


@cache
def _connectors() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("connectors.toml").read_text())


def spark_series() -> str:
    """Return the version of the installed PySpark up to its minor number, such as ``3.5``."""
    return ".".join(pyspark.__version__.split(".")[:2])


def connector_jars(names: Iterable[str], series: str | None = None) -> list[Jar]:
    """Return the jars of connectors for a version of Spark (by default the installed one).

    Raises
    ------
    InvalidRequestError
        There is no such connector.
    SetupError
        A connector has no jar for this version of Spark.
    """
    series = series or spark_series()
    jars: dict[Jar, None] = {}
    for name in names:
        if name not in _connectors():
            raise InvalidRequestError(
                f"no such connector; there are {', '.join(sorted(_connectors()))}", connector=name
            )
        lines = _connectors()[name]["jars"].get(series)
        if lines is None:
            raise SetupError(
                "there is no jar of this connector for this version of Spark; with jars of your own, set `spark.jars` in `configs`",
                connector=name,
                spark=series,
            )
        jars |= dict.fromkeys(Jar.parse(line) for line in lines)
    return list(jars)


def connector_settings(names: Iterable[str], *, ivy_settings: str | None = None) -> dict[str, str]:
    """Return Spark's settings for connectors, after their jars are in the user's cache.

    Raises
    ------
    InvalidRequestError, SetupError
        As :func:`connector_jars` and :func:`fetch_jars`.
    """
    names = list(names)
    jars = fetch_jars(connector_jars(names), ivy_settings=ivy_settings)
    settings: dict[str, str] = {"spark.jars": ",".join(map(str, jars))}
    for name in names:
        settings = with_connectors(settings, _connectors()[name].get("settings", {}))
    return settings


def with_connectors(settings: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return settings with those of connectors. A list has the entries of both; another setting stays as it is."""
    merged = {**added, **settings}
    for key in _LISTS:
        entries = [entry for values in (settings, added) for entry in values.get(key, "").split(",") if entry]
        if entries:
            merged[key] = ",".join(dict.fromkeys(entries))
    return merged


def fetch_jars(jars: Collection[Jar], *, ivy_settings: str | None = None) -> list[Path]:
    """Return the files of jars, in their order. Those that the user's cache does not have are downloaded.

    A file counts only with its SHA-256. Two processes may do so at once: a file comes into the cache whole.

    Parameters
    ----------
    jars
        Jars; their dependencies are not looked for.
    ivy_settings
        File of Ivy's settings; by default Maven Central is asked.

    Raises
    ------
    SetupError
        A jar cannot be had, or has another content than it should.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "statefleet" / "jars"
    missing = [jar for jar in jars if not _has_content(folder / jar.file_name, jar)]
    if missing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as download:
                _download(missing, Path(download), ivy_settings)
                for jar in missing:
                    if not _has_content(Path(download, jar.file_name), jar):
                        raise SetupError(
                            "a jar is not the one that was expected: its SHA-256 differs; it was not used",
                            jar=jar.coordinate,
                            expected=jar.sha256,
                        )
                    Path(download, jar.file_name).replace(folder / jar.file_name)
        except OSError as error:
            raise SetupError("jars cannot be kept in the user's cache", folder=folder, cause=error) from error
    return [folder / jar.file_name for jar in jars]


def _has_content(file: Path, jar: Jar) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == jar.sha256


def _artifact(jar: Jar) -> str:
    """Return how Ivy names the file of a jar that is not the main one of its version."""
    if not jar.classifier:
        return ""
    return f'<artifact name={quoteattr(jar.artifact)} type="jar" ext="jar" m:classifier={quoteattr(jar.classifier)}/>'


def _download(jars: Collection[Jar], folder: Path, ivy_settings: str | None) -> None:
    dependencies = "".join(
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)} "
        f'transitive="false" conf="default->master">{_artifact(jar)}</dependency>'
        for jar in jars
    )
    module = folder / "ivy.xml"
    module.write_text(
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven"><info organisation="statefleet" module="connectors"/>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )
    (ivy,) = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    java = choose_java_home(os.environ) / "bin" / "java"
    command: list[str | Path] = [
        java,
        "-cp",
        ivy,
        "org.apache.ivy.Main",
        "-warn",
        "-ivy",
        module,
        "-cache",
        folder / "cache",
    ]
    command += ["-types", "jar", "bundle", "-retrieve", folder / "[artifact]-[revision](-[classifier]).[ext]"]
    if ivy_settings is not None:
        command += ["-settings", ivy_settings]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            "jars could not be downloaded: the repository did not send them in time; nothing was started, try again",
            seconds=_DOWNLOAD_DEADLINE_S,
        ) from error
    if done.returncode != 0 or any(not (folder / jar.file_name).exists() for jar in jars):
        raise SetupError(
            "jars could not be downloaded from Maven Central; nothing was started. Behind a proxy, give Java its options with "
            "JDK_JAVA_OPTIONS; for another repository, set `spark.jars.ivySettings` in `configs`; without a network, put the files "
            "into the folder",
            jars=" ".join(jar.coordinate for jar in jars),
            folder=folder.parent,
            cause=" ".join(done.stdout.split())[-600:],
        )

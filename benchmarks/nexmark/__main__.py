"""Run one of Nexmark's stateful queries with its state in the fleet: ``python -m benchmarks.nexmark q5 --events 1000000``.

Events are read from a folder, a micro-batch from each file, and generated there first with ``--events``. The job ends when it has
read them all. After more events arrive, a second run continues where the first stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.nexmark.files import Inputs, count_events, write_end, write_events
from benchmarks.nexmark.generator import Nexmark
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.query import FleetOperators
from benchmarks.nexmark.run import answer, batches_done, start
from coordinator.model.errors import InvalidRequestError
from coordinator.model.text import format_table
from spark_jobs.jobs.console import exit_code_of, job_session, run_to_end
from statefleet.fleet import Fleet, connect


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the job's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nexmark", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("query", choices=list(QUERIES), help="the query")
    parser.add_argument("--folder", type=Path, default=Path("statefleet-data/nexmark"),
                        help="where everything goes that has no place of its own (%(default)s)")  # fmt: skip
    parser.add_argument("--input", type=Path, help="folder of the events (default: below --folder)")
    parser.add_argument("--fleet", help="URI of the fleet, file:// or s3:// (default: below --folder)")
    parser.add_argument("--checkpoint", type=Path, help="the query's checkpoint (default: below --folder)")
    parser.add_argument("--results", type=Path, help="folder of the results as Parquet (default: below --folder)")
    parser.add_argument("--console", action="store_true", help="show what each batch emits instead of keeping it")
    parser.add_argument("--name", help="what the names of the query's states begin with (default: nexmark-QUERY)")
    parser.add_argument("--shards", type=int, help="shards of new states (default: by the cluster's cores)")
    parser.add_argument("--top", type=int, default=10, help="rows of the answer to show (%(default)s)")
    generating = parser.add_argument_group("making events")
    generating.add_argument(
        "--events", type=int, metavar="N", help="make the first N events; nothing is made without it"
    )
    generating.add_argument("--batch-events", type=int, default=100_000, help="events a micro-batch (%(default)s)")
    generating.add_argument("--rate", type=int, default=10_000, help="events a second of event time (%(default)s)")
    generating.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    generating.add_argument("--end", action="store_true", help="end the stream, so that all windows and sessions close")
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace) -> None:
    """Generate the requested events that do not exist yet, and check that there are any.

    Raises
    ------
    InvalidRequestError
        There are no events, or they cannot be continued.
    """
    events = _events(options)
    if options.events is not None:
        _make(options, events)
    if not all(any((events / stream).glob("batch-*.parquet")) for stream in Inputs._fields):
        raise InvalidRequestError(
            "the input folder has no Nexmark events; nothing was run; make some with --events N", folder=str(events)
        )


def _make(options: argparse.Namespace, events: Path) -> None:
    # A query never reads a file again, so existing files are not changed.
    present, batches = count_events(events), len(list((events / Inputs._fields[-1]).glob("batch-*.parquet")))
    if present == options.events + len(Inputs._fields) * options.end:
        return
    if present != batches * options.batch_events:
        raise InvalidRequestError(
            "the events in the input folder cannot be continued: they are in micro-batches of another size, or have come to their "
            "end; nothing was made; ask for the same events, or use another --input or --folder",
            folder=str(events),
            events=present,
            batches=batches,
        )
    nexmark = Nexmark(seed=options.seed, rate=options.rate)
    write_events(events, nexmark, options.events, options.batch_events, first_batch=batches)
    if options.end:
        write_end(events, nexmark, options.events, options.batch_events)


def _events(options: argparse.Namespace) -> Path:
    folder: Path = options.input or options.folder / "events"
    return folder.resolve()


def _report(spark: SparkSession, query: str, results: Path, top: int) -> None:
    table = answer(spark, QUERIES[query], results)
    ordered = table.orderBy(*table.columns[:2])
    print(f"\n{format_table(ordered.columns, ordered.limit(top).collect())}")
    print(f"\n{table.count():,} rows in the answer; what was emitted is in {results}")


def execute(spark: SparkSession, fleet: Fleet, options: argparse.Namespace) -> None:
    """Run a query over the present events, and print its speed and its answer."""
    name, folder, events = options.query, options.folder.resolve(), _events(options)
    checkpoint = (options.checkpoint or folder / f"checkpoint-{name}").resolve()
    results = None if options.console else (options.results or folder / f"results-{name}").resolve()
    todo = count_events(events, batches_done(checkpoint))
    ops = FleetOperators(fleet, options.name or f"nexmark-{name}", options.shards)
    started = time.monotonic()
    query = start(spark, QUERIES[name], ops, events, str(checkpoint), results)
    run_to_end(query, fleet, ops.states[0])
    seconds = time.monotonic() - started
    if results is not None and results.is_dir():
        _report(spark, name, results, options.top)
    print(f"{todo:,} events of all three streams in {seconds:.1f} s: {todo / seconds:,.0f} events/s")
    print(f"state persisted in {', '.join(f'{fleet.uri}/{state}' for state in ops.states)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code."""
    options = parse(argv)

    def job() -> None:
        prepare(options)
        with job_session(f"statefleet-nexmark-{options.query}") as spark:
            fleet = connect(options.fleet or (options.folder.resolve() / "fleet").as_uri())
            print(f"fleet: {fleet.uri}   dashboard: {fleet.dashboard_url()}", flush=True)
            execute(spark, fleet, options)

    return exit_code_of(job)


if __name__ == "__main__":
    sys.exit(main())

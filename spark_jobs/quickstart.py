"""The main job: counts and sums of events per page and five-minute window, with the state in the fleet.

``statefleet quickstart`` (or ``python -m spark_jobs.quickstart``) needs no server: a local Ray, Spark on it through RayDP, files below
one folder as the object store, and a deterministic built-in event source. It ends by itself; a second run continues where the first
stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from humanize import naturalsize
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.text import format_table
from spark_jobs.jobs.console import exit_code_of, job_session, keep_newest, run_to_end
from spark_jobs.jobs.events import EVENT_DDL, write_events
from statefleet.fleet import Fleet, connect

NAME = "page-windows"
_KEYS = ("start", "page")
_COLUMNS = ("start", "page", "events", "amount", "average")


def build(events: Any) -> DataFrame:
    """Return five-minute counts by page of any frame with ``groupBy``: the fleet's stateful frame, a stream, a batch."""
    grouped = events.groupBy(F.window("ts", "5 minutes"), "page").agg(
        F.count("*").alias("events"), F.sum("amount").alias("amount"), F.avg("amount").alias("average")
    )
    result: DataFrame = grouped.select(F.col("window.start").alias("start"), "page", "events", "amount", "average")
    return result


def _parse(argv: Sequence[str] | None, program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("statefleet-data/quickstart"),
                        help="where events, state, checkpoint and results go (%(default)s)")  # fmt: skip
    parser.add_argument("--store", help="URI of another object store for the state, such as s3://bucket/prefix")
    parser.add_argument("--batches", type=int, default=12, help="batches of this run (%(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="events a batch (%(default)s)")
    parser.add_argument("--shards", type=int, help="shards of a new state (default: by the cluster's cores)")
    parser.add_argument(
        "--executors", type=int, default=1, help="Spark executors, on a cluster one a node (%(default)s)"
    )
    parser.add_argument("--linger", type=float, default=0, metavar="SECONDS",
                        help="keep the fleet and its dashboard up after the job (%(default)s)")  # fmt: skip
    return parser.parse_args(argv)


def _done_batches(folder: Path) -> int:
    """Return the number of batches of earlier runs, by the checkpoint's newest commit: Spark deletes all but the last hundred."""
    commits = (folder / "checkpoint" / "commits").glob("*")
    return max((int(file.name) + 1 for file in commits if file.name.isdigit()), default=0)


def _run(spark: SparkSession, fleet: Fleet, folder: Path, options: argparse.Namespace) -> int:
    stream = spark.readStream.schema(EVENT_DDL).option("maxFilesPerTrigger", 1).parquet(str(folder / "events"))
    marked = stream.withWatermark("ts", "2 minutes")
    results = build(fleet.stateful(marked, name=NAME, outputMode="update", shards=options.shards))
    table = folder / "results.parquet"
    writer = results.writeStream.outputMode("update").foreachBatch(lambda rows, _: keep_newest(rows, table, _KEYS))
    checkpoint = str(folder / "checkpoint")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).queryName(NAME).start()
    return run_to_end(query, fleet, NAME)


def _report(fleet: Fleet, folder: Path, rows: int, seconds: float) -> None:
    table = (
        pq.read_table(folder / "results.parquet")
        .select(list(_COLUMNS))
        .sort_by([("start", "descending"), ("page", "ascending")])
    )
    print("\nNewest windows")
    print(format_table(_COLUMNS, [tuple(row.values()) for row in table.slice(0, 12).to_pylist()]))
    events = sum(table.column("events").to_pylist())
    print(f"\n{events:,} events in {table.num_rows:,} groups so far; this run read {rows:,} rows in {seconds:.1f} s")
    (query,) = [status for status in fleet.status()["queries"] if status["name"] == NAME]
    print(f"state: {query['state_rows']:,} open groups, {naturalsize(query['state_bytes'])} in {query['num_shards']} shards, "
          f"version {query['version']}; {query['rows_late']:,} late groups dropped")  # fmt: skip
    print(f"persisted in: {fleet.uri}/{NAME}   results: {folder / 'results.parquet'}")
    print(f"dashboard: {fleet.dashboard_url()} (while the fleet is up)")
    print("\nTry next\n"
          "  the same command again            goes on from the checkpoint\n"
          "  ... --linger 300                  keeps the dashboard up to look at\n"
          "  python -m spark_jobs.page_hits --help      the same on your own access logs")  # fmt: skip


def main(argv: Sequence[str] | None = None, program: str = "python -m spark_jobs.quickstart") -> int:
    """Run the job; return the exit code. The help is of a program of this name."""
    options = _parse(argv, program)
    folder = options.folder.resolve()
    done = _done_batches(folder)
    write_events(folder / "events", range(done, done + options.batches), options.rows)
    print(f"folder: {folder}")
    print(f"resuming after {done} batches" if done else "starting; Ray and Spark take about half a minute", flush=True)

    def job() -> None:
        with job_session("statefleet-quickstart", num_executors=options.executors) as spark:
            fleet = connect(options.store or (folder / "fleet").as_uri())
            print(f"fleet: {fleet.uri}   dashboard: {fleet.dashboard_url()}", flush=True)
            started = time.monotonic()
            rows = _run(spark, fleet, folder, options)
            _report(fleet, folder, rows, time.monotonic() - started)
            if options.linger:
                print(f"\nstaying for {options.linger:.0f} s; Ctrl-C ends it", flush=True)
                time.sleep(options.linger)

    return exit_code_of(job)


if __name__ == "__main__":
    sys.exit(main())

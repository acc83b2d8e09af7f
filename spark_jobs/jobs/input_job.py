"""The frame of the jobs that read a folder or a topic of Kafka: parse, keep malformed lines, run through the fleet, print a table."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.text import format_table
from spark_jobs.jobs.console import add_job_options, exit_code_of, job_session, keep_newest, run_to_end, store_uri
from spark_jobs.jobs.kafka import PACKAGE, read_topic, send_newest
from spark_jobs.plan.bounds import UnboundedStateWarning
from statefleet.fleet import Fleet, connect

#: Columns that a parsed DataFrame has besides its own: the raw line, and why it is malformed (null: it is well-formed).
MALFORMED_COLUMNS = ("raw", "reason")


@dataclass(frozen=True)
class InputJob:
    """A job that reads a folder, or a topic.

    Attributes
    ----------
    name
        Default name of its state and folder.
    description
        Its line of help.
    read
        Function that returns the parsed stream of an input path, with a number of files a batch: own columns, ``raw`` and ``reason``.
    build
        Function that returns the aggregation of any frame with ``groupBy``.
    keys
        Columns of the result that name a group.
    order_by
        Column by which the table at the end is sorted, largest first.
    parse
        Function that parses a DataFrame with ``value``, a line a row, into what `read` returns. With it the job reads Kafka as well.
    """

    name: str
    description: str
    read: Callable[[SparkSession, str, int], DataFrame]
    build: Callable[[Any], DataFrame]
    keys: tuple[str, ...]
    order_by: str
    parse: Callable[[DataFrame], DataFrame] | None = None


def _keep_malformed(batch: DataFrame, batch_id: int, folder: Path) -> None:
    """Write a batch's malformed lines with their reasons; a repeated batch overwrites its own file."""
    batch.select(*MALFORMED_COLUMNS).where("reason IS NOT NULL").write.mode("overwrite").parquet(
        str(folder / f"batch={batch_id}")
    )


def execute(spark: SparkSession, fleet: Fleet, job: InputJob, options: argparse.Namespace) -> tuple[int, int]:
    """Run a job over all present input; return (rows read by this run, malformed lines written so far)."""
    folder = options.folder.resolve()
    parsed = _read(spark, job, options)
    good = parsed.where("reason IS NULL").drop(*MALFORMED_COLUMNS)
    with warnings.catch_warnings():
        # The input ends, and so do its groups.
        warnings.simplefilter("ignore", UnboundedStateWarning)
        results = job.build(fleet.stateful(good, name=options.name, outputMode="update", shards=options.shards))
    table = folder / "results.parquet"

    def keep(rows: DataFrame, batch_id: int) -> None:
        keep_newest(rows, table, job.keys)
        if options.to is not None:
            send_newest(rows, batch_id, options.kafka, options.to, job.keys)

    query = (
        results.writeStream.outputMode("update")
        .foreachBatch(keep)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    malformed_query = (
        parsed.writeStream.foreachBatch(lambda rows, number: _keep_malformed(rows, number, folder / "malformed"))
        .option("checkpointLocation", str(folder / "checkpoint-malformed"))
        .trigger(availableNow=True)
        .start()
    )
    rows = run_to_end(query, fleet, options.name)
    malformed_query.awaitTermination()
    malformed = spark.read.parquet(str(folder / "malformed")).count() if (folder / "malformed").is_dir() else 0
    return rows, malformed


def _read(spark: SparkSession, job: InputJob, options: argparse.Namespace) -> DataFrame:
    if options.kafka is None:
        return job.read(spark, options.input, options.files_per_trigger)
    assert job.parse is not None, "only a job with it has the option"
    return job.parse(read_topic(spark, options.kafka, options.input, options.records_per_trigger))


def _add_kafka_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kafka", metavar="SERVERS", help="read Kafka: its bootstrap servers; the input is a topic, a line a record"
    )
    parser.add_argument(
        "--records-per-trigger", type=int, default=100_000, help="Kafka's records a batch (%(default)s)"
    )
    parser.add_argument(
        "--to", metavar="TOPIC", help="send changed groups to this topic as well, as JSON (docs/kafka.md)"
    )


def run_job(job: InputJob, argv: Sequence[str] | None) -> int:
    """Run a job by its command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m spark_jobs.{job.name.replace('-', '_')}", description=job.description
    )
    add_job_options(parser, job.name)
    parser.set_defaults(kafka=None, to=None)
    if job.parse is not None:
        _add_kafka_options(parser)
    options = parser.parse_args(argv)
    if options.to is not None and options.kafka is None:
        parser.error("--to needs --kafka")

    def run() -> None:
        configs = {} if options.kafka is None else {"spark.jars.packages": PACKAGE}
        with job_session(f"statefleet-{job.name}", configs=configs) as spark:
            fleet = connect(store_uri(options))
            print(f"fleet: {fleet.uri}   dashboard: {fleet.dashboard_url()}", flush=True)
            rows, malformed = execute(spark, fleet, job, options)
            _report(job, options, fleet, rows, malformed)

    return exit_code_of(run)


def _report(job: InputJob, options: argparse.Namespace, fleet: Fleet, rows: int, malformed: int) -> None:
    file = options.folder.resolve() / "results.parquet"
    if file.exists():
        table = pq.read_table(file).sort_by([(job.order_by, "descending")])
        print(
            format_table(table.column_names, [tuple(row.values()) for row in table.slice(0, options.top).to_pylist()])
        )
        print(f"\n{table.num_rows:,} groups in {file}")
    print(
        f"{rows:,} rows read by this run, malformed ones included; {malformed:,} malformed lines kept so far in "
        f"{options.folder.resolve() / 'malformed'}"
    )
    print(f"state persisted in {fleet.uri}/{options.name}")


def reason(*checks: tuple[Any, str]) -> Any:
    """Return a column with the text of the first check that holds, null if none does."""
    result = F.lit(None).cast("string")
    for condition, text in reversed(checks):
        result = F.when(condition, F.lit(text)).otherwise(result)
    return result

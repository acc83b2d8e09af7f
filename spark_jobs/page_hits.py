"""Hits and bytes per page and hour of web access logs (Apache combined format), with the state in the fleet."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pyspark
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.text import format_table
from spark_jobs.jobs.console import exit_code_of, job_session, keep_newest, run_to_end
from spark_jobs.jvm.spark_lines import line_of
from spark_jobs.plan.operator_rules import UnboundedStateWarning
from statefleet.fleet import Fleet, connect

#: host ident user [time] "method path protocol" status bytes "referer" "agent". The quoted parts repeat possessively (``*+``):
#: otherwise Java recurses once for each character, and a long agent, which any client can send, would overflow the executor's stack.
#: A line may end anywhere from the referer on, as lines that were cut to a length do; the fields before are complete.
_LINE = (
    r'^(\S+) (\S+) (\S+) \[([^\]]+)\] "(\S+) (\S+)(?: ([^"]*))?" (\d{3}) (\d+|-)'
    r'(?: "((?:[^"\\]|\\.)*+)(?:\\?$|"(?:$| "((?:[^"\\]|\\.)*+)(?:\\?$|"))))?\s*$'
)
_TIME = "dd/MMM/yyyy:HH:mm:ss Z"
#: Spark's connector for the Spark that is installed, as ``spark.jars.packages`` names it.
_CONNECTOR = "2.12:3.5.7" if line_of(pyspark.__version__) == "spark35" else "2.13:4.2.0"
PACKAGE = f"org.apache.spark:spark-sql-kafka-0-10_{_CONNECTOR}"
NAME = "page-hits"
_KEYS = ("hour", "path")
#: Columns of a parsed line besides its own: the raw line, and why it is malformed (null: it is well-formed).
_MALFORMED_COLUMNS = ("raw", "reason")


def parse_log(lines: DataFrame) -> DataFrame:
    """Return columns client, ts, method, path, status, bytes of a DataFrame with ``value``; and raw, reason.

    A line that is not in combined (or common) format, whose end may be missing, or has an impossible time, gets a reason instead of
    columns.
    """

    def group(number: int) -> Column:
        return F.regexp_extract("value", _LINE, number)

    parsed = lines.select(
        F.col("value").alias("raw"),
        group(1).alias("client"),
        # try_to_timestamp: an impossible date is a malformed line, not the end of the job.
        F.try_to_timestamp(group(4), F.lit(_TIME)).alias("ts"),
        group(5).alias("method"),
        F.regexp_replace(group(6), r"[?#].*$", "").alias("path"),
        group(8).alias("status"),
        group(9).alias("bytes"),
    )
    # What is not a number, such as "-" (nothing sent), becomes null, in ANSI mode, too.
    numbers = {name: F.expr(f"try_cast({name} AS {kind})") for name, kind in (("status", "INT"), ("bytes", "BIGINT"))}
    reason = F.when(F.col("client") == "", "not in combined log format").when(
        F.col("ts").isNull(), "time cannot be read"
    )
    return parsed.withColumns(numbers | {"reason": reason})


def read_log(spark: SparkSession, path: str, files_per_trigger: int) -> DataFrame:
    """Return a streaming DataFrame of a file or folder of access logs, parsed."""
    return parse_log(spark.readStream.option("maxFilesPerTrigger", files_per_trigger).text(path))


def read_topic(spark: SparkSession, servers: str, topic: str, records_per_trigger: int) -> DataFrame:
    """Return a streaming DataFrame of a topic from its first record on, with each record's ``value`` as a string."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", records_per_trigger)
    return reader.load().select(F.col("value").cast("string").alias("value"))


def send_newest(rows: DataFrame, batch_id: int, servers: str, topic: str, keys: Sequence[str]) -> None:
    """Send a batch's changed groups to a topic, as JSON: the key is the group, the value has all columns and ``batch``.

    Spark's Kafka sink has no transactions: a batch that is repeated sends its records again. They are the same records, so a reader
    counts each group once if it takes the record with the largest ``batch`` of each key. Not the last one: a task of a killed driver
    may send its records late, after those of a later batch.
    """
    records = rows.select(
        F.to_json(F.struct(*keys)).alias("key"),
        F.to_json(F.struct("*", F.lit(batch_id).cast("bigint").alias("batch"))).alias("value"),
    )
    records.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", topic).save()


def build(requests: Any) -> DataFrame:
    """Return hits by page and hour.

    Without a watermark: log files are read in any order, and a watermark would drop late ones.
    """
    grouped = requests.groupBy(F.window("ts", "1 hour"), "path").agg(
        F.count("*").alias("hits"),
        F.count_if(F.col("status") >= 400).alias("errors"),
        F.sum("bytes").alias("bytes"),
    )
    result: DataFrame = grouped.select(F.col("window.start").alias("hour"), "path", "hits", "errors", "bytes")
    return result


def _keep_malformed(batch: DataFrame, batch_id: int, folder: Path) -> None:
    """Write a batch's malformed lines with their reasons; a repeated batch overwrites its own file."""
    batch.select(*_MALFORMED_COLUMNS).where("reason IS NOT NULL").write.mode("overwrite").parquet(
        str(folder / f"batch={batch_id}")
    )


def execute(spark: SparkSession, fleet: Fleet, options: argparse.Namespace) -> tuple[int, int]:
    """Run the job over all present input; return (rows read by this run, malformed lines written so far)."""
    folder = options.folder.resolve()
    if options.kafka is None:
        parsed = read_log(spark, options.input, options.files_per_trigger)
    else:
        parsed = parse_log(read_topic(spark, options.kafka, options.input, options.records_per_trigger))
    good = parsed.where("reason IS NULL").drop(*_MALFORMED_COLUMNS)
    with warnings.catch_warnings():
        # The input ends, and so do its groups.
        warnings.simplefilter("ignore", UnboundedStateWarning)
        results = build(fleet.stateful(good, name=options.name, outputMode="update", shards=options.shards))
    table = folder / "results.parquet"

    def keep(rows: DataFrame, batch_id: int) -> None:
        keep_newest(rows, table, _KEYS)
        if options.to is not None:
            send_newest(rows, batch_id, options.kafka, options.to, _KEYS)

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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spark_jobs.page_hits", description=__doc__)
    parser.add_argument("input", help="file or folder to read, as a path or URI")
    parser.add_argument("--folder", type=Path, default=Path(f"statefleet-data/{NAME}"),
                        help="where checkpoint and malformed lines go, and the state without --store (%(default)s)")  # fmt: skip
    parser.add_argument("--store", help="URI of the fleet, file:// or s3:// (default: below --folder)")
    parser.add_argument("--name", default=NAME, help="name of the state (%(default)s)")
    parser.add_argument("--shards", type=int, help="shards of a new state (default: by the cluster's cores)")
    parser.add_argument("--files-per-trigger", type=int, default=1, help="input files a batch (%(default)s)")
    parser.add_argument("--top", type=int, default=10, help="rows of the table at the end (%(default)s)")
    parser.add_argument(
        "--kafka", metavar="SERVERS", help="read Kafka: its bootstrap servers; the input is a topic, a line a record"
    )
    parser.add_argument(
        "--records-per-trigger", type=int, default=100_000, help="Kafka's records a batch (%(default)s)"
    )
    parser.add_argument(
        "--to", metavar="TOPIC", help="send changed groups to this topic as well, as JSON (docs/kafka.md)"
    )
    options = parser.parse_args(argv)
    if options.to is not None and options.kafka is None:
        parser.error("--to needs --kafka")
    return options


def _report(options: argparse.Namespace, fleet: Fleet, rows: int, malformed: int) -> None:
    file = options.folder.resolve() / "results.parquet"
    if file.exists():
        table = pq.read_table(file).sort_by([("hits", "descending")])
        print(
            format_table(table.column_names, [tuple(row.values()) for row in table.slice(0, options.top).to_pylist()])
        )
        print(f"\n{table.num_rows:,} groups in {file}")
    print(
        f"{rows:,} rows read by this run, malformed ones included; {malformed:,} malformed lines kept so far in "
        f"{options.folder.resolve() / 'malformed'}"
    )
    print(f"state persisted in {fleet.uri}/{options.name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code."""
    options = _parse(argv)

    def run() -> None:
        configs = {} if options.kafka is None else {"spark.jars.packages": PACKAGE}
        with job_session(f"statefleet-{NAME}", configs=configs) as spark:
            fleet = connect(options.store or (options.folder.resolve() / "fleet").as_uri())
            print(f"fleet: {fleet.uri}   dashboard: {fleet.dashboard_url()}", flush=True)
            rows, malformed = execute(spark, fleet, options)
            _report(options, fleet, rows, malformed)

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())

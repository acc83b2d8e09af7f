"""Shared by all jobs: a line of progress for each batch, and the table of results."""

from __future__ import annotations

import datetime as dt
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from humanize import naturalsize
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import TimestampType

from coordinator.model.errors import StateStoreError
from spark_jobs.jobs.stream_files import write_file
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import Fleet


def error_text(error: Exception) -> str:
    """Return an error in one line: this project's error that a failed task raised, if any, else Spark's own message.

    Spark has logged the whole error, with every stack, by the time the driver sees it.
    """
    text = str(error)
    own_error = re.search(rf"{re.escape(StateStoreError.__module__)}\.\w+: (.+)", text)
    return own_error.group(1) if own_error else text.strip().split("\n")[0]


def exit_code_of(job: Callable[[], None]) -> int:
    """Run a job; return the exit code: 1 after an error, whose text is printed, and 130 after Ctrl-C."""
    try:
        job()
    except KeyboardInterrupt:
        return 130
    except (StateStoreError, PySparkException) as error:
        print(f"error: {error_text(error)}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def job_session(
    name: str, *, num_executors: int = 1, configs: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Start the session of a job, and stop it at the end. A job that fails before has none, and stops no other one."""
    try:
        yield start_session(name, num_executors=num_executors, configs=configs)
    finally:
        stop_session()


def _watermark_text(watermark_ms: int | None) -> str:
    if not watermark_ms:
        return "none yet" if watermark_ms == 0 else "none"
    return dt.datetime.fromtimestamp(watermark_ms / 1000, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _print_batch(progress: Any, fleet: Fleet, name: str) -> None:
    seconds = progress["durationMs"]["triggerExecution"] / 1000
    rows = progress["numInputRows"]
    line = f"batch {progress['batchId']:>4}  {rows:>9,} rows  {rows / max(seconds, 0.001):>10,.0f} rows/s  {seconds:6.2f} s"
    for query in fleet.status()["queries"]:
        if query["name"] == name:
            line += (
                f"  state {query['state_rows']:>9,} rows {naturalsize(query['state_bytes']):>9}"
                f"  watermark {_watermark_text(query['watermark_ms'])}  late {query['rows_late']:,}"
            )
    print(line, flush=True)


def run_to_end(query: StreamingQuery, fleet: Fleet, name: str) -> int:
    """Print a line for each batch until the query ends by itself; return the number of rows that it read.

    Raises
    ------
    pyspark.errors.StreamingQueryException
        The query failed.
    """
    printed: set[int] = set()
    rows = 0
    while True:
        active = query.isActive
        for progress in query.recentProgress:
            if progress["batchId"] not in printed and progress["numInputRows"] > 0:
                printed.add(progress["batchId"])
                rows += progress["numInputRows"]
                _print_batch(progress, fleet, name)
        if not active:
            break
        time.sleep(0.2)
    query.awaitTermination()  # raises the query's error
    return rows


def keep_newest(results: DataFrame, table: Path, keys: Sequence[str]) -> None:
    """Merge a batch's changed groups into a Parquet table of results (newest row of each group).

    Repeating a batch changes nothing: the rows of its groups are replaced, not added. Timestamps are stored in UTC.
    """
    changed = _collect_arrow(results)
    if changed.num_rows == 0:
        return
    if table.exists():
        changed = newest_rows(pa.concat_tables([pq.read_table(table), changed]), keys)
    table.parent.mkdir(parents=True, exist_ok=True)
    write_file(changed, table)


def _collect_arrow(results: DataFrame) -> pa.Table:
    """Return rows as an Arrow table of the DataFrame's types.

    ``collect`` turns timestamps into the driver's local time without its zone, in which one hour a year occurs twice; so they are
    collected as microseconds.
    """
    columns = [
        F.unix_micros(results[field.name]).alias(field.name)
        if isinstance(field.dataType, TimestampType)
        else results[field.name]
        for field in results.schema.fields
    ]
    rows = [row.asDict() for row in results.select(columns).collect()]
    return pa.Table.from_pylist(rows, schema=SPARK.arrow_schema(results.schema))


def newest_rows(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the last row of each group, in order. Null keys are a group."""
    numbered = table.select(list(keys)).append_column("row", pa.array(range(table.num_rows), pa.int64()))
    kept = numbered.rename_columns([*(f"key{i}" for i in range(len(keys))), "row"])
    last = kept.group_by(kept.column_names[:-1]).aggregate([("row", "max")])
    return table.take(last.sort_by("row_max").column("row_max"))

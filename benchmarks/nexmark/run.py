"""Run a Nexmark query over a folder of events until it has read all of them, and tell its answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.nexmark.files import read_stream
from benchmarks.nexmark.query import Operators, Query

__all__ = ["answer", "batches_done", "start"]

#: Column of a row's micro-batch among the results.
_BATCH: Final = "batch"


def start(
    spark: SparkSession, query: Query, ops: Operators, events: Path, checkpoint: str, results: Path | None
) -> StreamingQuery:
    """Start a query over all events there are now; it ends by itself.

    Parameters
    ----------
    events
        Folder of :func:`benchmarks.nexmark.files.write_events`.
    checkpoint
        The query's checkpoint; the names of its states belong to it.
    results
        Folder for what each micro-batch emits, as Parquet; None: it is shown on the console.

    Raises
    ------
    InvalidRequestError, StateMismatchError
        The query does not fit the states of these names.
    """
    emitted = query.build(ops, read_stream(spark, events))
    writer = emitted.writeStream.outputMode(query.mode).queryName(query.name).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", checkpoint)
    return (_to_console(writer) if results is None else _to_folder(writer, results)).start()


def _to_console(writer: DataStreamWriter) -> DataStreamWriter:
    return writer.format("console").option("numRows", 10)


def _to_folder(writer: DataStreamWriter, results: Path) -> DataStreamWriter:
    def keep(rows: DataFrame, batch: int) -> None:
        # A batch that is repeated writes its own folder anew.
        rows.write.mode("overwrite").parquet(str(results / f"{_BATCH}={batch}"))

    return writer.foreachBatch(keep)


def batches_done(checkpoint: Path) -> int:
    """Batches of events that a checkpoint has finished: files of each stream, of which there is one in a micro-batch with data.

    By the offsets of the newest finished micro-batch, as Spark has micro-batches without data, too.
    """
    finished = [int(file.name) for file in (checkpoint / "commits").glob("*") if file.name.isdigit()]
    if not finished:
        return 0
    # A version, what Spark planned the micro-batch with, and a line a source.
    _, _, *sources = (checkpoint / "offsets" / str(max(finished))).read_text().splitlines()
    return max(int(json.loads(source)["logOffset"]) + 1 for source in sources if source != "-")


def _table(spark: SparkSession, query: Query, results: Path) -> DataFrame:
    """The table that a query's emissions make: the last row of each key."""
    rows = spark.read.parquet(str(results))
    newest_first = Window.partitionBy(*query.key).orderBy(F.desc(_BATCH))
    return rows.withColumn("place", F.row_number().over(newest_first)).where("place = 1").drop("place", _BATCH)


def answer(spark: SparkSession, query: Query, results: Path) -> DataFrame:
    """The query's answer, as its oracle gives it (:mod:`benchmarks.nexmark.oracle`), from what it has emitted so far."""
    return query.finish(_table(spark, query, results))

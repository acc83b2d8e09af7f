"""Run a Nexmark query over a folder of events until it has read all of them, and compute its answer."""

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

#: Column of a row's micro-batch among the results.
_BATCH: Final = "batch"


def start(
    spark: SparkSession, query: Query, ops: Operators, events: Path, checkpoint: str, results: Path | None
) -> StreamingQuery:
    """Start a query over all present events; it ends by itself.

    Parameters
    ----------
    events
        Folder of :func:`benchmarks.nexmark.files.write_events`.
    checkpoint
        The query's checkpoint; the names of its states belong to it.
    results
        Folder for the rows of each micro-batch, as Parquet; None to show them on the console.

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
        # A repeated batch replaces its own folder.
        rows.write.mode("overwrite").parquet(str(results / f"{_BATCH}={batch}"))

    return writer.foreachBatch(keep)


def batches_done(checkpoint: Path) -> int:
    """Return how many batches of events a checkpoint has finished: the number of files of each stream that were read.

    It is computed from the offsets of the newest finished micro-batch, as Spark also has micro-batches without data.
    """
    finished = [int(file.name) for file in (checkpoint / "commits").glob("*") if file.name.isdigit()]
    if not finished:
        return 0
    # A version, the metadata of Spark's plan, and a line for each source.
    _, _, *sources = (checkpoint / "offsets" / str(max(finished))).read_text().splitlines()
    return max(int(json.loads(source)["logOffset"]) + 1 for source in sources if source != "-")


def _table(spark: SparkSession, query: Query, results: Path) -> DataFrame:
    """Return the table of a query's results: the last emitted row of each key."""
    rows = spark.read.parquet(str(results))
    newest_first = Window.partitionBy(*query.key).orderBy(F.desc(_BATCH))
    return rows.withColumn("place", F.row_number().over(newest_first)).where("place = 1").drop("place", _BATCH)


def answer(spark: SparkSession, query: Query, results: Path) -> DataFrame:
    """Return the query's answer from the rows emitted so far, in the form of its oracle's (:mod:`benchmarks.nexmark.oracle`)."""
    return query.finish(_table(spark, query, results))

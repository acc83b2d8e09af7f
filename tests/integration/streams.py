"""Feed a streaming query batch by batch and see what it emits; a batch is a folder of one Parquet file."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from spark_jobs.jobs.stream_files import write_file
from statefleet.fleet import Fleet

#: Streaming DataFrames by name.
Streams = dict[str, DataFrame]
#: Rows up to which the batch after one is small, and of one task.
FEW_ROWS = 10_000
_numbers = itertools.count()
_FIRST_S = 1_700_000_000


def short_list(cases: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """Return a test's parameters: the `kept` cases run with every change, the others only with `./run replay`."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.replay) for case in cases]


def shuffled(rows: DataFrame, number: str) -> DataFrame:
    """Return rows that take two stages in every batch, as Spark cannot be sure that a task which is tried again reads the same.

    Parameters
    ----------
    number
        A column of numbers that are not below zero.
    """
    return rows.where(f"rand() < 2 + {number}")


class Feed:
    """A streaming source fed by hand.

    Parameters
    ----------
    folder
        Folder of the input files, empty at first.
    schema
        Arrow schema of the rows.
    spark
        Session, if not the one that the process has.
    """

    def __init__(self, folder: Path, schema: pa.Schema, spark: SparkSession | None = None) -> None:
        self.spark, self.folder, self.schema = spark or SparkSession.builder.getOrCreate(), folder, schema
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write another input file."""
        columns = list(zip(*rows, strict=True)) if rows else [[] for _ in self.schema]
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)], schema=self.schema)
        number = next(_numbers)
        write_file(table, self.folder / f"{number:06d}.parquet", _FIRST_S + number)

    @cached_property
    def _sparks_schema(self) -> StructType:
        empty = self.folder.parent / f"{self.folder.name}-schema.parquet"
        pq.write_table(self.schema.empty_table(), empty)
        return self.spark.read.parquet(str(empty)).schema

    def stream(self) -> DataFrame:
        """Return the rows as a streaming DataFrame, a file a batch."""
        reader = self.spark.readStream.schema(self._sparks_schema).option("maxFilesPerTrigger", 1)
        return reader.option("pathGlobFilter", "*.parquet").parquet(str(self.folder))

    def batch(self) -> DataFrame:
        """Return all rows so far as a batch DataFrame."""
        return self.spark.read.schema(self._sparks_schema).parquet(str(self.folder))


class Run:
    """A running query whose emitted rows are kept per batch; leaving it as a context stops it.

    Parameters
    ----------
    frame
        What to run.
    mode
        Output mode given to Spark.
    checkpoint
        Checkpoint folder.
    before_batch, on_batch
        Called with the number of each batch before its rows are read, and after.
    available_now
        Whether it ends by itself with the input that there is.
    """

    def __init__(
        self,
        frame: DataFrame,
        mode: str,
        checkpoint: Path,
        *,
        before_batch: Callable[[int], None] | None = None,
        on_batch: Callable[[int], None] | None = None,
        available_now: bool = False,
    ) -> None:
        batches = self.batches = dict[int, list[Row]]()
        self._ends = available_now

        # Not of the run itself: Java would hold what holds the query, and neither side's garbage collection sees the other's half.
        def keep(emitted: DataFrame, batch_id: int) -> None:
            if before_batch is not None:
                before_batch(batch_id)
            batches[batch_id] = emitted.collect()
            if on_batch is not None:
                on_batch(batch_id)

        writer = frame.writeStream.outputMode(mode).foreachBatch(keep)
        if available_now:
            writer = writer.trigger(availableNow=True)
        self.query: StreamingQuery = writer.option("checkpointLocation", str(checkpoint)).start()

    def wait(self) -> None:
        """Wait until all input so far is processed."""
        if self._ends:
            self.query.awaitTermination()
        else:
            self.query.processAllAvailable()

    def take(self) -> list[Row]:
        """Return the rows emitted since the last call, of all batches, in order; wait for the input so far."""
        self.wait()
        rows = [row for batch in sorted(self.batches) for row in self.batches[batch]]
        self.batches.clear()
        return rows

    def take_batches(self) -> dict[int, list[tuple[Any, ...]]]:
        """Return the rows of each batch since the last call, sorted by their text; wait for the input so far."""
        self.wait()
        rows_by_batch = {
            batch: sorted((tuple(row) for row in rows), key=repr) for batch, rows in sorted(self.batches.items())
        }
        self.batches.clear()
        return rows_by_batch

    def states(self) -> dict[int, list[tuple[int, ...]]]:
        """Return each batch's (total, updated, removed, late) rows of every stateful operator, by Spark's progress."""
        names = ("numRowsTotal", "numRowsUpdated", "numRowsRemoved", "numRowsDroppedByWatermark")
        return {
            progress["batchId"]: [tuple(operator[name] for name in names) for operator in progress["stateOperators"]]
            for progress in self.query.recentProgress
            # A trigger that ran no batch reports the last one's state once more.
            if "addBatch" in progress["durationMs"]
        }

    def stop(self) -> None:
        self.query.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def lose_store_actors(fleet: Fleet) -> None:
    """Kill all store actors of a fleet that live; Ray starts them again."""
    for actor in fleet.status()["store_actors"]:
        if actor["alive"]:
            os.kill(actor["pid"], signal.SIGKILL)


Running = TypeVar("Running", StreamingQuery, list[Run])


@contextmanager
def stopping(running: Running) -> Iterator[Running]:
    """Stop a query, or each of a list, at the end of a block."""
    try:
        yield running
    finally:
        for query in running if isinstance(running, list) else [running]:
            query.stop()

"""Feed a streaming query batch by batch and see what it emits; a batch is a folder of one Parquet file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

_numbers = itertools.count()


def short_list(cases: Iterable[str], kept: Container[str]) -> list[Any]:
    """Parameters of a test: the cases that every change's tests have, and the others, which only `./run replay` has."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.replay) for case in cases]


class Feed:
    """A streaming source fed by hand.

    Parameters
    ----------
    spark
        Session.
    folder
        Folder of the input files, empty at first.
    schema
        Arrow schema of the rows.
    """

    def __init__(self, spark: SparkSession, folder: Path, schema: pa.Schema) -> None:
        self.spark, self.folder, self.schema = spark, folder, schema
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Make one more input file."""
        columns = list(zip(*rows, strict=True)) if rows else [[] for _ in self.schema]
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)], schema=self.schema)
        file = self.folder / f"{next(_numbers):06d}.parquet"
        temporary = file.with_suffix(".tmp")
        pq.write_table(table, temporary)
        temporary.rename(file)

    def _ddl(self) -> Any:
        empty = self.folder.parent / f"{self.folder.name}-schema.parquet"
        if not empty.exists():
            pq.write_table(self.schema.empty_table(), empty)
        return self.spark.read.parquet(str(empty)).schema

    def stream(self) -> DataFrame:
        """The rows as a streaming DataFrame, one file a batch."""
        reader = self.spark.readStream.schema(self._ddl()).option("maxFilesPerTrigger", 1)
        return reader.option("pathGlobFilter", "*.parquet").parquet(str(self.folder))

    def batch(self) -> DataFrame:
        """All rows so far as a batch DataFrame."""
        return self.spark.read.schema(self._ddl()).parquet(str(self.folder))


class Run:
    """A running query whose emitted rows are kept per batch.

    Parameters
    ----------
    frame
        What to run.
    mode
        Output mode given to Spark.
    checkpoint
        Checkpoint folder.
    """

    def __init__(
        self, frame: DataFrame, mode: str, checkpoint: Path, *, on_batch: Callable[[int], None] | None = None
    ) -> None:
        self.batches: dict[int, list[Row]] = {}

        def keep(emitted: DataFrame, batch_id: int) -> None:
            self.batches[batch_id] = emitted.collect()
            if on_batch is not None:
                on_batch(batch_id)

        writer = frame.writeStream.outputMode(mode).foreachBatch(keep)
        self.query: StreamingQuery = writer.option("checkpointLocation", str(checkpoint)).start()

    def wait(self) -> None:
        """Until all input so far is done."""
        self.query.processAllAvailable()

    def take(self) -> list[Row]:
        """Rows emitted since the last call, of all batches, in order; waits for the input so far."""
        self.wait()
        rows = [row for batch in sorted(self.batches) for row in self.batches[batch]]
        self.batches.clear()
        return rows

    def stop(self) -> None:
        self.query.stop()

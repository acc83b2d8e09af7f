"""Nexmark's streams as folders of Parquet files: a file for each stream and micro-batch, in an order that Spark's file source keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from benchmarks.nexmark.generator import AUCTIONS, BIDS, PERSONS, Events, Nexmark
from coordinator.model.errors import InvalidRequestError
from spark_jobs.jobs.stream_files import write_file

_SCHEMAS: Final = Events(PERSONS, AUCTIONS, BIDS)
#: Modification time of micro-batch 0, 2001-09-09 01:46:40 UTC; each further batch is a second younger.
_EPOCH_S: Final = 1_000_000_000


def write_events(folder: Path, nexmark: Nexmark, events: int, batch_events: int) -> None:
    """Write events as micro-batches of `batch_events` events of all three streams together.

    Raises
    ------
    InvalidRequestError
        A batch has no or too many events.
    """
    if events < 0 or batch_events < 1:
        raise InvalidRequestError(
            "micro-batches need at least one event; nothing was written", batch_events=batch_events
        )
    for batch, first in enumerate(range(0, events, batch_events)):
        write_batch(folder, batch, nexmark.events(first, min(first + batch_events, events)))


def write_batch(folder: Path, batch: int, events: Events) -> None:
    """Write a micro-batch as a file in ``persons/``, ``auctions/`` and ``bids/``, atomically; existing files are replaced.

    A file's name and modification time come from its number, so Spark's file source with ``maxFilesPerTrigger=1`` reads batch `n`
    as its micro-batch `n`, from all three folders at once, also when files are added while it runs. A stream that has no event in
    a batch gets a file without rows.
    """
    for name, rows in events._asdict().items():
        stream = folder / name
        stream.mkdir(parents=True, exist_ok=True)
        write_file(pa.table(rows), stream / f"batch-{batch:08d}.parquet", _EPOCH_S + batch)


def read_stream(spark: SparkSession, folder: Path) -> Events:
    """Return all events that :func:`write_events` has written as streams, with a file of each for every micro-batch."""
    reader = spark.readStream.option("maxFilesPerTrigger", 1)
    return Events(
        *(
            reader.schema(from_arrow_schema(schema)).parquet(str(folder / name))
            for name, schema in _SCHEMAS._asdict().items()
        )
    )

"""Nexmark's streams as folders of Parquet files: a file for each stream and micro-batch, in an order that Spark's file source keeps."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from benchmarks.nexmark.generator import AUCTIONS, BIDS, EVENTS_OF_EPOCH, PERSONS, Events, Nexmark
from coordinator.model.errors import InvalidRequestError

_SCHEMAS: Final = Events(PERSONS, AUCTIONS, BIDS)
#: Modification time of micro-batch 0, 2001-09-09 01:46:40 UTC; each further batch is a second younger.
_EPOCH_S: Final = 1_000_000_000
_NS: Final = 1_000_000_000
#: Ids of the events that end a stream.
_END_ID: Final = -1
#: Seconds from the last event to the end of the stream: longer than any window or session is open.
_END_S: Final = 3600


class Inputs(NamedTuple):
    """The three streams as DataFrames: the input of every query."""

    persons: DataFrame
    auctions: DataFrame
    bids: DataFrame


def write_events(
    folder: Path,
    nexmark: Nexmark,
    events: int,
    batch_events: int,
    *,
    first_batch: int = 0,
    last_batch: int | None = None,
) -> int:
    """Write events as micro-batches, each a file in ``persons/``, ``auctions/`` and ``bids/``; return the number of batches.

    A file's name and modification time come from its number, so Spark's file source with ``maxFilesPerTrigger=1`` reads batch `n`
    as its micro-batch `n`, from all three folders at once, also when files are added while it runs. A stream that has no event in
    a batch gets a file without rows. Files are written atomically; existing files are replaced.

    Parameters
    ----------
    batch_events
        Events of a micro-batch, of all three streams together.

    Raises
    ------
    InvalidRequestError
        A batch has no or too many events.
    """
    if events < 0 or batch_events < 1:
        raise InvalidRequestError(
            "micro-batches need at least one event; nothing was written", batch_events=batch_events
        )
    batches = -(-events // batch_events)
    for batch in range(first_batch, batches if last_batch is None else min(last_batch, batches)):
        first = batch * batch_events
        streams = nexmark.events(first, min(first + batch_events, events))
        for name, rows in streams._asdict().items():
            write_file(folder / name, batch, rows)
    return batches


def write_file(folder: Path, batch: int, rows: pa.RecordBatch) -> None:
    """Write a micro-batch of a stream."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"batch-{batch:08d}.parquet"
    temporary = file.with_name(f".{file.name}")  # Spark reads no file whose name begins with a dot
    pq.write_table(pa.table(rows), temporary)
    modified = (_EPOCH_S + batch) * _NS
    os.utime(temporary, ns=(modified, modified))
    temporary.rename(file)


def write_end(folder: Path, nexmark: Nexmark, events: int, batch_events: int) -> None:
    """End the stream by another micro-batch with an event of each kind an hour later, which closes all windows and sessions.

    Its person, auction and bid have the id -1, so they match no others.
    """
    later = replace(nexmark, start=nexmark.start + _END_S * 1_000_000, out_of_order=1)
    epoch = -(-events // EVENTS_OF_EPOCH) * EVENTS_OF_EPOCH
    batch = -(-events // batch_events)
    for name, rows in later.events(epoch, epoch + EVENTS_OF_EPOCH)._asdict().items():
        first = rows.slice(0, 1)
        for column in {"id", "seller", "auction", "bidder"} & set(first.schema.names):
            index = first.schema.get_field_index(column)
            first = first.set_column(index, first.schema.field(index), pa.array([_END_ID], pa.int64()))
        write_file(folder / name, batch, first)


def read_stream(spark: SparkSession, folder: Path) -> Inputs:
    """Return all events that :func:`write_events` has written as streams, with a file of each for every micro-batch."""
    reader = spark.readStream.option("maxFilesPerTrigger", 1)
    return Inputs(
        *(
            reader.schema(from_arrow_schema(schema)).parquet(str(folder / name))
            for name, schema in _SCHEMAS._asdict().items()
        )
    )

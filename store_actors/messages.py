"""What callers send to a store actor. Light to import: Spark's workers have no need of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from coordinator.model import Lease, TaskIdentity
from coordinator.watermarks import Watermarks
from store_actors.schema import Field, StateSchema

__all__ = ["ApplyRequest", "BatchFacts", "OpenRequest", "ShardInput", "StoreSpec", "Write"]

#: A put or remove of a session: the store's name, the method and its arguments.
Write = tuple[str, str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """One Spark task's wish: fold its rows into its shard as the next version.

    Attributes
    ----------
    watermarks
        Where event time stands in the version that is made, the same for all shards of the operator.
    late_ms
        Watermark up to which rows are late, in milliseconds; that of the version before if None.
    """

    task: TaskIdentity
    lease: Lease
    base_version: int
    schema: StateSchema
    watermarks: Watermarks
    late_ms: int | None = None


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Name and columns of one keyed store of an operator.

    Attributes
    ----------
    due
        Value column (int64) by which rows fall due: those are then found without a look at the others.
    """

    name: str
    keys: tuple[Field, ...]
    values: tuple[Field, ...]
    due: str | None = None


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What an operator that keeps its state in keyed stores knows of a micro-batch, for the commit that it makes.

    Attributes
    ----------
    watermarks
        Where event time stands with the batch included, the same for all partitions.
    rows_in, rows_late
        Input rows of the partition, and those of them dropped as late.
    due_per_ms
        Units of the first store's due column in a millisecond, if its rows fall due by processing time: the earliest is then told.
    """

    watermarks: Watermarks
    rows_in: int
    rows_late: int = 0
    due_per_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A wish for a handle on the keyed stores of one partition, at a version."""

    task: TaskIdentity
    lease: Lease
    base_version: int
    stores: tuple[StoreSpec, ...]


@dataclass(frozen=True, slots=True)
class ShardInput:
    """A shard's rows of one micro-batch.

    Attributes
    ----------
    tables
        One for each of ``StateSchema.input_schemas()``.
    rows_read
        Input rows that all of these stand for.
    """

    tables: tuple[pa.Table, ...]
    rows_read: int

    @property
    def raw(self) -> pa.Table:
        """Rows in ``StateSchema.raw_schema()``."""
        return self.tables[0]

    @property
    def partial(self) -> pa.Table:
        """Rows of an aggregation in ``StateSchema.row_schema()``, partially aggregated by the map side."""
        return self.tables[1]

    @classmethod
    def of_raw(cls, schema: StateSchema, *batches: pa.RecordBatch) -> ShardInput:
        """Rows of the first kind, of which none were combined."""
        raw = pa.Table.from_batches(batches, schema=None if batches else schema.raw_schema())
        return cls((raw, *(one.empty_table() for one in schema.input_schemas()[1:])), raw.num_rows)

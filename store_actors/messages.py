"""What callers send to a store actor. Light to import: Spark's workers have no need of the engine."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from coordinator.model import Lease, TaskIdentity
from store_actors.schema import Field, StateSchema

__all__ = ["ApplyRequest", "OpenRequest", "ShardInput", "StoreSpec"]


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """One Spark task's wish: fold its rows into its shard as the next version."""

    task: TaskIdentity
    lease: Lease
    base_version: int
    schema: StateSchema
    max_event_ms: int | None


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Name and columns of one keyed store of an operator."""

    name: str
    keys: tuple[Field, ...]
    values: tuple[Field, ...]


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
    raw
        Rows in ``StateSchema.raw_schema()``.
    partial
        Rows in ``StateSchema.row_schema()``, partially aggregated by the map side.
    rows_read
        Input rows that all of these stand for.
    """

    raw: pa.Table
    partial: pa.Table
    rows_read: int

    @classmethod
    def of_raw(cls, schema: StateSchema, *batches: pa.RecordBatch) -> ShardInput:
        """Rows of which none were combined."""
        raw = pa.Table.from_batches(batches, schema=None if batches else schema.raw_schema())
        return cls(raw, schema.row_schema().empty_table(), raw.num_rows)

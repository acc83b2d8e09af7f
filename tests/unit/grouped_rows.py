"""Rows that are aggregated by one key, in parts that are undone, repeated and loaded again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.schema import Accumulator, Field, StateSchema
from store_actors.engine.results import results_of
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard

Rows = list[tuple[Any, ...]]
combined_or_not = pytest.mark.parametrize("combined", [False, True])


def schema_of(*accumulators: Accumulator, types: list[str], key: str = "int64") -> StateSchema:
    inputs = tuple(Field(f"v{number}", name) for number, name in enumerate(types))
    return StateSchema((Field("k", key),), inputs, accumulators, None, None, "update")


def batch_of(schema: StateSchema, rows: Rows) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True))
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, schema.raw_schema(), strict=True)],
        schema=schema.raw_schema(),
    )


def input_of(schema: StateSchema, rows: Rows, *, combined: bool) -> ShardInput:
    """Return rows as a shard gets them: as they are, or combined by a map task."""
    batch, empty = batch_of(schema, rows), schema.row_schema().empty_table()
    if not combined:
        return ShardInput((pa.Table.from_batches([batch]), empty), len(rows))
    groups = GroupTable(schema)
    groups.accumulate(groups.encode(batch), 1)
    return ShardInput((schema.raw_schema().empty_table(), groups.decode(groups.rows[groups.live()])), len(rows))


def aggregated(schema: StateSchema, parts: list[Rows], *, combined: bool) -> AggregateShard:
    """Return a shard after all parts: each is undone and repeated, and after each second one the shard is loaded again."""
    shard = AggregateShard(schema)
    for number, part in enumerate(parts, start=1):
        rows = input_of(schema, part, combined=combined)
        shard.apply(rows, 0, number)
        shard.abort()
        shard.apply(rows, 0, number)
        shard.commit()
        if number % 2 == 0:
            snapshot = shard.snapshot()
            shard = AggregateShard(schema)
            shard.load(snapshot.append_column(CHANGE_COLUMN, pa.array([0] * snapshot.num_rows, pa.int8())), number, 0)
    return shard


def aggregate_parts(schema: StateSchema, parts: list[Rows], *, combined: bool) -> dict[int, dict[str, Any]]:
    """Return what a shard emits, by key, after all parts."""
    return emitted(aggregated(schema, parts, combined=combined))


def emitted(shard: AggregateShard) -> dict[int, dict[str, Any]]:
    return {row["k"]: row for row in results_of(shard.snapshot(), shard.schema).to_pylist()}

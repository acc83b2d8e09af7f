"""Rows that are aggregated by one key, undone and loaded after each part."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from coordinator.model.schema import Accumulator, Field, StateSchema
from store_actors.engine.results import results_of
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard

Rows = list[tuple[Any, ...]]


def schema_of(*accumulators: Accumulator, types: list[str]) -> StateSchema:
    inputs = tuple(Field(f"v{number}", name) for number, name in enumerate(types))
    return StateSchema((Field("k", "int64"),), inputs, accumulators, None, None, "update")


def batch_of(schema: StateSchema, rows: Rows) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True))
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, schema.raw_schema(), strict=True)],
        schema=schema.raw_schema(),
    )


def aggregate_parts(schema: StateSchema, parts: list[Rows], *, combined: bool) -> dict[int, dict[str, Any]]:
    """Return what a shard emits, by key, after all parts: each part is undone and repeated, and then the shard is reloaded."""
    shard = AggregateShard(schema)
    empty = schema.row_schema().empty_table()
    for number, part in enumerate(parts, start=1):
        batch = batch_of(schema, part)
        rows = ShardInput((pa.Table.from_batches([batch]), empty), len(part))
        if combined:
            groups = GroupTable(schema)
            groups.accumulate(groups.encode(batch), 1)
            partial = groups.decode(groups.rows[groups.live()])
            rows = ShardInput((schema.raw_schema().empty_table(), partial), len(part))
        shard.apply(rows, 0, number)
        shard.abort()
        shard.apply(rows, 0, number)
        shard.commit()
        snapshot = shard.snapshot()
        shard = AggregateShard(schema)
        shard.load(snapshot.append_column(CHANGE_COLUMN, pa.array([0] * snapshot.num_rows, pa.int8())), number, 0)
    return {row["k"]: row for row in results_of(shard.snapshot(), schema).to_pylist()}

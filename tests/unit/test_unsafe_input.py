"""Rows in Spark's binary format that an aggregation takes and emits without Arrow: the same as by way of it."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import type_to_string, words_type
from store_actors.engine.unsafe_rows import MOST_BLOCK_BYTES, UnsafeBlock, blocks, decoded
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard, ChangedGroups, UnsafeInput
from tests.unit.unsafe_batches import batches_of_all_types


def _schema(batch: pa.RecordBatch, keys: int) -> StateSchema:
    """Return the schema of an aggregation whose first columns are its keys, and which keeps the first of each other column."""
    fields = [Field(field.name, type_to_string(field.type)) for field in batch.schema]
    inputs = fields[keys:]
    firsts = [(Field(f"{field.name}_first", field.type), Field(f"{field.name}_set", "bool")) for field in inputs]
    accumulators = [
        Accumulator(AccumulatorKind.FIRST, (field.name,), first) for field, first in zip(inputs, firsts, strict=True)
    ]
    counts = Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),))
    return StateSchema(tuple(fields[:keys]), tuple(inputs), (counts, *accumulators), None, None, "update")


def _block(batch: pa.RecordBatch) -> UnsafeBlock:
    """Return rows as a task sends them: their shard's route is behind them."""
    routed = batch.append_column("route", pa.array([0] * batch.num_rows, pa.int32()))
    ((_, content),) = blocks(routed)
    return UnsafeBlock(content.tobytes(), batch.schema, 1)


def _folded(shard: AggregateShard, rows: ShardInput | UnsafeInput) -> ChangedGroups:
    groups = shard.fold(rows)
    assert groups is not None
    return groups


@given(batches_of_all_types(), st.integers(0, 3), st.integers(0, 20))
def test_pieces_in_sparks_format_do_what_those_of_arrow_do(batch: pa.RecordBatch, keys: int, cut: int) -> None:
    schema = _schema(batch, min(keys, batch.num_columns))
    shards = AggregateShard(schema), AggregateShard(schema)
    for shard in shards:
        shard.open(1)
    for piece in (batch.slice(0, cut), batch.slice(cut), batch):
        if piece.num_rows == 0:
            continue
        by_arrow = _folded(shards[0], ShardInput.of_raw(schema, piece))
        directly = _folded(shards[1], UnsafeInput(_block(piece), piece.num_rows))
        assert directly.table().equals(by_arrow.table())
        content = directly.block()
        assert content is not None, "all of these types are in Spark's format"
        emitted = decoded(content.tobytes(), schema.row_schema(), 0)
        emitted.validate(full=True)
        assert pa.Table.from_batches([emitted]).equals(by_arrow.table().combine_chunks())
    assert shards[0].seal(0).delta.equals(shards[1].seal(0).delta)


def test_groups_that_are_larger_than_a_block_are_emitted_by_way_of_arrow() -> None:
    for size, is_direct in ((MOST_BLOCK_BYTES // 2, True), (MOST_BLOCK_BYTES, False)):
        batch = pa.record_batch({"k": ["x" * size], "v": pa.array([1], pa.int64())})
        shard = AggregateShard(_schema(batch, 1))
        shard.open(1)
        groups = _folded(shard, UnsafeInput(_block(batch), 1))
        assert (groups.block() is not None) == is_direct
        assert groups.table().column("n").to_pylist() == [1]


def test_states_that_are_not_what_is_emitted_are_emitted_by_way_of_arrow() -> None:
    counted = Accumulator(
        AccumulatorKind.BITMAP,
        ("v",),
        (Field("bits", words_type(4)),),
        result=(Field("r", "binary"),),
        options={"bits": 256},
    )
    schema = StateSchema((Field("k", "int64"),), (Field("v", "int64"),), (counted,), None, None, "update")
    assert not AggregateShard(schema).sent_fields

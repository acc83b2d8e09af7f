"""LIMIT: the first rows of a stream."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from store_actors.messages.requests import ShardInput
from store_actors.operators.deduplicate import LimitShard
from tests.unit.shard_machine import OperatorMachine


def schema_of(n: int, inputs: tuple[Field, ...] = (Field("c0", "int64"),)) -> StateSchema:
    count = Accumulator(AccumulatorKind.VALUE, (), (Field("n", "int64", False),))
    return StateSchema((), inputs, (count,), None, None, "update", OperatorKind.LIMIT, {"n": n})


def input_of(table: pa.Table) -> ShardInput:
    return ShardInput((table,), table.num_rows)


def numbers(values: list[int]) -> ShardInput:
    return input_of(pa.table({"c0": pa.array(values, pa.int64())}))


def applied(shard: LimitShard, rows: ShardInput) -> list[Any]:
    change = shard.apply(rows, 0, shard.version + 1)
    shard.commit()
    return shard.output(change.delta).column("c0").to_pylist()


def test_columns_outside_the_state_may_have_any_type() -> None:
    kind = pa.list_(pa.struct({"a": pa.int8(), "m": pa.map_(pa.string(), pa.float64())}))
    nested = pa.table(
        {
            "c0": pa.array([[{"a": 1, "m": [("k", 1.5)]}], None, []], kind),
            "c1": pa.array(["x", None, "y"], pa.large_string()),
        }
    )
    shard = LimitShard(schema_of(4, (Field("c0", "nested"), Field("c1", "string"))))
    change = shard.apply(input_of(pa.concat_tables([nested, nested])), 0, 1)
    assert (
        shard.output(change.delta).combine_chunks() == pa.concat_tables([nested, nested.slice(0, 1)]).combine_chunks()
    )
    shard.commit()
    loaded = LimitShard(shard.schema)
    loaded.load(change.delta, 1, 0)
    assert loaded.snapshot() == shard.snapshot()
    assert loaded.output(change.delta) == shard.output(change.delta)


def test_a_batch_without_columns_is_counted() -> None:
    shard = LimitShard(schema_of(3, ()))
    rows = pa.table({"c0": [1, 2]})
    assert [shard.apply(input_of(rows), 0, 1).delta.num_rows, shard.commit()] == [2, 1]
    assert [shard.apply(input_of(rows), 0, 2).delta.num_rows, shard.commit()] == [1, 2]


def test_a_limit_of_zero_lets_nothing_through_and_a_negative_one_is_refused() -> None:
    shard = LimitShard(schema_of(0))
    assert applied(shard, numbers([1])) == []
    assert len(shard) == 0
    with pytest.raises(InvalidRequestError, match="at least 0"):
        LimitShard(schema_of(-1))


def test_a_refused_batch_changes_nothing() -> None:
    shard = LimitShard(schema_of(5))
    shard.apply(numbers([1]), 0, 3)
    with pytest.raises(InvalidRequestError, match="uncommitted"):
        shard.apply(numbers([2]), 0, 4)
    shard.commit()
    with pytest.raises(InvalidRequestError, match="newer"):
        shard.apply(numbers([2]), 0, 3)
    assert shard.snapshot().to_pylist() == [{"n": 1}]


class LimitMachine(OperatorMachine[int]):
    """The model is the count of rows that were let through."""

    @initialize(n=st.integers(0, 30))
    def start(self, n: int) -> None:
        self.limit, self.schema = n, schema_of(n)
        self.begin(0)

    def new_shard(self) -> LimitShard:
        return LimitShard(self.schema)

    def no_rows(self) -> ShardInput:
        return numbers([])

    @precondition(lambda self: self.pending is None)
    @rule(size=st.integers(0, 12))
    def apply(self, size: int) -> None:
        before, rows = self.newest, list(range(size))
        change = self.apply_input(numbers(rows), 0)
        after = min(self.limit, before + size)
        assert self.shard.output(change.delta).column("c0").to_pylist() == rows[: after - before]
        assert (change.rows_in, change.rows_updated) == (size, int(after > before))
        self.applied(change, after)

    def check(self, model: int) -> None:
        assert self.shard.snapshot().column("n").to_pylist() == ([model] if model else [])


LimitMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestLimitAgainstACount = LimitMachine.TestCase

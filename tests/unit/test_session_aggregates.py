"""Aggregates of every form in sessions, which merge as rows come, against the same aggregates of all rows of a session at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import counts_type, list_type
from store_actors.engine.results import results_of
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.operators.session_windows import SessionShard
from tests.unit.nested_values import identity
from tests.unit.session_machine import input_of, schema_of

K = AccumulatorKind
GAP = 5
NESTED = 'struct<"a":int32,"l":array<string>>'
INPUTS = (Field("v", NESTED), Field("x", "float64"), Field("y", "float64"), Field("n", "int64"))
CORRELATION = tuple(Field(name, "float64", False) for name in ("c_n", "c_x", "c_y", "c_ck", "c_x2", "c_y2"))
ACCUMULATORS = (
    Accumulator(K.MAX_BY, ("v", "n"), (Field("by", NESTED), Field("by_n", "int64"))),
    Accumulator(K.MIN_BY, ("n", "v"), (Field("of", "int64"), Field("of_v", NESTED))),
    Accumulator(K.MAX, ("v",), (Field("largest", NESTED),)),
    Accumulator(K.COUNTED, ("v",), (Field("mode", counts_type(NESTED), False),), result=(Field("mode", NESTED),)),
    Accumulator(
        K.COUNTED,
        ("x",),
        (Field("share", counts_type("float64"), False),),
        result=(Field("share", "list<float64>"),),
        options={"percentages": [0.0, 0.3, 1.0], "rule": 0},
    ),
    Accumulator(K.CORRELATION, ("x", "y"), CORRELATION),
    Accumulator(K.COLLECT_LIST, ("v",), (Field("all", list_type(NESTED), False),)),
    Accumulator(K.COLLECT_SET, ("v",), (Field("different", list_type(NESTED), False),)),
    Accumulator(
        K.HLL_SKETCH,
        ("n",),
        (Field("sketch", list_type("int32"), False),),
        result=(Field("sketch", "binary", False),),
        options={"lg_k": 4},
    ),
)
#: Key, time; value, x, y.
Row = tuple[int, int, Any, float | None, float]

NESTED_VALUES = st.sampled_from(
    [None, {"a": 1, "l": None}, {"a": 1, "l": ["x"]}, {"a": None, "l": []}, {"a": 2, "l": ["x", None]}]
)
FLOATS = st.integers(-9, 9).map(float)
ROW = st.tuples(st.integers(0, 1), st.integers(0, 60), NESTED_VALUES, st.one_of(st.none(), FLOATS), FLOATS)


def sessions_of(rows: list[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """Return the rows of each session, in the order of key and time."""
    sessions: list[list[tuple[Any, ...]]] = []
    for row in sorted(rows, key=lambda row: row[:2]):
        if sessions and sessions[-1][-1][0] == row[0] and row[1] <= sessions[-1][-1][1] + GAP:
            sessions[-1].append(row)
        else:
            sessions.append([row])
    return sessions


def emitted(shard: SessionShard | AggregateShard) -> list[dict[str, Any]]:
    return results_of(shard.snapshot(), shard.schema).to_pylist()


def at_once(session: list[tuple[Any, ...]]) -> dict[str, Any]:
    schema = StateSchema((), INPUTS, ACCUMULATORS, None, None, "update")
    shard = AggregateShard(schema)
    columns = zip(*(row[2:] for row in session), strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema.raw_schema(), strict=True)]
    batch = pa.record_batch(arrays, schema=schema.raw_schema())
    shard.apply(ShardInput.of_raw(schema, batch), 0, 1)
    shard.commit()
    (row,) = emitted(shard)
    return row


def same(merged: dict[str, Any], expected: dict[str, Any], session: list[tuple[Any, ...]]) -> None:
    values, by_number = [row[2] for row in session], {row[5]: row[2] for row in session}
    for name in ("by", "of_v", "largest", "share", "sketch"):
        assert identity(merged[name]) == identity(expected[name]), name
    # Of equal orderings any value may be kept.
    assert merged["of"] is None or identity(by_number[merged["of"]]) == identity(merged["of_v"])
    for field in CORRELATION:
        assert merged[field.name] == pytest.approx(expected[field.name], abs=1e-9), field.name
    for name in ("all", "different"):
        assert sorted(map(identity, merged[name])) == sorted(map(identity, expected[name])), name
    count_of = Counter(identity(value) for value in values if value is not None)
    assert count_of[identity(merged["mode"])] == max(count_of.values(), default=0)


@given(batches=st.lists(st.lists(ROW, min_size=1, max_size=15), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_merged_sessions_equal_aggregates_of_all_their_rows(batches: list[list[Row]]) -> None:
    schema = schema_of((Field("k", "int64"),), INPUTS, ACCUMULATORS, "complete")
    shard, rows = SessionShard(schema), list[tuple[Any, ...]]()
    for number, batch in enumerate(batches, start=1):
        # A number of its own for each row: no two orderings are equal.
        numbered = [(*row, 100 * number + index) for index, row in enumerate(batch)]
        rows += numbered
        columns = [(k, at, at + GAP, *inputs) for k, at, *inputs in numbered]
        given_rows = input_of(schema, zip(*columns, strict=True))
        shard.apply(given_rows, 0, number)
        shard.abort()
        shard.apply(given_rows, 0, number)
        shard.commit()
        merged = sorted(emitted(shard), key=lambda row: (row["k"], row["session_start"]))
        expected = sessions_of(rows)
        assert len(merged) == len(expected)
        for merged_row, session in zip(merged, expected, strict=True):
            same(merged_row, at_once(session), session)

"""Values that are counted, raw and merged, in many batches, undone and loaded again, against plain Python."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import counts_type, string_to_type
from store_actors.engine.results import results_of
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from tests.unit.accumulator_values import VALUES

PERCENTAGES = [0.0, 0.25, 0.5, 1.0]
Rows = list[tuple[int, Any, int | None]]


def schema_of(type_name: str, result: str, options: dict[str, Any], *, often: bool = False) -> StateSchema:
    inputs = (Field("v", type_name), *([Field("n", "int64")] if often else []))
    accumulator = Accumulator(
        AccumulatorKind.COUNTED,
        tuple(field.name for field in inputs),
        (Field("s", counts_type(type_name), False),),
        result=(Field("s", result),),
        options=options,
    )
    return StateSchema((Field("k", "int64"),), inputs, (accumulator,), None, None, "update")


def given_rows(schema: StateSchema, rows: Rows, *, combined: bool) -> ShardInput:
    columns = list(zip(*rows, strict=True))[: 1 + len(schema.inputs)]
    kinds = [pa.int64(), *(string_to_type(field.type) for field in schema.inputs)]
    table = pa.table(
        [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)], schema=schema.raw_schema()
    )
    empty = schema.row_schema().empty_table()
    if not combined:
        return ShardInput((table, empty), len(rows))
    groups = GroupTable(schema)
    for batch in table.to_batches():
        groups.accumulate(groups.encode(batch), 1)
    return ShardInput((table.slice(0, 0), groups.decode(groups.rows[groups.live()])), len(rows))


def fed(schema: StateSchema, parts: list[Rows], *, combined: bool) -> AggregateShard:
    """Return a shard after all parts; each part was undone once and repeated, and the shard was reloaded half way."""
    shard = AggregateShard(schema)
    for number, part in enumerate(parts, start=1):
        rows = given_rows(schema, part, combined=combined)
        shard.apply(rows, 0, number)
        shard.abort()
        shard.apply(rows, 0, number)
        shard.commit()
        if number == 2:
            snapshot = shard.snapshot()
            shard = AggregateShard(schema)
            change_codes = pa.array([0] * snapshot.num_rows, pa.int8())
            shard.load(snapshot.append_column(CHANGE_COLUMN, change_codes), number, 0)
    return shard


def counts_of(shard: AggregateShard) -> dict[int, Counter[Any]]:
    """Return the count of each value, by group."""
    counts_by_group: dict[int, Counter[Any]] = {}
    for row in shard.snapshot().to_pylist():
        counts = counts_by_group.setdefault(row["k"], Counter())
        for counted in row["s"]:
            counts[counted["value"]] += counted["count"]
    return counts_by_group


def emitted(shard: AggregateShard) -> dict[int, Any]:
    return {row["k"]: row["s"] for row in results_of(shard.snapshot(), shard.schema).to_pylist()}


def batches(value: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Rows]]:
    row = st.tuples(st.integers(0, 2), st.one_of(st.none(), value), st.one_of(st.none(), st.integers(-1, 3)))
    return st.lists(st.lists(row, min_size=1, max_size=30), min_size=1, max_size=4)


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("type_name", ["int32", "string", "decimal(7,2)", "timestamp", "bool"])
def test_values_are_counted_and_the_most_frequent_is_emitted(type_name: str, often: bool, combined: bool) -> None:
    @given(pool=st.lists(VALUES[type_name], min_size=1, max_size=6), data=st.data())
    @settings(max_examples=15, deadline=None)
    def check(pool: list[Any], data: st.DataObject) -> None:
        parts = data.draw(batches(st.sampled_from(pool)))
        shard = fed(schema_of(type_name, type_name, {}, often=often), parts, combined=combined)
        expected: dict[int, Counter[Any]] = {key: Counter() for part in parts for key, _, _ in part}
        for key, value, count in (row for part in parts for row in part):
            if value is not None and (not often or (count or 0) > 0):
                expected[key][value] += count if often and count else 1
        assert counts_of(shard) == expected
        for key, chosen in emitted(shard).items():
            most = max(expected[key].values(), default=None)
            assert (chosen is None) if most is None else expected[key][chosen] == most

    check()


def between(values: list[Any], share: float) -> float:
    position = (len(values) - 1) * share
    low, high = values[math.floor(position)], values[math.ceil(position)]
    return low if low == high else (math.ceil(position) - position) * low + (position - math.floor(position)) * high


@pytest.mark.parametrize("descending", [False, True])
@given(parts=batches(st.one_of(st.integers(0, 5).map(float), st.floats(-1e6, 1e6))))
@settings(max_examples=40, deadline=None)
def test_percentiles(descending: bool, parts: list[Rows]) -> None:
    values: dict[int, list[float]] = {key: [] for part in parts for key, _, _ in part}
    for key, value, _ in (row for part in parts for row in part):
        if value is not None:
            values[key].append(value)
    for rule in (0, 1):
        options = {"percentages": PERCENTAGES, "rule": -1 - rule if descending else rule}
        percentiles = emitted(fed(schema_of("float64", "list<float64>", options), parts, combined=False))
        for key, group_values in values.items():
            ordered = sorted(group_values, reverse=descending)
            if rule == 0:
                expected = [between(ordered, share) for share in PERCENTAGES if ordered]
            else:
                expected = [ordered[max(math.ceil(share * len(ordered)), 1) - 1] for share in PERCENTAGES if ordered]
            assert percentiles[key] == (pytest.approx(expected) if group_values else None)


def test_a_group_with_few_distinct_values_stays_small() -> None:
    shard = AggregateShard(schema_of("int64", "int64", {}))
    for number in range(1, 201):
        rows: Rows = [(0, value % 5, None) for value in range(number, number + 50)]
        shard.apply(given_rows(shard.schema, rows, combined=number % 2 == 0), 0, number)
        shard.commit()
    assert counts_of(shard)[0] == dict.fromkeys(range(5), 2000)
    (row,) = shard.snapshot().to_pylist()
    assert len(row["s"]) <= 16


def test_percentiles_of_dates_and_intervals_are_dates_and_intervals() -> None:
    options = {"percentages": [0.5], "rule": 1}
    rows: Rows = [(0, dt.date(2020, 1, day), None) for day in (3, 1, 2)]
    assert emitted(fed(schema_of("date32", "list<date32>", options), [rows], combined=False)) == {
        0: [dt.date(2020, 1, 2)]
    }
    rows = [(0, dt.timedelta(microseconds=us), None) for us in (1, 4)]
    options = {"percentages": [0.5], "rule": 0}
    # Truncated to whole microseconds, as Spark does.
    assert emitted(fed(schema_of("duration", "list<duration>", options), [rows], combined=False)) == {
        0: [dt.timedelta(microseconds=2)]
    }

"""Values that are counted, raw and merged, in many batches, undone and loaded again, against plain Python."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import counts_type
from store_actors.operators.aggregate import AggregateShard
from tests.unit.accumulator_values import VALUES
from tests.unit.grouped_rows import Rows, aggregated, combined_or_not, emitted, input_of, schema_of

PERCENTAGES = [0.0, 0.25, 0.5, 1.0]


def counted(type_name: str, result: str, options: dict[str, Any], *, often: bool = False) -> StateSchema:
    state, types = Field("s", counts_type(type_name), False), [type_name, *(["int64"] if often else [])]
    inputs = tuple(f"v{number}" for number in range(len(types)))
    accumulator = Accumulator(AccumulatorKind.COUNTED, inputs, (state,), result=(Field("s", result),), options=options)
    return schema_of(accumulator, types=types)


def fed(schema: StateSchema, parts: list[Rows], *, combined: bool) -> AggregateShard:
    return aggregated(schema, [[row[: 1 + len(schema.inputs)] for row in part] for part in parts], combined=combined)


def counts_of(shard: AggregateShard) -> dict[int, Counter[Any]]:
    """Return the count of each value, by group."""
    counts_by_group: dict[int, Counter[Any]] = {}
    for row in shard.snapshot().to_pylist():
        counts = counts_by_group.setdefault(row["k"], Counter())
        for counted in row["s"]:
            counts[counted["value"]] += counted["count"]
    return counts_by_group


def results(shard: AggregateShard) -> dict[int, Any]:
    return {key: row["s"] for key, row in emitted(shard).items()}


def batches(value: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Rows]]:
    row = st.tuples(st.integers(0, 2), st.one_of(st.none(), value), st.one_of(st.none(), st.integers(-1, 3)))
    return st.lists(st.lists(row, min_size=1, max_size=30), min_size=1, max_size=4)


@combined_or_not
@pytest.mark.parametrize("often", [False, True])
@pytest.mark.parametrize("type_name", ["int32", "string", "decimal(7,2)", "timestamp", "bool"])
def test_values_are_counted_and_the_most_frequent_is_emitted(type_name: str, often: bool, combined: bool) -> None:
    @given(pool=st.lists(VALUES[type_name], min_size=1, max_size=6), data=st.data())
    @settings(max_examples=15, deadline=None)
    def check(pool: list[Any], data: st.DataObject) -> None:
        parts = data.draw(batches(st.sampled_from(pool)))
        shard = fed(counted(type_name, type_name, {}, often=often), parts, combined=combined)
        expected: dict[int, Counter[Any]] = {key: Counter() for part in parts for key, _, _ in part}
        for key, value, count in (row for part in parts for row in part):
            if value is not None and (not often or (count or 0) > 0):
                expected[key][value] += count if often and count else 1
        assert counts_of(shard) == expected
        for key, chosen in results(shard).items():
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
        percentiles = results(fed(counted("float64", "list<float64>", options), parts, combined=False))
        for key, group_values in values.items():
            ordered = sorted(group_values, reverse=descending)
            if rule == 0:
                expected = [between(ordered, share) for share in PERCENTAGES if ordered]
            else:
                expected = [ordered[max(math.ceil(share * len(ordered)), 1) - 1] for share in PERCENTAGES if ordered]
            assert percentiles[key] == (pytest.approx(expected) if group_values else None)


def test_a_group_with_few_distinct_values_stays_small() -> None:
    shard = AggregateShard(counted("int64", "int64", {}))
    for number in range(1, 201):
        rows: Rows = [(0, value % 5) for value in range(number, number + 50)]
        shard.apply(input_of(shard.schema, rows, combined=number % 2 == 0), 0, number)
        shard.commit()
    assert counts_of(shard)[0] == dict.fromkeys(range(5), 2000)
    (row,) = shard.snapshot().to_pylist()
    assert len(row["s"]) <= 16


def test_percentiles_of_dates_and_intervals_are_dates_and_intervals() -> None:
    options = {"percentages": [0.5], "rule": 1}
    rows: Rows = [(0, dt.date(2020, 1, day), None) for day in (3, 1, 2)]
    assert results(fed(counted("date32", "list<date32>", options), [rows], combined=False)) == {
        0: [dt.date(2020, 1, 2)]
    }
    rows = [(0, dt.timedelta(microseconds=us), None) for us in (1, 4)]
    options = {"percentages": [0.5], "rule": 0}
    # Truncated to whole microseconds, as Spark does.
    assert results(fed(counted("duration", "list<duration>", options), [rows], combined=False)) == {
        0: [dt.timedelta(microseconds=2)]
    }

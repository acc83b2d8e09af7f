"""Count-min sketches and histograms, raw and merged, against plain Python."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Field, StateSchema
from coordinator.model.type_names import bins_type, string_to_type, words_type
from store_actors.engine.results import results_of
from store_actors.operators.aggregate import AggregateShard
from tests.unit.fold_rows import Rows, merge_or_not, parts_of, run, schema_of

K = AccumulatorKind
WIDTH = 7
FACTORS = [1_234_567_891, 987_654_321, 5]


def sketch_schema(kind: AccumulatorKind) -> StateSchema:
    words = 1 + len(FACTORS) + len(FACTORS) * WIDTH
    state, result = Field("s", words_type(words), False), Field("s", "binary", False)
    return schema_of(kind, ["int64"], [state], [result], {"initial": [0, *FACTORS], "depth": len(FACTORS)})


def signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def column_of_long(value: int, line: int) -> int:
    hashed = signed(FACTORS[line] * value, 64)
    hashed = signed(hashed + (hashed >> 32), 64) & (2**31 - 1)
    return hashed % WIDTH


def column_of_hashes(value: int, line: int) -> int:
    first, second = signed(value >> 32, 32), signed(value, 32)
    return abs(signed(first + line * second, 32)) % WIDTH


@merge_or_not
@pytest.mark.parametrize(("kind", "column_of"), [(K.COUNT_MIN, column_of_long), (K.COUNT_MIN_BYTES, column_of_hashes)])
def test_count_min_sketch(merge: bool, kind: AccumulatorKind, column_of: Any) -> None:
    @given(parts=parts_of(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9))))
    @settings(max_examples=30, deadline=None)
    def check(parts: list[Rows]) -> None:
        table = [[0] * WIDTH for _ in FACTORS]
        present = [value for part in parts for (value,) in part if value is not None]
        for value in present:
            for line, counts in enumerate(table):
                counts[column_of(value, line)] += 1
        expected = struct.pack(
            f">iqii{len(FACTORS)}q{len(FACTORS) * WIDTH}q",
            *(1, len(present), len(FACTORS), WIDTH, *FACTORS, *(count for counts in table for count in counts)),
        )
        assert run(sketch_schema(kind), parts, merge=merge)["s"] == expected

    check()


def test_no_groups_have_results_of_the_same_types() -> None:
    for schema in (sketch_schema(K.COUNT_MIN), sketch_schema(K.COUNT_MIN_BYTES), histogram_schema(4, floating=True)):
        (accumulator,) = schema.accumulators
        nothing = AggregateShard(schema).snapshot()
        assert results_of(nothing, schema).schema.field(accumulator.emitted[0].name).type == string_to_type(
            accumulator.emitted[0].type
        )
        assert results_of(nothing, schema).num_rows == 0


def histogram_schema(bins: int, *, floating: bool) -> StateSchema:
    kind = "float64" if floating else "int32"
    state, result = Field("s", words_type(1 + 2 * (bins + 1)), False), Field("s", bins_type(kind))
    return schema_of(K.HISTOGRAM, [kind], [state], [result], {"bins": bins, "floating": floating})


@merge_or_not
@given(parts=parts_of(st.floats(-100, 100)))
@settings(max_examples=30, deadline=None)
def test_a_histogram_has_at_most_its_bins_and_all_values(merge: bool, parts: list[Rows]) -> None:
    present = [value for part in parts for (value,) in part if value is not None]
    bins = run(histogram_schema(4, floating=True), parts, merge=merge)["s"]
    if not present:
        assert bins is None
        return
    centers, heights = [bin_["x"] for bin_ in bins], [bin_["y"] for bin_ in bins]
    assert len(bins) <= 4
    assert centers == sorted(centers)
    assert sum(heights) == len(present)
    total = math.fsum(center * height for center, height in zip(centers, heights, strict=True))
    assert total == pytest.approx(math.fsum(present), rel=1e-9, abs=1e-9)


@merge_or_not
@given(parts=parts_of(st.integers(-3, 3)))
@settings(max_examples=30, deadline=None)
def test_with_enough_bins_a_histogram_is_exact(merge: bool, parts: list[Rows]) -> None:
    present = [value for part in parts for (value,) in part if value is not None]
    bins = run(histogram_schema(7, floating=False), parts, merge=merge)["s"]
    assert (bins or []) == [{"x": value, "y": float(present.count(value))} for value in sorted(set(present))]


def test_the_two_nearest_bins_become_one() -> None:
    rows: Rows = [(value,) for value in (10.0, 1.0, 4.0, 4.5, 20.0)]
    bins = run(histogram_schema(3, floating=True), [rows], merge=False)["s"]
    # 4.0 and 4.5 are nearest, then 1.0 and their merged bin.
    assert [(bin_["x"], bin_["y"]) for bin_ in bins] == [(pytest.approx(9.5 / 3), 3.0), (10.0, 1.0), (20.0, 1.0)]


def test_bins_with_equal_centers_become_one_when_merged() -> None:
    parts: list[Rows] = [[(1,), (2,)], [(2,), (3,)]]
    bins = run(histogram_schema(7, floating=False), parts, merge=True)["s"]
    assert bins == [{"x": 1, "y": 1.0}, {"x": 2, "y": 2.0}, {"x": 3, "y": 1.0}]

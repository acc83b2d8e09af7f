"""Arrays, maps and structs as values of aggregates, raw and merged, against plain Python."""

from __future__ import annotations

import math
from collections import Counter
from decimal import Decimal
from functools import cmp_to_key
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.nested_types import has_map
from coordinator.model.schema import Accumulator, Field
from coordinator.model.type_names import counts_type, list_type, string_to_type, type_to_string
from tests.unit.grouped_rows import Rows, aggregate_parts, schema_of
from tests.unit.nested_values import NESTED, identity, values

K = AccumulatorKind
#: Types as state stores them: every value inside may be null.
KINDS = NESTED.map(lambda kind: string_to_type(type_to_string(kind).replace(" not null", "")))


def compared(kind: pa.DataType, a: Any, b: Any) -> int:
    """Compare two values in Spark's order: negative, 0 or positive."""
    if a is None or b is None:
        return (a is not None) - (b is not None)
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        orders = (compared(field.type, a[field.name], b[field.name]) for field in fields)
        return next((order for order in orders if order), 0)
    if pa.types.is_list(kind):
        orders = (compared(kind.value_type, x, y) for x, y in zip(a, b, strict=False))
        return next((order for order in orders if order), len(a) - len(b))
    if isinstance(a, str):
        a, b = a.encode(), b.encode()
    if isinstance(a, float) and (math.isnan(a) or math.isnan(b)):
        return math.isnan(a) - math.isnan(b)
    return (a > b) - (a < b)


def parts_of(*kinds: pa.DataType) -> st.SearchStrategy[list[Rows]]:
    row = st.tuples(st.integers(0, 1), *(values(kind) for kind in kinds))
    return st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=3)


@pytest.mark.parametrize("combined", [False, True])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_aggregate_of_nested_values_side_by_side(combined: bool, data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    by = data.draw(KINDS.filter(lambda kind: not has_map(type_to_string(kind))))
    name, by_name = type_to_string(kind), type_to_string(by)
    listed, counted = Field("all", list_type(name), False), Field("mode", counts_type(name), False)
    schema = schema_of(
        Accumulator(K.MAX, ("v1",), (Field("largest", by_name),)),
        Accumulator(K.MIN, ("v1",), (Field("smallest", by_name),)),
        Accumulator(K.MAX_BY, ("v0", "v1"), (Field("max_by", name), Field("max_by_by", by_name))),
        Accumulator(K.MIN_BY, ("v0", "v1"), (Field("min_by", name), Field("min_by_by", by_name))),
        Accumulator(K.MAX_BY, ("v0", "v2"), (Field("numbered", name), Field("number", "decimal(38,4)"))),
        Accumulator(K.FIRST, ("v0",), (Field("first", name), Field("first_set", "bool", False))),
        Accumulator(K.LAST_VALID, ("v0",), (Field("last", name), Field("last_set", "bool", False))),
        Accumulator(K.COLLECT_LIST, ("v0",), (listed,)),
        Accumulator(K.COLLECT_SET, ("v0",), (Field("different", list_type(name), False),)),
        Accumulator(K.COUNTED, ("v0",), (counted,), result=(Field("mode", name),)),
        types=[name, by_name, "decimal(38,4)"],
    )
    parts = data.draw(parts_of(kind, by, pa.decimal128(38, 4)))
    for k, row in aggregate_parts(schema, parts, combined=combined).items():
        rows = [of_key for part in parts for key, *of_key in part if key == k]
        check_extremes(row, [of_key[1] for of_key in rows], by)
        check_values_by_an_ordering(row, rows, by)
        check_values(row, [identity(of_key[0]) for of_key in rows])


def check_extremes(row: dict[str, Any], given_values: list[Any], kind: pa.DataType) -> None:
    """The extremes are those of Spark's order, and the first of equal values is kept."""
    present = [value for value in given_values if value is not None]
    order = cmp_to_key(lambda a, b: compared(kind, a, b))
    assert identity(row["largest"]) == identity(max(present, key=order, default=None))
    assert identity(row["smallest"]) == identity(min(present, key=order, default=None))


def check_values_by_an_ordering(row: dict[str, Any], rows: list[list[Any]], by: pa.DataType) -> None:
    order = cmp_to_key(lambda a, b: compared(by, a[1], b[1]))
    present = [row_values for row_values in reversed(rows) if row_values[1] is not None]
    nothing = (None, None, None)
    assert identity(row["max_by"]) == identity(max(present, key=order, default=nothing)[0])
    assert identity(row["min_by"]) == identity(min(present, key=order, default=nothing)[0])
    numbered = [row_values for row_values in reversed(rows) if row_values[2] is not None]
    largest = max(numbered, key=lambda row_values: row_values[2], default=nothing)
    assert identity(row["numbered"]) == identity(largest[0])


def check_values(row: dict[str, Any], all_values: list[Any]) -> None:
    """The first and last values, all of them, the different ones, and the one that is there most often."""
    present = [value for value in all_values if value != identity(None)]
    assert identity(row["first"]) == all_values[0]
    assert identity(row["last"]) == (present[-1] if present else identity(None))
    assert [identity(value) for value in row["all"]] == present
    assert [identity(value) for value in row["different"]] == list(dict.fromkeys(present))
    count_of = Counter(present)
    most = [value for value in count_of if count_of[value] == max(count_of.values())]
    assert identity(row["mode"]) in most or not present


FLOATS = pa.list_(pa.field("element", pa.float32()))
NUMBERS = pa.struct([pa.field("d", pa.decimal128(38, 0)), pa.field("l", FLOATS)])


@pytest.mark.parametrize(
    ("kind", "ordered"),
    [
        (FLOATS, [[], [None], [None, 1.0], [-math.inf], [-0.0, 1.0], [0.0, 2.0], [math.inf], [math.nan, 0.0]]),
        (
            NUMBERS,
            [
                {"d": None, "l": [math.nan]},
                {"d": Decimal(-(2**70)), "l": None},
                {"d": Decimal(-(2**64)) - 1, "l": []},
                {"d": Decimal(-(2**64)), "l": []},
                {"d": Decimal(-1), "l": None},
                {"d": Decimal(0), "l": [1.0]},
                {"d": Decimal(2**63), "l": None},
                {"d": Decimal(2**63), "l": [1.0]},
                {"d": Decimal(2**70), "l": None},
            ],
        ),
        (pa.list_(pa.list_(pa.string())), [[[]], [[None]], [[""]], [["a"], []], [["a"], ["b"]], [["a", ""]], [["ä"]]]),
        (pa.list_(pa.int8()), [[-128], [-1], [0], [127]]),
    ],
)
def test_each_pair_is_in_order(kind: pa.DataType, ordered: list[Any]) -> None:
    name = type_to_string(kind)
    schema = schema_of(
        Accumulator(K.MAX, ("v0",), (Field("largest", name),)),
        Accumulator(K.MIN, ("v0",), (Field("smallest", name),)),
        types=[name],
    )
    for index, smaller in enumerate(ordered):
        for larger in ordered[index + 1 :]:
            for pair in ([(0, smaller), (0, larger)], [(0, larger), (0, smaller)]):
                (row,) = aggregate_parts(schema, [pair], combined=False).values()
                assert identity([row["smallest"], row["largest"]]) == identity([smaller, larger])

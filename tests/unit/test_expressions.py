"""Expression trees on columns: each operation gives the values that Spark computes without ANSI mode."""

from __future__ import annotations

import datetime as dt
import math
import operator
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.type_names import string_to_type
from store_actors.engine.arrays import whole_numbers
from store_actors.engine.columns import packed
from store_actors.operators.expressions import ExpressionTree, NotComputableError
from tests.unit.nested_values import identity

Node = dict[str, Any]


def column(name: str) -> Node:
    return {"op": "column", "name": name}


def literal(kind: str, value: object) -> Node:
    return {"op": "literal", "type": kind, "value": value}


def call(op: str, *args: Node, **facts: Any) -> Node:
    return {"op": op, "args": list(args), **facts}


def computed(tree: Node, **columns: pa.Array) -> list[Any]:
    """Return the values of a tree; the columns are arrays that begin within their buffers."""
    size = len(next(iter(columns.values()))) if columns else 2
    shifted = {name: pa.concat_arrays([array[-1:], array])[1:] for name, array in columns.items()}
    expression = ExpressionTree(tree, {name: array.type for name, array in columns.items()})
    result = expression.array(shifted, size)
    assert (result.type, len(result)) == (expression.type, size)
    return result.to_pylist()  # type: ignore[no-any-return]


def doubles(*values: float | None) -> pa.Array:
    return pa.array(values, pa.float64())


def longs(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int64())


def decimals(kind: str, *values: str | None) -> pa.Array:
    return pa.array([None if text is None else Decimal(text) for text in values], string_to_type(kind))


X, Y = column("x"), column("y")
WHOLE = {
    1.5: 1,
    -1.5: -2,
    math.nan: 0,
    math.inf: 2**63 - 1,
    -math.inf: -(2**63),
    1e300: 2**63 - 1,
    -(2.0**63): -(2**63),
    None: None,
}
WINDOW = call("struct", X, Y, names=["start", "end"])
NULLABLE = {**WINDOW, "null": "n"}
ENDS = {"x": longs(1, 2, 3), "y": longs(4, 5, 6), "n": pa.array([False, True, None])}
LARGE = [call(">", X, literal("int64", 2)), literal("string", "large")]
OTHERWISE = [call("isnull", X), Y, literal("string", None)]
TO_DECIMAL = call("cast", X, type="decimal(4,1)")
TENTHS = call("each", X, of=call("cast", {"op": "element"}, type="decimal(3,1)"))
LISTS = pa.array([[1, None], None, []], pa.list_(pa.int32()))
SECOND = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
BIASES = {"raw": [float(index) for index in range(10)], "bias": [10.0 * index for index in range(10)]}
TEXTS = ("12345678901234567890.123", "0.1")
#: What a tree comes to, of these columns.
VALUES: dict[str, tuple[Node, dict[str, pa.Array], list[Any]]] = {
    "a division by zero": (call("/", X, Y), {"x": doubles(1, -3, 1, None), "y": doubles(0.0, 2, -0.0, 1)}, [None, -1.5, None, None]),
    "a division by a literal zero": (call("/", X, literal("float64", 0.0)), {"x": doubles(1.0)}, [None]),
    "a division of decimals by zero": (
        call("/", X, Y, type="decimal(12,6)"),
        {"x": decimals("decimal(10,2)", "1", "2.00", None), "y": decimals("decimal(5,1)", "3.0", "0.0", "1")},
        [Decimal("0.333333"), None, None],
    ),
    "roots": (call("sqrt", X), {"x": doubles(4, -1, None)}, [2.0, math.nan, None]),
    "logarithms": (call("ln", X), {"x": doubles(1, 0.0, -1, None, math.nan)}, [0.0, None, None, None, math.nan]),
    "floors, cut off as in Java": (call("floor", X), {"x": doubles(*WHOLE)}, list(WHOLE.values())),
    "ceilings": (call("ceil", X), {"x": doubles(1.5, -1.5, None)}, [2, -1, None]),
    "the floor of a literal": (call("floor", literal("float64", 2.5)), {"x": longs(1, 2)}, [2, 2]),
    "decimals of other decimals": (
        TO_DECIMAL,
        {"x": decimals("decimal(10,3)", "999.94", "999.95", "-0.05", None)},
        [Decimal("999.9"), None, Decimal("-0.1"), None],
    ),
    "decimals of doubles": (
        TO_DECIMAL,
        {"x": doubles(0.25, 1e-300, 999.95, 1e300, math.nan, -math.inf, None)},
        [Decimal("0.3"), Decimal("0.0"), None, None, None, None, None],
    ),
    "decimals of whole numbers": (TO_DECIMAL, {"x": longs(999, 1000, -(2**63))}, [Decimal("999.0"), None, None]),
    "doubles of decimals": (call("cast", X, type="float64"), {"x": decimals("decimal(38,3)", *TEXTS)}, [*map(float, TEXTS)]),
    "doubles by their shortest digits": (
        call("round", X, digits=2),
        {"x": doubles(1.005, 2.675, -2.675, 1e-9, -1e-9, 1234567890.125, 1e300, math.nan, -math.inf, None)},
        [1.01, 2.68, -2.68, 0.0, 0.0, 1234567890.13, 1e300, math.nan, -math.inf, None],
    ),
    "doubles to whole ones": (call("round", X, digits=0), {"x": doubles(0.5, -2.5, 9e15)}, [1.0, -3.0, 9e15]),
    "the first value whose condition is true": (
        call("case", *LARGE, *OTHERWISE),
        {"x": longs(3, None, 1), "y": pa.array(["a", "b", "c"])},
        ["large", "b", None],
    ),
    "a condition that is null": (call("case", literal("bool", None), X, Y), {"x": longs(1), "y": longs(2)}, [2]),
    "the first value": (call("coalesce", X, literal("int64", 7)), {"x": longs(None, 1)}, [7, 1]),
    "a struct": (WINDOW, {"x": longs(1, None), "y": longs(2, 3)}, [{"start": 1, "end": 2}, {"start": None, "end": 3}]),
    "a struct with a leaf for null": (NULLABLE, ENDS, [{"start": 1, "end": 4}, None, None]),
    "a field of it": (call("field", NULLABLE, name="end"), ENDS, [4, None, None]),
    "each element of a list": (
        TENTHS,
        {"x": pa.array([[1.25, None], None, [], [2.0]], pa.list_(pa.float64()))},
        [[Decimal("1.3"), None], None, [], [Decimal("2.0")]],
    ),
    "microseconds": (call("timestamp", X, unit="us"), {"x": longs(1_000_000, None)}, [SECOND, None]),
    "milliseconds": (call("timestamp", X, unit="ms"), {"x": longs(1000, 2**63 - 1, -(2**63))}, [SECOND, None, None]),
    "packed values": (call("unpacked", X, type="array<int32>"), {"x": packed(LISTS)}, LISTS.to_pylist()),
    "a literal that is none": (call("<", X, literal("float64", "NaN")), {"x": doubles(math.inf, math.nan)}, [True, False]),
    "a literal without an end": (call("=", X, literal("float64", "-Infinity")), {"x": doubles(-math.inf)}, [True]),
    # The mean of the nearest six: of 4.4 these are 2 to 7; below and above the table they are its ends.
    "a bias": (call("bias", X, **BIASES), {"x": doubles(4.4, -3.0, 99.0, None)}, [45.0, 25.0, 70.0, None]),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_tree_comes_to_what_spark_computes(case: str) -> None:
    tree, columns, expected = VALUES[case]
    assert identity(computed(tree, **columns)) == identity(expected)


def test_numbers_beyond_whole_ones_are_cut_off_and_a_struct_reads_its_leaf_for_null() -> None:
    assert whole_numbers(np.array([-1e19, 2.9, -2.9])).tolist() == [-(2**63), 2, -2]
    assert ExpressionTree(NULLABLE, {"x": pa.int64(), "y": pa.int64(), "n": pa.bool_()}).columns == ("n", "x", "y")


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9)), min_size=1))
def test_durations_are_divided_to_the_nearest_microsecond(pairs: list[tuple[int, int]]) -> None:
    def nearest(dividend: int, by: int) -> int:
        with localcontext() as context:
            context.prec = 40
            return int((Decimal(dividend) / by).quantize(Decimal(1), ROUND_HALF_UP))

    dividends, divisors = (pa.array(part, pa.int64()) for part in zip(*pairs, strict=True))
    quotients = computed(call("rounded /", X, Y), x=dividends.cast(pa.duration("us")).cast(pa.int64()), y=divisors)
    expected = [None if by == 0 else nearest(dividend, by) for dividend, by in pairs]
    # The least 64-bit number divided by -1 is itself: it overflows.
    assert quotients == [value if value is None or value < 2**63 else -(2**63) for value in expected]
    kind = ExpressionTree(call("rounded /", X, Y), {"x": pa.duration("us"), "y": pa.int32()}).type
    assert kind == pa.duration("us")


DECIMALS = st.decimals(-(10**6), 10**6, places=3)


@settings(max_examples=60)
@given(st.lists(st.tuples(DECIMALS, DECIMALS), min_size=1))
def test_decimals_are_rounded_to_the_type_of_the_result(pairs: list[tuple[Decimal, Decimal]]) -> None:
    left, right = (pa.array(part, pa.decimal128(10, 3)) for part in zip(*pairs, strict=True))
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else None,
    }  # fmt: skip
    for op, compute in operations.items():
        expected = []
        for a, b in pairs:
            with localcontext() as context:
                context.prec = 60
                exact = compute(a, b)
            rounded = None if exact is None else exact.quantize(Decimal("0.01"), ROUND_HALF_UP)
            expected.append(rounded if rounded is not None and abs(rounded) < 10**7 else None)
        assert computed(call(op, X, Y, type="decimal(9,2)"), x=left, y=right) == expected


@pytest.mark.parametrize(
    "tree",
    [
        call("/", X, X),
        call("+", column("d"), column("d")),
        call("*", column("wide"), column("wide"), type="decimal(38,0)"),
        call("sqrt", X),
        call("case", column("b"), X, column("d")),
        call("case", column("b"), X),
        call("coalesce", X, column("b")),
        call("field", X, name="a"),
        call("each", X, of=X),
        call("each", column("l"), of=X),
        call("timestamp", X, unit="s"),
        call("round", X, digits=2),
        call("cast", X),
        call("cast", column("b"), type="int64"),
        call("struct", X, names=["a"], null="nowhere"),
        {"op": "element"},
        {"op": "literal", "type": "array<int32>", "value": "[1]"},
        {},
    ],
)
def test_what_cannot_be_computed_is_refused_beforehand(tree: Node) -> None:
    types = {"x": "int64", "d": "decimal(10,2)", "wide": "decimal(38,0)", "b": "bool", "l": "array<int64>"}
    with pytest.raises(NotComputableError):
        ExpressionTree(tree, {name: string_to_type(kind) for name, kind in types.items()})

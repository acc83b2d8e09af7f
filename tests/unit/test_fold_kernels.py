"""Checked sums, bits, products, moments, values by an ordering, states of many words: raw and merged, against plain Python."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import SumOverflowError
from coordinator.model.schema import Field
from coordinator.model.type_names import words_type
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from tests.unit.accumulator_values import VALUES
from tests.unit.fold_rows import Rows, merge_or_not, parts_of, raw, run, schema_of

K = AccumulatorKind
INT64 = VALUES["int64"]


@merge_or_not
@given(parts=parts_of(INT64))
@settings(max_examples=30, deadline=None)
def test_bits(merge: bool, parts: list[Rows]) -> None:
    present = [value for part in parts for (value,) in part if value is not None]
    for kind, fold in ((K.BIT_AND, operator.and_), (K.BIT_OR, operator.or_), (K.BIT_XOR, operator.xor)):
        row = run(schema_of(kind, ["int64"], [Field("s", "int64")]), parts, merge=merge)
        assert row["s"] == (functools.reduce(fold, present) if present else None)


@merge_or_not
@given(parts=parts_of(st.floats(-1e3, 1e3)))
@settings(max_examples=30, deadline=None)
def test_product(merge: bool, parts: list[Rows]) -> None:
    present = [value for part in parts for (value,) in part if value is not None]
    row = run(schema_of(K.PRODUCT, ["float64"], [Field("s", "float64")]), parts, merge=merge)
    assert row["s"] == (pytest.approx(math.prod(present), rel=1e-9) if present else None)


@merge_or_not
@pytest.mark.parametrize(("type_name", "bits"), [("int64", 64), ("int32", 32)])
def test_a_checked_sum_is_null_for_good_once_it_overflowed(merge: bool, type_name: str, bits: int) -> None:
    schema = schema_of(K.SUM_INT_OR_NULL, [type_name], [Field("s", type_name), Field("e", "bool", False)])
    largest = 2 ** (bits - 1) - 1

    @given(parts=parts_of(st.one_of(VALUES[type_name], st.just(largest), st.just(-largest))))
    @settings(max_examples=60, deadline=None)
    def check(parts: list[Rows]) -> None:
        overflowed, is_empty, total = False, True, 0
        for part in parts:
            present = [value for (value,) in part if value is not None]
            inner = 0
            for value in present:
                inner += value
                is_empty = False
                overflowed |= not -largest - 1 <= (inner if merge else total + inner) <= largest
            total += inner
            overflowed |= not -largest - 1 <= total <= largest
        row = run(schema, parts, merge=merge)
        assert row == {"s": None if overflowed else total, "e": is_empty}

    check()


def test_a_batch_that_overflows_a_strict_sum_is_refused() -> None:
    schema = schema_of(K.SUM_INT_CHECKED, ["int64"], [Field("s", "int64"), Field("e", "bool", False)])
    shard = AggregateShard(schema)
    empty = schema.row_schema().empty_table()
    shard.apply(ShardInput((raw(schema, [(2**62,), (None,)]), empty), 2), 0, 1)
    shard.commit()
    with pytest.raises(SumOverflowError, match=r"\[ARITHMETIC_OVERFLOW\] long overflow"):
        shard.apply(ShardInput((raw(schema, [(2**62,)]), empty), 1), 0, 2)


@merge_or_not
@pytest.mark.parametrize("ordering", ["int64", "float64", "decimal(38,0)", "string", "timestamp", "bool"])
@pytest.mark.parametrize("type_name", ["string", "decimal(7,2)", "int32"])
def test_value_by_an_ordering(merge: bool, type_name: str, ordering: str) -> None:
    @given(parts=parts_of(VALUES[type_name], VALUES[ordering]))
    @settings(max_examples=20, deadline=None)
    def check(parts: list[Rows]) -> None:
        rows = [pair for part in parts for pair in part if pair[1] is not None]
        order = (lambda text: text.encode()) if ordering == "string" else (lambda value: value)
        state = [Field("s", type_name), Field("o", ordering)]
        for kind, choose in ((K.MAX_BY, max), (K.MIN_BY, min)):
            row = run(schema_of(kind, [type_name, ordering], state), parts, merge=merge)
            # Among equal ones the last wins.
            best = choose(rows[::-1], key=lambda pair: order(pair[1])) if rows else (None, None)
            assert (row["s"], row["o"]) == best, kind

    check()


def test_nan_is_the_largest_ordering() -> None:
    rows: Rows = [("a", 1.0), ("b", math.nan), ("c", math.inf), ("d", -1.0)]
    state = [Field("s", "string"), Field("o", "float64")]
    assert run(schema_of(K.MAX_BY, ["string", "float64"], state), [rows], merge=False)["s"] == "b"
    assert run(schema_of(K.MIN_BY, ["string", "float64"], state), [rows], merge=False)["s"] == "d"
    assert run(schema_of(K.MIN_BY, ["string", "float64"], state), [rows[1:3]], merge=False)["s"] == "c"


def doubles(*names: str) -> list[Field]:
    return [Field(name, "float64", False) for name in names]


@merge_or_not
@given(parts=parts_of(st.floats(-100, 100)))
@settings(max_examples=40, deadline=None)
def test_higher_moments(merge: bool, parts: list[Rows]) -> None:
    present = [value for part in parts for (value,) in part if value is not None]
    mean = math.fsum(present) / len(present) if present else 0.0
    for kind, powers in ((K.MOMENTS_3, (2, 3)), (K.MOMENTS_4, (2, 3, 4))):
        row = run(
            schema_of(kind, ["float64"], doubles("n", "avg", "m2", "m3", "m4")[: len(powers) + 2]), parts, merge=merge
        )
        assert row["n"] == len(present)
        assert row["avg"] == pytest.approx(mean, abs=1e-9)
        for power in powers:
            moment = math.fsum((value - mean) ** power for value in present)
            assert row[f"m{power}"] == pytest.approx(moment, rel=1e-8, abs=1e-4)


@merge_or_not
@given(parts=parts_of(st.floats(-100, 100), st.floats(-100, 100)))
@settings(max_examples=40, deadline=None)
def test_co_moments(merge: bool, parts: list[Rows]) -> None:
    pairs = [pair for part in parts for pair in part if None not in pair]
    xs, ys = ([pair[side] for pair in pairs] for side in (0, 1))
    x_mean, y_mean = (math.fsum(side) / len(pairs) if pairs else 0.0 for side in (xs, ys))
    fields = doubles("n", "x", "y", "ck", "xm", "ym")
    for kind, state in ((K.COVARIANCE, fields[:4]), (K.CORRELATION, fields)):
        row = run(schema_of(kind, ["float64", "float64"], state), parts, merge=merge)
        expected = {
            "n": len(pairs),
            "x": x_mean,
            "y": y_mean,
            "ck": math.fsum((x - x_mean) * (y - y_mean) for x, y in pairs),
            "xm": math.fsum((x - x_mean) ** 2 for x in xs),
            "ym": math.fsum((y - y_mean) ** 2 for y in ys),
        }
        assert row == pytest.approx({name: expected[name] for name in row}, rel=1e-8, abs=1e-6)


@merge_or_not
@pytest.mark.parametrize("precision", [4, 9])
def test_registers(merge: bool, precision: int) -> None:
    words = (1 << precision) // 10 + 1
    schema = schema_of(
        K.DISTINCT_REGISTERS, ["int64"], [Field("s", words_type(words), False)], doubles("total", "zeros")
    )

    @given(parts=parts_of(INT64))
    @settings(max_examples=40, deadline=None)
    def check(parts: list[Rows]) -> None:
        registers = [0] * (1 << precision)
        for value in (value for part in parts for (value,) in part if value is not None):
            bits = f"{value % 2**64:064b}"
            suffix = f"{bits[precision:]}1"
            index = int(bits[:precision], 2)
            registers[index] = max(registers[index], suffix.index("1") + 1)
        # Not sum(), which from Python 3.12 on compensates what rounding loses.
        total = functools.reduce(operator.add, (2.0**-rank for rank in registers), 0.0)
        assert run(schema, parts, merge=merge) == {"total": total, "zeros": registers.count(0)}

    check()


@merge_or_not
@given(parts=parts_of(st.integers(0, 191)))
@settings(max_examples=30, deadline=None)
def test_bitmaps(merge: bool, parts: list[Rows]) -> None:
    bits = np.zeros(192, np.uint8)
    bits[[value for part in parts for (value,) in part if value is not None]] = 1
    schema = schema_of(K.BITMAP, ["int64"], [Field("s", words_type(3), False)], [Field("s", "binary", False)])
    bitmap = run(schema, parts, merge=merge)["s"]
    assert bitmap == np.packbits(bits, bitorder="little").tobytes()
    united = schema_of(K.BITMAP_OR, [words_type(3)], [Field("s", words_type(3), False)], [Field("s", "binary", False)])
    other_bitmap = bytes(range(24))
    assert run(united, [[(bitmap,), (None,)], [(other_bitmap,)]], merge=merge)["s"] == bytes(
        left | right for left, right in zip(bitmap, other_bitmap, strict=True)
    )

"""Every accumulator kind over every type it takes, raw and merged, against plain Python."""

from __future__ import annotations

import functools
import math
import operator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import SumOverflowError
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import string_to_type, words_type
from store_actors.engine.table import GroupTable
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from tests.unit.accumulator_values import VALUES
from tests.unit.fold_rows import Rows, merge_or_not, parts_of, raw, run, schema_of, schema_of_all

K = AccumulatorKind
INT64 = VALUES["int64"]


def of_one_value(kind: AccumulatorKind, type_name: str, *, flag: bool = False) -> Accumulator:
    """An accumulator of `v0` whose state is a value, and with `flag` whether there is one, both named after the kind."""
    flags = (Field(f"{kind.name}_flag", "bool", False),) if flag else ()
    return Accumulator(kind, ("v0",), (Field(kind.name, type_name), *flags))


@merge_or_not
@pytest.mark.parametrize("type_name", sorted(VALUES))
def test_min_max_first_last_count(type_name: str, merge: bool) -> None:
    pairs = [of_one_value(kind, type_name, flag=True) for kind in (K.FIRST, K.LAST, K.FIRST_VALID, K.LAST_VALID)]
    schema = schema_of_all(
        [type_name],
        *(of_one_value(kind, type_name) for kind in (K.MIN, K.MAX)),
        *pairs,
        Accumulator(K.COUNT_ROWS, (), (Field("COUNT_ROWS", "int64", False),)),
        Accumulator(K.COUNT_VALID, ("v0",), (Field("COUNT_VALID", "int64", False),)),
    )

    @settings(max_examples=25, deadline=None)
    @given(parts=parts_of(VALUES[type_name]))
    def check(parts: list[Rows]) -> None:
        flat = [item for part in parts for (item,) in part]
        present = [item for item in flat if item is not None]
        order = (lambda text: text.encode()) if type_name == "string" else None
        expected: dict[AccumulatorKind, Any] = {
            K.MIN: min(present, key=order) if present else None,
            K.MAX: max(present, key=order) if present else None,
            K.FIRST: flat[0],
            K.LAST: flat[-1],
            K.FIRST_VALID: present[0] if present else None,
            K.LAST_VALID: present[-1] if present else None,
            K.COUNT_ROWS: len(flat),
            K.COUNT_VALID: len(present),
        }
        row = run(schema, parts, merge=merge)
        for kind, answer in expected.items():
            assert row[kind.name] == answer, kind

    check()


# -- keys -------------------------------------------------------------------------------------------------------------


def rows_by_key(accumulator: Accumulator, type_name: str, parts: list[list[Any]]) -> pa.Table:
    """Return the rows of a table that was fed keys of a type, which are its values, too."""
    schema = StateSchema((Field("k", type_name),), (Field("v0", type_name),), (accumulator,), None, None, "update")
    table = GroupTable(schema)
    for part in parts:
        keys = pa.array(part, string_to_type(type_name))
        table.accumulate(table.encode(pa.record_batch([keys, keys], schema=schema.raw_schema())), 1)
    return table.decode(table.rows[table.live()])


# Floats reach the fleet normalised (-0.0 is 0.0): the plan normalises them.
@pytest.mark.parametrize("type_name", sorted(name for name in VALUES if not name.startswith("float")))
def test_every_type_is_a_key_and_null_is_a_group(type_name: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(keys=st.lists(st.one_of(st.none(), VALUES[type_name]), min_size=1, max_size=40))
    def check(keys: list[Any]) -> None:
        table = rows_by_key(Accumulator(K.COUNT_ROWS, (), (Field("n", "int64", False),)), type_name, [keys])
        counts = {row["k"]: row["n"] for row in table.to_pylist()}
        assert counts == {key: keys.count(key) for key in keys}
        assert table.num_rows == len(counts)

    check()


def test_many_groups_grow_the_table_and_keep_every_row() -> None:
    keys = [list(range(start, start + 5000)) for start in range(0, 50_000, 2500)]
    table = rows_by_key(Accumulator(K.SUM_INT, ("v0",), (Field("s", "int64"),)), "int64", keys)
    sums = dict(zip(table.column("k").to_pylist(), table.column("s").to_pylist(), strict=True))
    assert len(sums) == 52_500
    assert all(total == key * (2 if 2500 <= key < 50_000 else 1) for key, total in sums.items())


def test_more_flags_than_one_word_holds() -> None:
    numbers = range(100)
    maxima = (Accumulator(K.MAX, (f"v{number}",), (Field(f"m_v{number}", "int64"),)) for number in numbers)
    schema = schema_of_all(["int64"] * 100, *maxima)
    row = run(schema, [[tuple(number if number % 3 else None for number in numbers)]], merge=False)
    assert all(row[f"m_v{number}"] == (number if number % 3 else None) for number in numbers)


# -- sums, products and bits ------------------------------------------------------------------------------------------


@merge_or_not
@given(parts=parts_of(INT64))
@settings(max_examples=50, deadline=None)
def test_int_sum_wraps_like_java_and_bits_are_folded(merge: bool, parts: list[Rows]) -> None:
    folds = {K.BIT_AND: operator.and_, K.BIT_OR: operator.or_, K.BIT_XOR: operator.xor}
    row = run(
        schema_of_all(["int64"], *(of_one_value(kind, "int64") for kind in (K.SUM_INT, *folds))), parts, merge=merge
    )
    present = [value for part in parts for (value,) in part if value is not None]
    assert row["SUM_INT"] == ((sum(present) + 2**63) % 2**64 - 2**63 if present else None)
    for kind, fold in folds.items():
        assert row[kind.name] == (functools.reduce(fold, present) if present else None), kind


@merge_or_not
@given(parts=parts_of(VALUES["decimal(38,0)"]))
@settings(max_examples=80, deadline=None)
def test_decimal_sum_is_exact_and_null_beyond_its_precision(merge: bool, parts: list[Rows]) -> None:
    state = [Field("s", "decimal(38,0)"), Field("empty", "bool", False)]
    row = run(schema_of(K.SUM_DECIMAL, ["decimal(38,0)"], state), parts, merge=merge)
    present = [int(item) for part in parts for (item,) in part if item is not None]
    assert row["empty"] == (not present)
    totals = [0]
    if merge:  # partial sums can overflow where the running sum would not, and the other way round
        for part in parts:
            inner = [0]
            for (item,) in part:
                inner.append(inner[-1] + int(item or 0))
            totals += [*inner, totals[-1] + inner[-1]]
    else:
        for item in present:
            totals.append(totals[-1] + item)
    overflowed = any(abs(total) >= 10**38 for total in totals)
    assert row["s"] == (None if overflowed else Decimal(sum(present)))


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


# -- values by an ordering --------------------------------------------------------------------------------------------


def by_ordering(type_name: str, ordering: str) -> StateSchema:
    """The values of both the largest and the smallest orderings."""
    accumulators = (
        Accumulator(kind, ("v0", "v1"), (Field(kind.name, type_name), Field(f"{kind.name}_order", ordering)))
        for kind in (K.MAX_BY, K.MIN_BY)
    )
    return schema_of_all([type_name, ordering], *accumulators)


@merge_or_not
@pytest.mark.parametrize("ordering", ["int64", "float64", "decimal(38,0)", "string", "timestamp", "bool"])
@pytest.mark.parametrize("type_name", ["string", "decimal(7,2)", "int32"])
def test_value_by_an_ordering(merge: bool, type_name: str, ordering: str) -> None:
    schema = by_ordering(type_name, ordering)

    @given(parts=parts_of(VALUES[type_name], VALUES[ordering]))
    @settings(max_examples=20, deadline=None)
    def check(parts: list[Rows]) -> None:
        rows = [pair for part in parts for pair in part if pair[1] is not None]
        order = (lambda text: text.encode()) if ordering == "string" else (lambda value: value)
        row = run(schema, parts, merge=merge)
        for name, choose in (("MAX_BY", max), ("MIN_BY", min)):
            # Among equal ones the last wins.
            best = choose(rows[::-1], key=lambda pair: order(pair[1])) if rows else (None, None)
            assert (row[name], row[f"{name}_order"]) == best, name

    check()


def test_nan_is_the_largest_float_and_ordering() -> None:
    values: Rows = [(1.0,), (math.nan,), (-1.0,)]
    row = run(
        schema_of_all(["float64"], of_one_value(K.MIN, "float64"), of_one_value(K.MAX, "float64")),
        [values],
        merge=False,
    )
    assert row["MIN"] == -1.0
    assert math.isnan(row["MAX"])
    rows: Rows = [("a", 1.0), ("b", math.nan), ("c", math.inf), ("d", -1.0)]
    row = run(by_ordering("string", "float64"), [rows], merge=False)
    assert (row["MAX_BY"], row["MIN_BY"]) == ("b", "d")
    assert run(by_ordering("string", "float64"), [rows[1:3]], merge=False)["MIN_BY"] == "c"


# -- moments ----------------------------------------------------------------------------------------------------------


def doubles(kind: AccumulatorKind, inputs: int, *names: str) -> Accumulator:
    """An accumulator whose state is numbers, named after it and them."""
    fields = tuple(Field(f"{kind.name}_{name}", "float64", False) for name in names)
    return Accumulator(kind, tuple(f"v{number}" for number in range(inputs)), fields)


MOMENTS = {K.MOMENTS: (2,), K.MOMENTS_3: (2, 3), K.MOMENTS_4: (2, 3, 4)}


@merge_or_not
@given(parts=parts_of(st.floats(-1e6, 1e6)))
@settings(max_examples=60, deadline=None)
def test_float_sum_and_moments_of_large_numbers(merge: bool, parts: list[Rows]) -> None:
    schema = schema_of_all(["float64"], doubles(K.MOMENTS, 1, "n", "avg", "m2"), of_one_value(K.SUM_FLOAT, "float64"))
    row = run(schema, parts, merge=merge)
    present = [item for part in parts for (item,) in part if item is not None]
    mean = math.fsum(present) / len(present) if present else 0.0
    assert row["MOMENTS_n"] == len(present)
    assert row["MOMENTS_avg"] == pytest.approx(mean, abs=1e-6)
    assert row["MOMENTS_m2"] == pytest.approx(math.fsum((item - mean) ** 2 for item in present), rel=1e-6, abs=1e-3)
    assert row["SUM_FLOAT"] == (pytest.approx(math.fsum(present), rel=1e-9, abs=1e-6) if present else None)


@merge_or_not
@given(parts=parts_of(st.floats(-100, 100)))
@settings(max_examples=40, deadline=None)
def test_moments(merge: bool, parts: list[Rows]) -> None:
    present = [value for part in parts for (value,) in part if value is not None]
    mean = math.fsum(present) / len(present) if present else 0.0
    accumulators = (doubles(kind, 1, "n", "avg", *(f"m{power}" for power in of)) for kind, of in MOMENTS.items())
    row = run(schema_of_all(["float64"], *accumulators), parts, merge=merge)
    for kind, powers in MOMENTS.items():
        assert row[f"{kind.name}_n"] == len(present)
        assert row[f"{kind.name}_avg"] == pytest.approx(mean, abs=1e-9)
        for power in powers:
            moment = math.fsum((value - mean) ** power for value in present)
            assert row[f"{kind.name}_m{power}"] == pytest.approx(moment, rel=1e-8, abs=1e-4)


@merge_or_not
@given(parts=parts_of(st.floats(-100, 100), st.floats(-100, 100)))
@settings(max_examples=40, deadline=None)
def test_co_moments(merge: bool, parts: list[Rows]) -> None:
    pairs = [pair for part in parts for pair in part if None not in pair]
    xs, ys = ([pair[side] for pair in pairs] for side in (0, 1))
    x_mean, y_mean = (math.fsum(side) / len(pairs) if pairs else 0.0 for side in (xs, ys))
    expected = {
        "n": len(pairs),
        "x": x_mean,
        "y": y_mean,
        "ck": math.fsum((x - x_mean) * (y - y_mean) for x, y in pairs),
        "xm": math.fsum((x - x_mean) ** 2 for x in xs),
        "ym": math.fsum((y - y_mean) ** 2 for y in ys),
    }
    states = {K.COVARIANCE: ("n", "x", "y", "ck"), K.CORRELATION: tuple(expected)}
    accumulators = (doubles(kind, 2, *names) for kind, names in states.items())
    row = run(schema_of_all(["float64", "float64"], *accumulators), parts, merge=merge)
    of_states = {f"{kind.name}_{name}": expected[name] for kind, names in states.items() for name in names}
    assert row == pytest.approx(of_states, rel=1e-8, abs=1e-6)


# -- states of many words ---------------------------------------------------------------------------------------------


@merge_or_not
@pytest.mark.parametrize("precision", [4, 9])
def test_registers(merge: bool, precision: int) -> None:
    words = (1 << precision) // 10 + 1
    result = [Field(name, "float64", False) for name in ("total", "zeros")]
    schema = schema_of(K.DISTINCT_REGISTERS, ["int64"], [Field("s", words_type(words), False)], result)

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

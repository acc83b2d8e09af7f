"""One table of accumulators: the inputs of each, and in plain Python what it comes to for the rows of one group."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from functools import cmp_to_key
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator
from coordinator.model.type_names import (
    bins_type,
    counts_type,
    has_map,
    list_type,
    string_to_type,
    type_to_string,
    words_type,
)
from tests.unit import nested_values
from tests.unit.accumulator_inputs import VALUES, Expected, Given, Inputs, Such, aggregate_parts, of
from tests.unit.aggregate_machine import distinct

K = AccumulatorKind


# -- any type ---------------------------------------------------------------------------------------------------------


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


def order_of(type_name: str) -> Callable[[Any], Any]:
    return cmp_to_key(functools.partial(compared, string_to_type(type_name)))


def unsigned(value: Any) -> Any:
    """Equals a float whatever the sign of its zero is: the two are equal in Spark's order."""
    return pytest.approx(value, rel=0, abs=0, nan_ok=True) if isinstance(value, float) else value


def tally(given: Given) -> Counter[str]:
    """Count the values of the first column, each as often as the second one says if there is one."""
    counts: Counter[str] = Counter()
    for value, *often in given.rows:
        if value is not None and all(times is not None and times > 0 for times in often):
            counts[nested_values.identity(value)] += often[0] if often else 1
    return counts


def tallied(given: Given) -> Such:
    def holds(counted: Any) -> bool:
        counts: Counter[str] = Counter()
        for each in counted:
            counts[nested_values.identity(each["value"])] += each["count"]
        return counts == tally(given)

    return Such(holds)


def usual(given: Given) -> Such:
    counts = tally(given)
    most = {text for text, count in counts.items() if count == max(counts.values())}
    return Such(lambda value: nested_values.identity(value) in most if most else value is None)


def counted(name: str, inputs: int = 1) -> list[tuple[Accumulator, Expected]]:
    """The values with their counts, and the most frequent one."""
    state = [f"{counts_type(name)}!"]
    return [of(K.COUNTED, state, tallied, inputs=inputs), of(K.COUNTED, state, usual, inputs=inputs, result=[name])]


def of_any_type(name: str, values: st.SearchStrategy[Any]) -> Inputs:
    order, is_nested = order_of(name), string_to_type(name).num_fields > 0

    def different(given: Given) -> list[Any]:
        if not is_nested:
            return distinct(given.values)
        firsts: dict[str, Any] = {}
        for value in given.values:
            firsts.setdefault(nested_values.identity(value), value)
        return list(firsts.values())

    extremes = [
        of(K.MIN, [name], lambda given: unsigned(min(given.values, key=order, default=None))),
        of(K.MAX, [name], lambda given: unsigned(max(given.values, key=order, default=None))),
    ]
    return Inputs(
        [name],
        [values],
        [
            *(extremes if not has_map(name) else ()),
            of(K.FIRST, [name, "bool!"], lambda given: (given.rows[0][0], True)),
            of(K.LAST, [name, "bool!"], lambda given: (given.rows[-1][0], True)),
            of(K.FIRST_VALID, [name, "bool!"], lambda given: (next(iter(given.values), None), bool(given.values))),
            of(K.LAST_VALID, [name, "bool!"], lambda given: (next(reversed(given.values), None), bool(given.values))),
            of(K.COUNT_ROWS, ["int64!"], lambda given: len(given.rows), inputs=0),
            of(K.COUNT_VALID, ["int64!"], lambda given: len(given.values)),
            of(K.COLLECT_LIST, [f"{list_type(name)}!"], lambda given: given.values),
            of(K.COLLECT_SET, [f"{list_type(name)}!"], different),
            *counted(name),
        ],
    )


def by_ordering(name: str, ordering: str, *values: st.SearchStrategy[Any]) -> Inputs:
    """The values of both the largest and the smallest orderings; among equal ones the last wins."""
    order = order_of(ordering)

    def best(choose: Callable[..., Any], given: Given) -> Any:
        rows = [row for row in reversed(given.rows) if row[1] is not None]
        value, by = choose(rows, key=lambda row: order(row[1]), default=(None, None))
        return value, unsigned(by)

    return Inputs(
        [name, ordering],
        list(values),
        [
            of(kind, [name, ordering], functools.partial(best, choose), inputs=2)
            for kind, choose in ((K.MAX_BY, max), (K.MIN_BY, min))
        ],
        20,
    )


# -- numbers ----------------------------------------------------------------------------------------------------------


def folded(fold: Callable[[Any, Any], Any]) -> Expected:
    return lambda given: functools.reduce(fold, given.values) if given.values else None


def about(fold: Callable[[list[Any]], float], rel: float, least: float | None = None) -> Expected:
    return lambda given: pytest.approx(fold(given.values), rel=rel, abs=least) if given.values else None


def wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def checked_sum(largest: int) -> Expected:
    """A sum that is null for good once it has left its type, and whether there were no values."""

    def total(given: Given) -> Any:
        left = any(not -largest - 1 <= total <= largest for total in given.totals())
        return None if left else sum(given.values), not given.values

    return total


def decimal_sum(given: Given) -> Any:
    left = any(abs(total) >= 10**38 for total in given.totals())
    return None if left else Decimal(sum(map(int, given.values))), not given.values


def moments(*powers: int, rel: float, least: float, of_average: float) -> Expected:
    def expected(given: Given) -> Any:
        values = given.values
        mean = math.fsum(values) / len(values) if values else 0.0
        sums = [math.fsum((value - mean) ** power for value in values) for power in powers]
        return len(values), pytest.approx(mean, abs=of_average), *(pytest.approx(m, rel=rel, abs=least) for m in sums)

    return expected


def co_moments(given: Given) -> list[Any]:
    pairs = [pair for pair in given.rows if None not in pair]
    xs, ys = ([pair[side] for pair in pairs] for side in (0, 1))
    x_mean, y_mean = (math.fsum(side) / len(pairs) if pairs else 0.0 for side in (xs, ys))
    numbers = [
        len(pairs),
        x_mean,
        y_mean,
        math.fsum((x - x_mean) * (y - y_mean) for x, y in pairs),
        math.fsum((x - x_mean) ** 2 for x in xs),
        math.fsum((y - y_mean) ** 2 for y in ys),
    ]
    return [pytest.approx(number, rel=1e-8, abs=1e-6) for number in numbers]


# -- states of many words ---------------------------------------------------------------------------------------------


def registers(precision: int) -> Inputs:
    def expected(given: Given) -> Any:
        ranks = [0] * (1 << precision)
        for value in given.values:
            bits = f"{value % 2**64:064b}"
            index = int(bits[:precision], 2)
            ranks[index] = max(ranks[index], f"{bits[precision:]}1".index("1") + 1)
        # Not sum(), which from Python 3.12 on compensates what rounding loses.
        return functools.reduce(operator.add, (2.0**-rank for rank in ranks), 0.0), float(ranks.count(0))

    state = words_type((1 << precision) // 10 + 1)
    accumulator = of(K.DISTINCT_REGISTERS, [f"{state}!"], expected, result=["float64!", "float64!"])
    return Inputs(["int64"], [VALUES["int64"]], [accumulator], 40)


def bits_of(given: Given) -> bytes:
    bits = np.zeros(192, np.uint8)
    bits[given.values] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def united(given: Given) -> bytes:
    return bytes(functools.reduce(operator.or_, column) for column in zip(bytes(24), *given.values, strict=True))


BITS = f"{words_type(3)}!"
WIDTH = 7
FACTORS = [1_234_567_891, 987_654_321, 5]


def signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def column_of_long(value: int, line: int) -> int:
    hashed = signed(FACTORS[line] * value, 64)
    hashed = signed(hashed + (hashed >> 32), 64) & (2**31 - 1)
    return hashed % WIDTH


def column_of_hashes(value: int, line: int) -> int:
    first, second = signed(value >> 32, 32), signed(value, 32)
    return abs(signed(first + line * second, 32)) % WIDTH


def count_min(kind: AccumulatorKind, column_of: Callable[[int, int], int]) -> tuple[Accumulator, Expected]:
    def expected(given: Given) -> bytes:
        counts = [0] * (WIDTH * len(FACTORS))
        for value in given.values:
            for line in range(len(FACTORS)):
                counts[line * WIDTH + column_of(value, line)] += 1
        facts = (1, len(given.values), len(FACTORS), WIDTH)
        return struct.pack(f">iqii{len(FACTORS)}q{len(counts)}q", *facts, *FACTORS, *counts)

    state = f"{words_type(1 + len(FACTORS) + WIDTH * len(FACTORS))}!"
    return of(kind, [state], expected, result=["binary!"], initial=[0, *FACTORS], depth=len(FACTORS))


def histogram(type_name: str, bins: int, expected: Expected) -> tuple[Accumulator, Expected]:
    state, floating = f"{words_type(1 + 2 * (bins + 1))}!", type_name == "float64"
    return of(K.HISTOGRAM, [state], expected, result=[bins_type(type_name)], bins=bins, floating=floating)


def between(values: list[Any], share: float) -> float:
    position = (len(values) - 1) * share
    low, high = values[math.floor(position)], values[math.ceil(position)]
    return low if low == high else (math.ceil(position) - position) * low + (position - math.floor(position)) * high


def percentiles(rule: int, *, descending: bool) -> tuple[Accumulator, Expected]:
    """Percentiles between the nearest two values (rule 0), or each a value (rule 1)."""
    shares = [0.0, 0.25, 0.3, 0.5, 1.0]

    def expected(given: Given) -> Any:
        ordered = sorted(given.values, reverse=descending)
        if not ordered:
            return None
        if rule == 0:
            return pytest.approx([between(ordered, share) for share in shares])
        chosen = [ordered[max(math.ceil(share * len(ordered)), 1) - 1] for share in shares]
        # Zeros of both signs are equal: any of them is right.
        return Such(lambda result: result == chosen)

    options = {"percentages": shares, "rule": -1 - rule if descending else rule}
    return of(K.COUNTED, [f"{counts_type('float64')}!"], expected, result=["list<float64>"], **options)


def exact_bins(given: Given) -> Any:
    return [{"x": value, "y": float(count)} for value, count in sorted(Counter(given.values).items())] or None


def few_bins(given: Given) -> Any:
    def holds(bins: Any) -> bool:
        if not given.values:
            return bins is None
        centers, heights = [each["x"] for each in bins], [each["y"] for each in bins]
        total = math.fsum(center * height for center, height in zip(centers, heights, strict=True))
        assert len(bins) <= 4
        assert centers == sorted(centers)
        assert sum(heights) == len(given.values)
        return total == pytest.approx(math.fsum(given.values), rel=1e-9, abs=1e-9)

    return Such(holds)


def sketched() -> tuple[Accumulator, Expected]:
    """A sketch that comes to what it does of all rows in one batch, which `test_hll_kernels.py` compares with Spark's."""

    def of_sketch(expected: Expected) -> tuple[Accumulator, Expected]:
        return of(K.HLL_SKETCH, ["list<int32>!"], expected, result=["binary!"], lg_k=4)

    alone = Inputs(["int64"], [], [of_sketch(len)])

    def expected(given: Given) -> Any:
        rows = [(0, *row) for row in given.rows]
        return aggregate_parts(alone.schema, [rows], combined=False)[0]["a0_0"]

    return of_sketch(expected)


def few_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A strategy of six of these values at most, so that they are equal often."""
    return st.shared(st.lists(values, min_size=1, max_size=6)).flatmap(st.sampled_from)


# -- the table --------------------------------------------------------------------------------------------------------

INT64, FLOATS = VALUES["int64"], st.floats(-100, 100)
PAIR = pa.struct({"a": pa.int64(), "b": pa.string()})
ORDERINGS = ("int64", "float64", "decimal(38,0)", "string", "timestamp", "bool")
CASES: dict[str, Inputs] = {
    **{name: of_any_type(name, values) for name, values in VALUES.items()},
    **{
        f"{name} by {ordering}": by_ordering(name, ordering, VALUES[name], VALUES[ordering])
        for name in ("string", "decimal(7,2)", "int32")
        for ordering in ORDERINGS
    },
    "pairs": of_any_type(type_to_string(PAIR), nested_values.values(PAIR)),
    "a text by a pair": by_ordering("string", type_to_string(PAIR), VALUES["string"], nested_values.values(PAIR)),
    "whole numbers": Inputs(
        ["int64"],
        [INT64],
        [
            of(K.SUM_INT, ["int64"], lambda given: wrapped(sum(given.values)) if given.values else None),
            of(K.BIT_AND, ["int64"], folded(operator.and_)),
            of(K.BIT_OR, ["int64"], folded(operator.or_)),
            of(K.BIT_XOR, ["int64"], folded(operator.xor)),
        ],
        50,
    ),
    "decimals": Inputs(
        ["decimal(38,0)"], [VALUES["decimal(38,0)"]], [of(K.SUM_DECIMAL, ["decimal(38,0)", "bool!"], decimal_sum)], 80
    ),
    **{
        f"{name}, checked": Inputs(
            [name],
            [st.one_of(VALUES[name], st.sampled_from([largest, -largest]))],
            [of(K.SUM_INT_OR_NULL, [name, "bool!"], checked_sum(largest))],
            60,
        )
        for name, largest in (("int32", 2**31 - 1), ("int64", 2**63 - 1))
    },
    "factors": Inputs(["float64"], [st.floats(-1e3, 1e3)], [of(K.PRODUCT, ["float64"], about(math.prod, 1e-9))], 30),
    "large floats": Inputs(
        ["float64"],
        [st.floats(-1e6, 1e6)],
        [
            of(K.MOMENTS, ["float64!"] * 3, moments(2, rel=1e-6, least=1e-3, of_average=1e-6)),
            of(K.SUM_FLOAT, ["float64"], about(math.fsum, 1e-9, 1e-6)),
        ],
        60,
    ),
    "floats": Inputs(
        ["float64"],
        [FLOATS],
        [
            of(kind, ["float64!"] * (2 + len(powers)), moments(*powers, rel=1e-8, least=1e-4, of_average=1e-9))
            for kind, powers in {K.MOMENTS: (2,), K.MOMENTS_3: (2, 3), K.MOMENTS_4: (2, 3, 4)}.items()
        ],
        40,
    ),
    "pairs of floats": Inputs(
        ["float64"] * 2,
        [FLOATS, FLOATS],
        [
            of(K.COVARIANCE, ["float64!"] * 4, lambda given: co_moments(given)[:4], inputs=2),
            of(K.CORRELATION, ["float64!"] * 6, co_moments, inputs=2),
        ],
        40,
    ),
    "4 bits of a hash": registers(4),
    "9 bits of a hash": registers(9),
    "bits": Inputs(["int64"], [st.integers(0, 191)], [of(K.BITMAP, [BITS], bits_of, result=["binary!"])], 30),
    "bitmaps": Inputs(
        [words_type(3)],
        [st.binary(min_size=24, max_size=24)],
        [of(K.BITMAP_OR, [BITS], united, result=["binary!"])],
        30,
    ),
    "hashed": Inputs(
        ["int64"],
        [st.one_of(INT64, st.integers(-9, 9))],
        [count_min(K.COUNT_MIN, column_of_long), count_min(K.COUNT_MIN_BYTES, column_of_hashes)],
        30,
    ),
    "sketched": Inputs(["int64"], [st.integers(-300, 300)], [sketched()]),
    **{
        f"{name} with frequencies": Inputs(
            [name, "int64"], [few_of(VALUES[name]), st.integers(-1, 3)], counted(name, inputs=2)
        )
        for name in ("int32", "string", "decimal(7,2)", "timestamp", "bool")
    },
    "shares": Inputs(
        ["float64"],
        [st.one_of(st.integers(0, 5).map(float), st.floats(-1e6, 1e6))],
        [percentiles(rule, descending=descending) for rule in (0, 1) for descending in (False, True)],
        60,
    ),
    "bins of few values": Inputs(["int32"], [st.integers(-3, 3)], [histogram("int32", 7, exact_bins)], 30),
    "bins": Inputs(["float64"], [FLOATS], [histogram("float64", 4, few_bins)], 30),
}

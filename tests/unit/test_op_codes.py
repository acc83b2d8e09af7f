"""Every operation code moves an accumulator to the values that its name says, and no compiled loop takes an unknown code."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Field, StateSchema
from coordinator.model.type_names import bins_type, type_to_string, words_type
from store_actors.engine.op_code_kernels import OpCode
from store_actors.engine.table import GroupTable
from tests.unit.fold_rows import Rows, raw, run, schema_of

K = AccumulatorKind
PAIR = type_to_string(pa.struct({"a": pa.int64(), "b": pa.string()}))
WIDTH, FACTORS = 7, (3, 5)


@dataclass(frozen=True)
class Case:
    """Rows of two batches, and the row that one group comes to when its accumulator is moved by a step.

    With `merge` each batch is folded into a table of its own, whose state is what the step gets.
    """

    kind: AccumulatorKind
    types: list[str]
    state: list[Field]
    batches: tuple[Rows, Rows]
    expected: Any
    merge: bool = False
    result: list[Field] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> StateSchema:
        return schema_of(self.kind, self.types, self.state, self.result, self.options)


def column(*values: Any) -> tuple[Rows, Rows]:
    """Rows of one column, of which the last two are the second batch."""
    return [(value,) for value in values[:-2]], [(value,) for value in values[-2:]]


def single(kind: AccumulatorKind, type_name: str, values: tuple[Any, ...], expected: Any) -> Case:
    """A case whose state is one value of the input's type."""
    return Case(kind, [type_name], [Field("s", type_name)], column(*values), {"s": expected})


def by_ordering(kind: AccumulatorKind, ordering: str, orders: tuple[Any, ...], expected: str) -> Case:
    """A case of the values "a" to "e", the third of which has no ordering."""
    rows: Rows = list(zip("abcde", (*orders[:2], None, *orders[2:]), strict=True))
    order = orders["abde".index(expected)]
    state = [Field("s", "string"), Field("o", ordering)]
    return Case(kind, ["string", ordering], state, (rows[:3], rows[3:]), {"s": expected, "o": order})


def doubles(*names: str) -> list[Field]:
    return [Field(name, "float64", False) for name in names]


def moments(kind: AccumulatorKind, expected: Mapping[str, float], *, merge: bool) -> Case:
    """The moments of 1, 2, 4 and 9, whose average is 4."""
    batches = column(1.0, None, 2.0, 4.0, 9.0)
    return Case(kind, ["float64"], doubles(*expected), batches, pytest.approx(expected), merge=merge)


def co_moments(*, merge: bool) -> Case:
    rows: Rows = [(1.0, 2.0), (None, 7.0), (2.0, 0.0), (3.0, 7.0), (8.0, None)]
    expected = {"n": 3.0, "x": 2.0, "y": 3.0, "ck": 5.0, "xm": 2.0, "ym": 26.0}
    return Case(
        K.CORRELATION, ["float64"] * 2, doubles(*expected), (rows[:3], rows[3:]), pytest.approx(expected), merge=merge
    )


def registers(*, merge: bool) -> Case:
    """Hashes that begin with 0000, 0001, 0001 and 1111, and go on with 0, 2, 5 and 1 zeros."""
    hashes = [0b0000_1 << 59, 0b0001_001 << 57, 0b0001_000001 << 54, 0b1111_01 << 58]
    signed = [int(np.uint64(value).view(np.int64)) for value in hashes]
    total = 2.0**-1 + 2.0**-6 + 2.0**-2 + 13
    return Case(
        K.DISTINCT_REGISTERS, ["int64"], [Field("s", words_type(2), False)], column(*signed[:2], None, *signed[2:]),
        {"total": total, "zeros": 13.0}, merge=merge, result=doubles("total", "zeros"),
    )  # fmt: skip


def bits(kind: AccumulatorKind, type_name: str, batches: tuple[Rows, Rows], expected: bytes) -> Case:
    state, result = [Field("s", words_type(2), False)], [Field("s", "binary", False)]
    return Case(kind, [type_name], state, batches, {"s": expected}, result=result)


def counts(kind: AccumulatorKind, table: list[list[int]], *, merge: bool = False) -> Case:
    """A count-min table of 1, 2, 2**32 and 2**33."""
    depth = len(FACTORS)
    expected = struct.pack(f">iqii{depth}q{depth * WIDTH}q", 1, 4, depth, WIDTH, *FACTORS, *table[0], *table[1])
    state = [Field("s", words_type(1 + depth + depth * WIDTH), False)]
    return Case(
        kind, ["int64"], state, column(1, 2, None, 2**32, 2**33), {"s": expected}, merge=merge,
        result=[Field("s", "binary", False)], options={"initial": [0, *FACTORS], "depth": depth},
    )  # fmt: skip


def bins(*, merge: bool) -> Case:
    expected = [{"x": 1, "y": 2.0}, {"x": 2, "y": 1.0}, {"x": 7, "y": 1.0}]
    state, result = [Field("s", words_type(11), False)], [Field("s", bins_type("int32"))]
    options = {"bins": 4, "floating": False}
    return Case(
        K.HISTOGRAM, ["int32"], state, column(7, None, 1, 2, 1), {"s": expected}, merge=merge, result=result, options=options
    )  # fmt: skip


INTS = (2, None, -3, 6, 5)
FLOATS = (1.5, None, -3.25, 6.0, 0.5)
DECIMALS = tuple(None if value is None else Decimal(value) * 10**25 for value in INTS)
STRINGS = ("m", None, "b", "z", "q")
PAIRS = tuple({"a": a, "b": b} for a, b in ((1, "m"), (1, "b"), (2, "a"), (1, "z")))
SET = [Field("s", "int64"), Field("set", "bool", False)]
EMPTY = [Field("s", "int64"), Field("empty", "bool", False)]
M2, M4 = {"n": 4.0, "avg": 4.0, "m2": 38.0}, {"n": 4.0, "avg": 4.0, "m2": 38.0, "m3": 90.0, "m4": 722.0}
#: 3 and 5 times a value (and what of it is beyond 32 bits), modulo 7.
LONG_COUNTS = [[0, 0, 0, 2, 0, 0, 2], [0, 0, 0, 2, 0, 2, 0]]
#: The upper half of a value in the first line, both halves in the second one, modulo 7.
HASH_COUNTS = [[2, 1, 1, 0, 0, 0, 0], [0, 2, 2, 0, 0, 0, 0]]

CASES: Mapping[OpCode, Case] = {
    OpCode.COUNT: Case(K.COUNT_VALID, ["int64"], [Field("s", "int64", False)], column(*INTS), {"s": 4}),
    OpCode.ADD_INT: single(K.SUM_INT, "int64", INTS, 10),
    OpCode.ADD_FLOAT: single(K.SUM_FLOAT, "float64", FLOATS, 4.75),
    OpCode.ADD_DECIMAL: Case(
        K.SUM_DECIMAL, ["decimal(38,0)"], [Field("s", "decimal(38,0)"), EMPTY[1]], column(*DECIMALS),
        {"s": 10**26, "empty": False},
    ),
    OpCode.MIN_INT: single(K.MIN, "int64", INTS, -3),
    OpCode.MAX_INT: single(K.MAX, "int64", INTS, 6),
    OpCode.MIN_FLOAT: single(K.MIN, "float64", FLOATS, -3.25),
    OpCode.MAX_FLOAT: single(K.MAX, "float64", FLOATS, 6.0),
    OpCode.MIN_DECIMAL: single(K.MIN, "decimal(38,0)", DECIMALS, -3 * 10**25),
    OpCode.MAX_DECIMAL: single(K.MAX, "decimal(38,0)", DECIMALS, 6 * 10**25),
    OpCode.MIN_STRING: single(K.MIN, "string", STRINGS, "b"),
    OpCode.MAX_STRING: single(K.MAX, "string", STRINGS, "z"),
    OpCode.FIRST: Case(K.FIRST_VALID, ["int64"], SET, column(None, *INTS), {"s": 2, "set": True}),
    OpCode.LAST: Case(K.LAST_VALID, ["int64"], SET, column(*INTS, None), {"s": 5, "set": True}),
    OpCode.MOMENTS: moments(K.MOMENTS, M2, merge=False),
    OpCode.MERGE_MOMENTS: moments(K.MOMENTS, M2, merge=True),
    OpCode.MULTIPLY_FLOAT: single(K.PRODUCT, "float64", FLOATS, -14.625),
    OpCode.AND_INT: single(K.BIT_AND, "int64", (14, None, 7, 13, 12), 4),
    OpCode.OR_INT: single(K.BIT_OR, "int64", (8, None, 1, 8, 2), 11),
    OpCode.XOR_INT: single(K.BIT_XOR, "int64", (8, None, 1, 8, 2), 3),
    OpCode.ADD_INT_CHECKED: Case(
        K.SUM_INT_OR_NULL, ["int64"], EMPTY, column(2**62, None, 2**62, 1, -9), {"s": None, "empty": False}
    ),
    OpCode.MIN_BY_INT: by_ordering(K.MIN_BY, "int64", (2, -3, 6, 5), "b"),
    OpCode.MAX_BY_INT: by_ordering(K.MAX_BY, "int64", (2, -3, 6, 5), "d"),
    OpCode.MIN_BY_FLOAT: by_ordering(K.MIN_BY, "float64", (-1.5, -3.25, 6.0, 0.5), "b"),
    OpCode.MAX_BY_FLOAT: by_ordering(K.MAX_BY, "float64", (-1.5, -3.25, 6.0, 0.5), "d"),
    OpCode.MIN_BY_DECIMAL: by_ordering(K.MIN_BY, "decimal(38,0)", (2 * 10**25, -(3 * 10**25), 6 * 10**25, 5), "b"),
    OpCode.MAX_BY_DECIMAL: by_ordering(K.MAX_BY, "decimal(38,0)", (2 * 10**25, -(3 * 10**25), 6 * 10**25, 5), "d"),
    OpCode.MIN_BY_STRING: by_ordering(K.MIN_BY, "string", ("m", "b", "z", "q"), "b"),
    OpCode.MAX_BY_STRING: by_ordering(K.MAX_BY, "string", ("m", "b", "z", "q"), "d"),
    OpCode.HIGHER_MOMENTS: moments(K.MOMENTS_4, M4, merge=False),
    OpCode.MERGE_HIGHER_MOMENTS: moments(K.MOMENTS_4, M4, merge=True),
    OpCode.CO_MOMENTS: co_moments(merge=False),
    OpCode.MERGE_CO_MOMENTS: co_moments(merge=True),
    OpCode.ADD_HASH: registers(merge=False),
    OpCode.MERGE_REGISTERS: registers(merge=True),
    OpCode.SET_BIT: bits(K.BITMAP, "int64", column(0, None, 9, 127, 9), b"\1\2" + bytes(13) + b"\x80"),
    OpCode.OR_WORDS: bits(
        K.BITMAP_OR, words_type(2), column(bytes([1] * 16), None, bytes([1] * 16), bytes([3] * 16), bytes([8] * 16)), bytes([11] * 16)
    ),
    OpCode.COUNT_LONG: counts(K.COUNT_MIN, LONG_COUNTS),
    OpCode.COUNT_HASHES: counts(K.COUNT_MIN_BYTES, HASH_COUNTS),
    OpCode.MERGE_COUNTS: counts(K.COUNT_MIN, LONG_COUNTS, merge=True),
    OpCode.ADD_TO_BINS: bins(merge=False),
    OpCode.MERGE_BINS: bins(merge=True),
    OpCode.MIN_NESTED: single(K.MIN, PAIR, (PAIRS[0], None, *PAIRS[1:]), PAIRS[1]),
    OpCode.MAX_NESTED: single(K.MAX, PAIR, (PAIRS[0], None, *PAIRS[1:]), PAIRS[2]),
    OpCode.MIN_BY_NESTED: by_ordering(K.MIN_BY, PAIR, PAIRS, "b"),
    OpCode.MAX_BY_NESTED: by_ordering(K.MAX_BY, PAIR, PAIRS, "d"),
}  # fmt: skip


@pytest.mark.parametrize("code", OpCode, ids=lambda code: code.name)
def test_a_step_comes_to_the_values_of_its_code(code: OpCode) -> None:
    case = CASES[code]
    layout = GroupTable(case.schema).layout
    (operation,) = (layout.partial if case.merge else layout.raw).operations
    assert OpCode(operation[0]) is code
    assert run(case.schema, list(case.batches), merge=case.merge) == case.expected


@pytest.mark.parametrize("unknown", [-1, max(OpCode) + 1, 2**40])
@pytest.mark.parametrize("code", OpCode, ids=lambda code: code.name)
def test_no_loop_takes_a_code_that_it_does_not_know(code: OpCode, unknown: int) -> None:
    """As a new code that the compiled loops forget: in each case's place, with values and with nulls."""
    case = CASES[code]
    for row in case.batches[0]:
        table = GroupTable(case.schema)
        table.layout.raw.operations[:, 0] = unknown
        (batch,) = raw(case.schema, [row]).to_batches()
        with pytest.raises(ValueError, match="no accumulator has a step of this code"):
            table.accumulate(table.encode(batch), 1)

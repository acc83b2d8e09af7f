"""Joins of two streams: what is kept and written, memory, and conditions; `test_shard_machines.py` compares with plain lists."""

from __future__ import annotations

import math
from collections import Counter
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field
from coordinator.model.type_names import string_to_type
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.operators.expressions import PairCondition
from store_actors.operators.join_schema import join_schema
from tests.unit.join_machine import SECOND, Driver, Row, call, column, left, right, rows_of


def literal(kind: str, value: object) -> Row:
    return {"op": "literal", "type": kind, "value": value}


# -- a shard; Spark's cases are in tests/integration/join_cases.py -----------------------------------------------------


def simple(join_type: str = "inner", **options: Any) -> Driver:
    fields = Field("l0", "int64"), Field("l1", "int64")
    right_fields = Field("r0", "int64"), Field("r1", "int64")
    return Driver(join_schema((Field("k0", "int64"),), fields, right_fields, {"join_type": join_type, **options}))


def windowed(join_type: str) -> Driver:
    """Return a join on a key and a ten-second window, with a watermark of ten seconds on either side, as in JO1."""
    keys = Field("k0", "int64"), Field("k1", "timestamp")
    sides = [
        (Field(f"{s}0", "int64"), Field(f"{s}1", "int64"), Field(f"{s}t", "timestamp"), Field(f"{s}p", "bool"))
        for s in "lr"
    ]
    options = {
        "join_type": join_type,
        "event_time": ["lt", "rt"],
        "expiry": ["k1", "k1"],
        "output": [["l0", "l1"], ["r0", "r1"]],
        "output_lag_us": [0, 0],
    }
    return Driver(join_schema(keys, *sides, options, 10_000))


def timed(side: str, times: int, *values: int) -> list[Row]:
    return [
        {
            "k0": v,
            "k1": (v // 10 + 1) * 10 * SECOND,
            f"{side}0": v,
            f"{side}1": times * v,
            f"{side}t": v * SECOND,
            f"{side}p": v * times > 4 if side == "l" else None,
        }
        for v in values
    ]


def tl(*values: int) -> list[Row]:
    return timed("l", 2, *values)


def tr(*values: int) -> list[Row]:
    return timed("r", 3, *values)


def test_a_row_that_was_never_matched_and_comes_after_its_end_gets_its_nulls_in_its_batch() -> None:
    run = windowed("left_outer")
    change = run.batch(tl(3, 4), tr(3), 12_000)
    assert rows_of(change.emitted) == {(3, 6, 3, 9): 1, (4, 8, None, None): 1}
    assert (len(run.shard), change.delta.num_rows) == (0, 0)
    # They are not counted, as in Spark: they were never kept.
    assert (change.rows_updated, change.rows_removed) == (0, 0)


def test_a_delta_has_both_sides_and_only_columns_that_are_needed_again() -> None:
    run = windowed("left_outer")
    names = run.schema.row_schema().names
    assert names == ["k0", "k1", "__row", "__side", "__matched", "l0", "l1", "r0", "r1"]
    change = run.batch(tl(3, 4), tr(3), 0)
    assert change.delta.schema == run.schema.row_schema().append(pa.field(CHANGE_COLUMN, pa.int8()))
    rows = {(row["__side"], row["l0"], row["r0"], row["__matched"]) for row in change.delta.to_pylist()}
    assert rows == {(0, 3, None, True), (0, 4, None, False), (1, None, 3, None)}
    assert len({row["__row"] for row in change.delta.to_pylist()}) == 3
    marked = run.batch([], tr(4), 0).delta.to_pylist()
    assert {(row["__side"], row["__matched"]) for row in marked} == {(0, True), (1, None)}


def test_output_watermark_is_behind_by_what_kept_rows_may_be() -> None:
    run = simple(output_lag_us=[None, 5_000_500])
    assert run.shard.output_watermark_ms(20_000) == 14_999
    assert run.shard.output_watermark_ms(100) == 0
    assert simple().shard.output_watermark_ms(20_000) == 20_000


def test_a_hot_key_is_joined_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simple(condition=call("=", column("l1"), column("r1")), output=[["l1"], ["r1"]])
    sizes: list[int] = []
    holds = PairCondition.holds

    def watched(self: PairCondition, columns: Any, size: int) -> Any:
        sizes.append(size)
        return holds(self, columns, size)

    monkeypatch.setattr(PairCondition, "holds", watched)
    count = 3000
    change = run.batch(
        [{"k0": 1, "l0": 0, "l1": v} for v in range(count)], [{"k0": 1, "r0": 0, "r1": v} for v in range(count)]
    )
    assert rows_of(change.emitted) == Counter((v, v) for v in range(count))
    assert sum(sizes) == count * count
    assert max(sizes) <= 1 << 20


def test_a_failed_batch_leaves_the_shard_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simple("full_outer", condition=call("<=", column("l1"), column("r1")))
    run.batch(left(1, 2), right(2, 3))
    before = run.shard.snapshot()
    with monkeypatch.context() as patch:
        # Left rows were already matched and kept; right rows find them, and memory runs out.
        patch.setattr(run.shard._sides[1], "stored_pieces", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.shard.apply(run.input(left(3), right(1)), 0, 2)
    assert (run.shard.snapshot().sort_by("__row").equals(before.sort_by("__row")), run.shard.version) == (True, 1)
    assert rows_of(run.batch(left(3), right(1)).emitted) == {(3, 6, 3, 9): 1, (1, 2, 1, 3): 1}


def test_the_output_of_a_join_cannot_be_derived_from_its_delta() -> None:
    run = simple()
    with pytest.raises(InvalidRequestError, match="apply the batch again"):
        run.shard.output(run.batch(left(1), right(1)).delta)


# -- conditions -------------------------------------------------------------------------------------------------------

TYPES = {
    "i": "int64", "j": "int64", "x": "float64", "y": "float64", "s": "string", "t": "timestamp", "u": "timestamp",
    "d": "duration", "b": "bool", "c": "bool", "p": "decimal(10,2)", "day": "date32", "small": "int32",
}  # fmt: skip


def truth(tree: Row, **values: Any) -> bool:
    condition = PairCondition(tree, {name: string_to_type(kind) for name, kind in TYPES.items()})
    columns = {name: pa.array([value], string_to_type(TYPES[name])) for name, value in values.items()}
    return bool(condition.holds(columns, 1)[0])


B, C, T, U, D, P = (column(name) for name in "bctudp")
ONE, TWO = column("i"), column("j")
WITHIN = call("<=", T, call("+", U, literal("duration", 500)))
DAYS = {"op": "cast", "type": "int32", "args": [column("day")]}


@pytest.mark.parametrize(
    ("tree", "values", "holds"),
    [
        # Three-valued logic: only rows that are true are kept.
        (call("or", B, C), {"b": None, "c": True}, True),
        (call("or", B, C), {"b": None, "c": False}, False),
        (call("not", call("and", B, C)), {"b": None, "c": True}, False),
        (call("not", call("and", B, C)), {"b": None, "c": False}, True),
        (call("isnull", call("=", ONE, TWO)), {"i": None, "j": 1}, True),
        (literal("bool", True), {}, True),
        (literal("bool", None), {}, False),
        # Null-safe equality is never null.
        (call("<=>", ONE, TWO), {"i": None, "j": None}, True),
        (call("not", call("<=>", ONE, TWO)), {"i": None, "j": 1}, True),
        (call("<=>", ONE, TWO), {"i": 1, "j": 1}, True),
        (call("<=>", ONE, literal("int64", None)), {"i": None}, True),
        # Strings compare by bytes.
        (call("<", column("s"), literal("string", "é")), {"s": "z"}, True),
        (call("<", column("s"), literal("string", "\U0001f600")), {"s": "\uff5e"}, True),
        # Times and durations are computed in microseconds.
        (WITHIN, {"t": 1500, "u": 1000}, True),
        (WITHIN, {"t": 1501, "u": 1000}, False),
        (call("=", call("-", T, U), D), {"t": 1500, "u": 1000, "d": 500}, True),
        (call(">", T, call("-", U, call("*", D, literal("int32", 2)))), {"t": 1, "u": 2, "d": 1}, True),
        # Numbers wrap and widen as in Spark.
        (call("<", call("+", ONE, TWO), ONE), {"i": 2**63 - 1, "j": 1}, True),
        (call("=", {"op": "cast", "type": "int64", "args": [column("small")]}, ONE), {"small": 7, "i": 7}, True),
        (call("=", P, literal("decimal(10,2)", "1.50")), {"p": Decimal("1.5")}, True),
        (call("=", call("-", DAYS, literal("int32", 1)), literal("int32", 9)), {"day": 10}, True),
    ],
)
def test_a_condition_holds_where_it_does_in_spark(tree: Row, values: Row, holds: bool) -> None:
    assert truth(tree, **values) == holds


FLOATS = st.one_of(st.none(), st.sampled_from([math.nan, 0.0, -0.0, 1.5, -2.0, math.inf, -math.inf]))


@settings(deadline=None)  # compiled at the first call
@given(FLOATS, FLOATS)
def test_floats_are_ordered_with_nan_last_and_one_zero(x: float | None, y: float | None) -> None:
    def rank(value: float) -> tuple[bool, float]:
        return math.isnan(value), 0.0 if math.isnan(value) else value + 0.0

    for op, holds in {
        "=": lambda a, b: a == b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }.items():
        expected = x is not None and y is not None and holds(rank(x), rank(y))
        assert truth(call(op, column("x"), column("y")), x=x, y=y) == expected
        is_null = x is None or y is None
        assert truth(call("not", call(op, column("x"), column("y"))), x=x, y=y) == (not is_null and not expected)


@pytest.mark.parametrize(
    "tree",
    [
        column("nowhere"),
        call("xor", column("b"), column("c")),
        call("not", column("b"), column("c")),
        call("=", column("i"), column("x")),
        call("=", call("+", column("p"), column("p")), column("p")),
        {"op": "cast", "type": "int32", "args": [column("i")]},
        {"op": "cast", "type": "nothing", "args": [column("i")]},
        literal("int64", "one"),
        column("i"),
    ],
)
def test_conditions_that_cannot_be_evaluated_are_refused_before_any_batch(tree: Row) -> None:
    with pytest.raises(InvalidRequestError, match="condition"):
        truth(tree)

"""Every accumulator kind over every type it takes, raw and merged, against plain Python."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import string_to_type
from store_actors.engine.table import GroupTable
from tests.unit.accumulator_values import VALUES

K = AccumulatorKind


def schema_of(kind: AccumulatorKind, type_name: str, state: tuple[Field, ...]) -> StateSchema:
    inputs = () if kind is K.COUNT_ROWS else ("v",)
    return StateSchema(
        keys=(Field("k", type_name),),
        inputs=(Field("v", type_name),),
        accumulators=(Accumulator(kind, inputs, state),),
        expiry_key=None,
        delay_ms=None,
        output_mode="update",
    )


def run(schema: StateSchema, parts: list[list[Any]], *, merge: bool, keys: list[list[Any]] | None = None) -> pa.Table:
    """Return a table that was fed all parts; with `merge` each part is first combined by a separate table."""
    value_type = string_to_type(schema.inputs[0].type)
    final = GroupTable(schema)
    for number, part in enumerate(parts):
        key = pa.array(keys[number], value_type) if keys else pa.nulls(len(part), value_type)
        batch = pa.record_batch([key, pa.array(part, value_type)], schema=schema.raw_schema())
        if merge:
            combined = GroupTable(schema)
            combined.accumulate(combined.encode(batch), 1)
            for partial in combined.decode(combined.rows[combined.live()]).to_batches():
                final.accumulate(final.encode(partial, partial=True), 1)
        else:
            final.accumulate(final.encode(batch), 1)
    return final.decode(final.rows[final.live()])


def only(table: pa.Table) -> dict[str, Any]:
    (row,) = table.to_pylist()
    return row


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("type_name", sorted(VALUES))
def test_min_max_first_last_count(type_name: str, merge: bool) -> None:
    value = st.one_of(st.none(), VALUES[type_name])
    parts_of = st.lists(st.lists(value, min_size=1, max_size=8), min_size=1, max_size=3)

    @settings(max_examples=25, deadline=None)
    @given(parts=parts_of)
    def check(parts: list[list[Any]]) -> None:
        flat = [item for part in parts for item in part]
        present = [item for item in flat if item is not None]
        order = (lambda text: text.encode()) if type_name == "string" else None
        extreme = (Field("s", type_name),)
        pair = (Field("s", type_name), Field("set", "bool", False))
        count = (Field("s", "int64", False),)
        expected: dict[AccumulatorKind, tuple[Any, tuple[Field, ...]]] = {
            K.MIN: (min(present, key=order) if present else None, extreme),
            K.MAX: (max(present, key=order) if present else None, extreme),
            K.FIRST: (flat[0], pair),
            K.LAST: (flat[-1], pair),
            K.FIRST_VALID: (present[0] if present else None, pair),
            K.LAST_VALID: (present[-1] if present else None, pair),
            K.COUNT_ROWS: (len(flat), count),
            K.COUNT_VALID: (len(present), count),
        }
        for kind, (answer, state) in expected.items():
            assert only(run(schema_of(kind, type_name, state), parts, merge=merge))["s"] == answer, kind

    check()


@pytest.mark.parametrize("type_name", sorted(VALUES))
def test_every_type_is_a_key_and_null_is_a_group(type_name: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(keys=st.lists(st.one_of(st.none(), VALUES[type_name]), min_size=1, max_size=40))
    def check(keys: list[Any]) -> None:
        schema = schema_of(K.COUNT_ROWS, type_name, (Field("n", "int64", False),))
        table = run(schema, [keys], merge=False, keys=[keys])
        counts = {row["k"]: row["n"] for row in table.to_pylist()}
        assert counts == {key: keys.count(key) for key in keys}
        assert table.num_rows == len(counts)

    # Floats reach the fleet normalised (-0.0 is 0.0): the plan normalises them.
    if not type_name.startswith("float"):
        check()


@pytest.mark.parametrize("merge", [False, True])
@given(parts=st.lists(st.lists(st.one_of(st.none(), VALUES["int64"]), min_size=1, max_size=6), min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_int_sum_wraps_like_java(merge: bool, parts: list[list[int | None]]) -> None:
    present = [item for part in parts for item in part if item is not None]
    answer = (sum(present) + 2**63) % 2**64 - 2**63 if present else None
    assert only(run(schema_of(K.SUM_INT, "int64", (Field("s", "int64"),)), parts, merge=merge))["s"] == answer


@pytest.mark.parametrize("merge", [False, True])
@given(
    parts=st.lists(
        st.lists(st.one_of(st.none(), VALUES["decimal(38,0)"]), min_size=1, max_size=6), min_size=1, max_size=3
    )
)
@settings(max_examples=80, deadline=None)
def test_decimal_sum_is_exact_and_null_beyond_its_precision(merge: bool, parts: list[list[Decimal | None]]) -> None:
    state = (Field("s", "decimal(38,0)"), Field("empty", "bool", False))
    row = only(run(schema_of(K.SUM_DECIMAL, "decimal(38,0)", state), parts, merge=merge))
    present = [int(item) for part in parts for item in part if item is not None]
    assert row["empty"] == (not present)
    totals = [0]
    if merge:  # partial sums can overflow where the running sum would not, and the other way round
        for part in parts:
            inner = [0]
            for item in part:
                inner.append(inner[-1] + int(item or 0))
            totals += [*inner, totals[-1] + inner[-1]]
    else:
        for item in present:
            totals.append(totals[-1] + item)
    overflowed = any(abs(total) >= 10**38 for total in totals)
    assert row["s"] == (None if overflowed else Decimal(sum(present)))


@pytest.mark.parametrize("merge", [False, True])
@given(
    parts=st.lists(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=8), min_size=1, max_size=3)
)
@settings(max_examples=60, deadline=None)
def test_moments_and_float_sum(merge: bool, parts: list[list[float | None]]) -> None:
    present = [item for part in parts for item in part if item is not None]
    state = (Field("n", "float64", False), Field("avg", "float64", False), Field("m2", "float64", False))
    row = only(run(schema_of(K.MOMENTS, "float64", state), parts, merge=merge))
    mean = math.fsum(present) / len(present) if present else 0.0
    assert row["n"] == len(present)
    assert row["avg"] == pytest.approx(mean, abs=1e-6)
    assert row["m2"] == pytest.approx(math.fsum((item - mean) ** 2 for item in present), rel=1e-6, abs=1e-3)
    total = only(run(schema_of(K.SUM_FLOAT, "float64", (Field("s", "float64"),)), parts, merge=merge))["s"]
    assert total == (pytest.approx(math.fsum(present), rel=1e-9, abs=1e-6) if present else None)


def test_nan_is_the_largest_float() -> None:
    parts = [[1.0, float("nan"), -1.0]]
    state = (Field("s", "float64"),)
    assert only(run(schema_of(K.MIN, "float64", state), parts, merge=False))["s"] == -1.0
    assert math.isnan(only(run(schema_of(K.MAX, "float64", state), parts, merge=False))["s"])


def test_many_groups_grow_the_table_and_keep_every_row() -> None:
    schema = schema_of(K.SUM_INT, "int64", (Field("s", "int64"),))
    keys = [list(range(start, start + 5000)) for start in range(0, 50_000, 2500)]
    table = run(schema, keys, merge=False, keys=keys)
    sums = dict(zip(table.column("k").to_pylist(), table.column("s").to_pylist(), strict=True))
    assert len(sums) == 52_500
    assert all(total == key * (2 if 2500 <= key < 50_000 else 1) for key, total in sums.items())


def test_more_flags_than_one_word_holds() -> None:
    fields = tuple(Field(f"v{number}", "int64") for number in range(100))
    schema = StateSchema(
        keys=(Field("k", "int64"),),
        inputs=fields,
        accumulators=tuple(Accumulator(K.MAX, (field.name,), (Field(f"m_{field.name}", "int64"),)) for field in fields),
        expiry_key=None,
        delay_ms=None,
        output_mode="update",
    )
    columns = [pa.array([1]), *(pa.array([number if number % 3 else None]) for number in range(100))]
    batch = pa.record_batch([c.cast(pa.int64()) for c in columns], schema=schema.raw_schema())
    table = GroupTable(schema)
    table.accumulate(table.encode(batch), 1)
    row = only(table.decode(table.rows[table.live()]))
    assert all(row[f"m_v{number}"] == (number if number % 3 else None) for number in range(100))

"""HLL sketches: raw, merged, undone and loaded again, against Spark's own bytes and against plain Python."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import list_type
from store_actors.engine.table import GroupTable
from tests.unit.accumulator_inputs import Rows, aggregate_parts, batch_of, combined_or_not, schema_of

K = AccumulatorKind
#: Coupons of 0, 1 and 2, and of 'ab' repeated 1 to 39 times, in order of their bits, as Spark 3.5 has them.
OF_NUMBERS = [0x04C2D7CB, 0x06FBF22B, 0x0DF92F86]
OF_TEXTS = struct.unpack(
    "<39I",
    bytes.fromhex(
        "65080c04f7f24f040c5b84045521a204b03ed404d272db04609691057504c10593cafc05b85c7206105db606e76aba06de9dbb0668c91a07a5bf5c079b25"
        "6b073e677607445cb1073b65ba0724a3e507a9882308cc95be084388d708fa2ff8088180060930dca60902ae290ad01df00a9d43c90b9adb940dcdf7fc0e"
        "672eaf0f2c04bd106b6c3711fca465130a73f013e249e1186450d419754b421b"
    ),
)
#: Spark's bytes of a union of the even and the odd numbers of -500 to 499, of 64 registers each.
UNION = bytes.fromhex(
    "0a0107060010020a00000000000000000000000000900b400000000000000000030000000000000005060407020604040305050307040707050407080804030706"
    "030204050606040608030308040505020405060404070804040506050508050407060404030305"
)


def of_kind(kind: AccumulatorKind, type_name: str, **options: Any) -> StateSchema:
    state, result = Field("s", list_type("int32"), False), Field("s", "binary", False)
    return schema_of(Accumulator(kind, ("v0",), (state,), result=(result,), options=options), types=[type_name])


def sketch_of(type_name: str, lg_k: int) -> StateSchema:
    return of_kind(K.HLL_SKETCH, type_name, lg_k=lg_k)


def union_of(*, may_differ: bool) -> StateSchema:
    return of_kind(K.HLL_UNION, "binary", lg_k=12, may_differ=may_differ)


def sketch(type_name: str, values: list[Any], lg_k: int, *, combined: bool = False, parts: int = 1) -> bytes:
    rows: Rows = [(0, value) for value in values] or [(0, None)]
    size = -(-len(rows) // parts)
    row_parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    (row,) = aggregate_parts(sketch_of(type_name, lg_k), row_parts, combined=combined).values()
    data: bytes = row["s"]
    return data


def coupons(data: bytes) -> set[int]:
    """Return the coupons of a sketch without registers."""
    assert data[7] in (8, 9)
    count = data[6] if data[7] == 8 else struct.unpack_from("<I", data, 8)[0]
    begin = 8 if data[7] == 8 else 12
    assert len(data) == begin + 4 * count
    return set(struct.unpack_from(f"<{count}I", data, begin))


def registers(data: bytes) -> list[int]:
    assert data[7] == 10
    return list(data[40:])


def test_coupons_are_sparks() -> None:
    list_sketch = sketch("int64", [2, 0, 1, 1, None], 12)
    assert list_sketch[:8] == bytes.fromhex("0201070c03080308")
    assert coupons(list_sketch) == set(OF_NUMBERS)
    set_sketch = sketch("string", ["ab" * times for times in range(40)], 12)
    assert set_sketch[:8] == bytes.fromhex("0301070c05080009")
    assert coupons(set_sketch) == set(OF_TEXTS)
    assert coupons(sketch("binary", [b"ab" * times for times in range(40)], 12)) == set(OF_TEXTS)


@combined_or_not
def test_a_union_of_many_values_has_sparks_registers(combined: bool) -> None:
    assert sketch("int64", list(range(-500, 500)), 6, combined=combined, parts=3) == UNION


def test_a_sketch_of_nothing_is_one() -> None:
    assert sketch("string", ["", None], 10) == bytes.fromhex("0201070a030c0008")


# Precision, and the largest number of values that a sketch keeps as coupons: with one more value it has registers.
@combined_or_not
@pytest.mark.parametrize(("lg_k", "most"), [(4, 7), (7, 7), (8, 24), (11, 192), (12, 384)])
def test_registers_come_with_as_many_values_as_in_spark(lg_k: int, most: int, combined: bool) -> None:
    values = list(range(most))
    assert len(coupons(sketch("int64", values * 2, lg_k, combined=combined, parts=2))) == most
    full = registers(sketch("int64", [*values, most], lg_k, combined=combined, parts=2))
    assert len(full) == 2**lg_k


def of_coupons(all_coupons: set[int], lg_k: int) -> list[int]:
    ranks = [0] * 2**lg_k
    for coupon in all_coupons:
        index = coupon & (2**lg_k - 1)
        ranks[index] = max(ranks[index], coupon >> 26)
    return ranks


@combined_or_not
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_sketch_is_that_of_its_distinct_values(combined: bool, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(-300, 300), min_size=1, max_size=300))
    parts, lg_k = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([4, 8, 10]))
    data_of_sketch = sketch("int64", values, lg_k, combined=combined, parts=parts)
    # A sketch of precision 21 keeps all of them as coupons.
    distinct = coupons(sketch("int64", sorted(set(values)), 21))
    if len(distinct) <= (7 if lg_k < 8 else 3 << (lg_k - 5)):
        assert coupons(data_of_sketch) == distinct
    else:
        ranks = registers(data_of_sketch)
        assert ranks == of_coupons(distinct, lg_k)
        least, at_least = data_of_sketch[6], struct.unpack_from("<I", data_of_sketch, 32)[0]
        assert (least, at_least) == (min(ranks), ranks.count(min(ranks)))
        assert struct.unpack_from("<dd", data_of_sketch, 16) == (sum(2.0**-rank for rank in ranks), 0.0)


def room_for_more(data: bytes) -> bytes:
    """Return a sketch as Spark writes sketches that may grow: with slots that are still 0."""
    return data if data[7] == 10 else data[:5] + bytes([data[5] & 4]) + data[6:] + bytes(4 * 5)


@combined_or_not
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_union_is_a_sketch_of_the_values_of_all_its_sketches(combined: bool, data: st.DataObject) -> None:
    sizes = st.integers(0, 500)
    pairs = data.draw(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5))
    lg_k = data.draw(st.sampled_from([4, 8]))
    sets = [range(begin, begin + size // 4) for begin, size in pairs]
    rows: Rows = [(0, room_for_more(sketch("int64", list(numbers), lg_k))) for numbers in sets]
    (row,) = aggregate_parts(union_of(may_differ=False), [[row_part] for row_part in rows], combined=combined).values()
    everything = sorted({value for numbers in sets for value in numbers})
    direct = sketch("int64", everything, lg_k)
    assert row["s"][7] == direct[7]
    if direct[7] == 10:
        assert row["s"] == direct
    else:
        assert coupons(row["s"]) == coupons(direct)


@combined_or_not
def test_sketches_of_several_precisions(combined: bool) -> None:
    fine, coarse = sketch("int64", list(range(600)), 9), sketch("int64", list(range(500, 900)), 7)
    rows: Rows = [(0, fine), (0, coarse), (0, None)]
    with pytest.raises(InvalidRequestError, match=r"HLL_UNION_DIFFERENT_LG_K.*values: 9 and 7"):
        aggregate_parts(union_of(may_differ=False), [rows], combined=combined)
    with pytest.raises(InvalidRequestError, match=r"HLL_UNION_DIFFERENT_LG_K.*values: 9 and 7"):
        aggregate_parts(union_of(may_differ=False), [rows[:1], rows[1:]], combined=combined)
    for parts in ([rows], [rows[:1], rows[1:]], [rows[::-1]]):
        (row,) = aggregate_parts(union_of(may_differ=True), parts, combined=combined).values()
        assert row["s"] == sketch("int64", list(range(900)), 7)
    # Few values have no registers, which would be coarser than the precision of the first sketch.
    few_rows: Rows = [(0, sketch("int64", [1], 9)), (0, sketch("int64", [2], 7))]
    (row,) = aggregate_parts(union_of(may_differ=True), [few_rows], combined=combined).values()
    assert (row["s"][3], coupons(row["s"])) == (9, coupons(sketch("int64", [1, 2], 12)))


def test_a_sketch_stays_small_with_many_values() -> None:
    schema = sketch_of("int64", 8)
    table = GroupTable(schema)
    for begin in range(0, 50_000, 100):
        table.accumulate(table.encode(batch_of(schema, [(0, value) for value in range(begin, begin + 100)])), 1)
    (row,) = table.decode(table.rows[table.live()]).to_pylist()
    assert len(row["s"]) <= 2 * 2**8

"""HLL sketches: raw, merged, undone and loaded again, against Spark's own bytes and against plain Python."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Accumulator, AccumulatorKind, Field, StateSchema
from coordinator.model.type_names import list_type
from store_actors.engine.table import GroupTable
from tests.unit.grouped_rows import Rows, aggregate_parts, batch_of, schema_of

K = AccumulatorKind
#: Of 0, 1 and 2; and of 'ab' once to 39 times, in order of their bits; as Spark 3.5 has them.
OF_NUMBERS = [0x04C2D7CB, 0x06FBF22B, 0x0DF92F86]
OF_TEXTS = struct.unpack(
    "<39I",
    bytes.fromhex(
        "65080c04f7f24f040c5b84045521a204b03ed404d272db04609691057504c10593cafc05b85c7206105db606e76aba06de9dbb0668c91a07a5bf5c079b25"
        "6b073e677607445cb1073b65ba0724a3e507a9882308cc95be084388d708fa2ff8088180060930dca60902ae290ad01df00a9d43c90b9adb940dcdf7fc0e"
        "672eaf0f2c04bd106b6c3711fca465130a73f013e249e1186450d419754b421b"
    ),
)
#: Spark's bytes of a union of the even and the odd ones of -500 to 499, of 64 registers each.
UNION = bytes.fromhex(
    "0a0107060010020a00000000000000000000000000900b400000000000000000030000000000000005060407020604040305050307040707050407080804030706"
    "030204050606040608030308040505020405060404070804040506050508050407060404030305"
)
combined_or_not = pytest.mark.parametrize("combined", [False, True])


def sketch_of(type_name: str, lg_k: int) -> StateSchema:
    state, result = Field("s", list_type("int32"), False), Field("s", "binary", False)
    made = Accumulator(K.HLL_SKETCH, ("v0",), (state,), result=(result,), options={"lg_k": lg_k})
    return schema_of(made, types=[type_name])


def union_of(*, may_differ: bool) -> StateSchema:
    state, result = Field("s", list_type("int32"), False), Field("s", "binary", False)
    options = {"lg_k": 12, "may_differ": may_differ}
    return schema_of(Accumulator(K.HLL_UNION, ("v0",), (state,), result=(result,), options=options), types=["binary"])


def sketch(type_name: str, values: list[Any], lg_k: int, *, combined: bool = False, parts: int = 1) -> bytes:
    rows: Rows = [(0, value) for value in values] or [(0, None)]
    size = -(-len(rows) // parts)
    some = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    (row,) = aggregate_parts(sketch_of(type_name, lg_k), some, combined=combined).values()
    told: bytes = row["s"]
    return told


def coupons(told: bytes) -> set[int]:
    """Of a sketch without registers."""
    assert told[7] in (8, 9)
    count = told[6] if told[7] == 8 else struct.unpack_from("<I", told, 8)[0]
    begin = 8 if told[7] == 8 else 12
    assert len(told) == begin + 4 * count
    return set(struct.unpack_from(f"<{count}I", told, begin))


def registers(told: bytes) -> list[int]:
    assert told[7] == 10
    return list(told[40:])


def test_coupons_are_sparks() -> None:
    few = sketch("int64", [2, 0, 1, 1, None], 12)
    assert few[:8] == bytes.fromhex("0201070c03080308")
    assert coupons(few) == set(OF_NUMBERS)
    some = sketch("string", ["ab" * times for times in range(40)], 12)
    assert some[:8] == bytes.fromhex("0301070c05080009")
    assert coupons(some) == set(OF_TEXTS)
    assert coupons(sketch("binary", [b"ab" * times for times in range(40)], 12)) == set(OF_TEXTS)


@combined_or_not
def test_many_are_the_registers_that_spark_has(combined: bool) -> None:
    assert sketch("int64", list(range(-500, 500)), 6, combined=combined, parts=3) == UNION


def test_a_sketch_of_nothing_is_one() -> None:
    assert sketch("string", ["", None], 10) == bytes.fromhex("0201070a030c0008")


#: Values of which each has a coupon of its own, by the precision with the number that makes registers of them.
@combined_or_not
@pytest.mark.parametrize(("lg_k", "most"), [(4, 7), (7, 7), (8, 24), (11, 192), (12, 384)])
def test_registers_come_with_as_many_values_as_in_spark(lg_k: int, most: int, combined: bool) -> None:
    values = list(range(most))
    assert len(coupons(sketch("int64", values * 2, lg_k, combined=combined, parts=2))) == most
    full = registers(sketch("int64", [*values, most], lg_k, combined=combined, parts=2))
    assert len(full) == 2**lg_k


def of_coupons(all_coupons: set[int], lg_k: int) -> list[int]:
    told = [0] * 2**lg_k
    for coupon in all_coupons:
        place = coupon & (2**lg_k - 1)
        told[place] = max(told[place], coupon >> 26)
    return told


@combined_or_not
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_sketch_is_that_of_its_distinct_values(combined: bool, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(-300, 300), min_size=1, max_size=300))
    parts, lg_k = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([4, 8, 10]))
    told = sketch("int64", values, lg_k, combined=combined, parts=parts)
    # With room for them all they are kept as they are.
    each = coupons(sketch("int64", sorted(set(values)), 21))
    if len(each) <= (7 if lg_k < 8 else 3 << (lg_k - 5)):
        assert coupons(told) == each
    else:
        assert registers(told) == of_coupons(each, lg_k)
        least, at_least = told[6], struct.unpack_from("<I", told, 32)[0]
        assert (least, at_least) == (min(registers(told)), registers(told).count(min(registers(told))))
        assert struct.unpack_from("<dd", told, 16) == (sum(2.0**-one for one in registers(told)), 0.0)


def room_for_more(told: bytes) -> bytes:
    """A sketch as Spark writes those that may grow: with places that are still 0."""
    return told if told[7] == 10 else told[:5] + bytes([told[5] & 4]) + told[6:] + bytes(4 * 5)


@combined_or_not
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_union_is_a_sketch_of_what_is_in_any(combined: bool, data: st.DataObject) -> None:
    sizes = st.integers(0, 500)
    pairs = data.draw(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5))
    lg_k = data.draw(st.sampled_from([4, 8]))
    sets = [range(begin, begin + size // 4) for begin, size in pairs]
    rows: Rows = [(0, room_for_more(sketch("int64", list(some), lg_k))) for some in sets]
    (row,) = aggregate_parts(union_of(may_differ=False), [[one] for one in rows], combined=combined).values()
    everything = sorted({value for some in sets for value in some})
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
    # Of few values no register is there that would be coarser than what was asked for first.
    few: Rows = [(0, sketch("int64", [1], 9)), (0, sketch("int64", [2], 7))]
    (row,) = aggregate_parts(union_of(may_differ=True), [few], combined=combined).values()
    assert (row["s"][3], coupons(row["s"])) == (9, coupons(sketch("int64", [1, 2], 12)))


def test_a_sketch_stays_small_whatever_comes() -> None:
    schema = sketch_of("int64", 8)
    held = aggregate_parts(
        schema, [[(0, value) for value in range(begin, begin + 997)] for begin in range(0, 9970, 997)], combined=True
    )
    assert len(held[0]["s"]) == 40 + 2**8
    table = GroupTable(schema)
    for begin in range(0, 50_000, 100):
        table.accumulate(table.encode(batch_of(schema, [(0, value) for value in range(begin, begin + 100)])), 1)
    (row,) = table.decode(table.rows[table.live()]).to_pylist()
    assert len(row["s"]) <= 2 * 2**8

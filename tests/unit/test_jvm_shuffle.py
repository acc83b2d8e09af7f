"""What Spark does before and in the shuffle: accumulators that it aggregates itself, beside those that the engine has, and the
routes by which it puts rows on shards, beside its own hash.
"""

from __future__ import annotations

import pytest

from coordinator.model.accumulator_kinds import AccumulatorKind as K
from tests.unit.jvm import CATALYST, Jvm

#: By kind: types of the inputs, and the number of fields of the state; Spark's function has a buffer of as many.
COMBINED: dict[K, tuple[list[str], int]] = {
    K.COUNT_ROWS: ([], 1),
    K.COUNT_VALID: (["bigint", "string"], 1),
    K.SUM_INT: (["bigint"], 1),
    K.SUM_FLOAT: (["double"], 1),
    K.SUM_DECIMAL: (["decimal(20,2)"], 2),
    K.SUM_INT_OR_NULL: (["bigint"], 2),
    K.SUM_INT_CHECKED: (["bigint"], 2),
    K.MIN: (["string"], 1),
    K.MAX: (["timestamp"], 1),
    K.FIRST: (["bigint"], 2),
    K.FIRST_VALID: (["string"], 2),
    K.LAST: (["bigint"], 2),
    K.LAST_VALID: (["binary"], 2),
    K.MAX_BY: (["string", "bigint"], 2),
    K.MIN_BY: (["bigint", "string"], 2),
    K.PRODUCT: (["double"], 1),
    K.BIT_AND: (["bigint"], 1),
    K.BIT_OR: (["int"], 1),
    K.BIT_XOR: (["smallint"], 1),
    K.MOMENTS: (["double"], 3),
    K.MOMENTS_3: (["double"], 4),
    K.MOMENTS_4: (["double"], 5),
    K.COVARIANCE: (["double", "double"], 4),
    K.CORRELATION: (["double", "double"], 6),
    K.DISTINCT_REGISTERS: (["bigint"], 1),
}
#: Why the rows of other kinds are shuffled as they are.
AS_ROWS = {
    **dict.fromkeys((K.COLLECT_LIST, K.COLLECT_SET, K.COUNTED), "the state grows with its rows: nothing is saved"),
    **dict.fromkeys(
        (K.BITMAP, K.BITMAP_OR), "Spark's buffer is a binary that its aggregation does not keep in its place"
    ),
    **dict.fromkeys(
        (K.COUNT_MIN, K.COUNT_MIN_BYTES, K.HISTOGRAM), "Spark's buffer is an object, not the state's words"
    ),
    **dict.fromkeys((K.HLL_SKETCH, K.HLL_UNION), "Spark's buffer is an object of another library"),
    **dict.fromkeys((K.VALUE, K.LIST, K.MAP), "no aggregate: a column of a keyed store"),
}
#: Kinds whose inputs may be of types for which Spark's buffer is not the state.
SOMETIMES: dict[K, tuple[list[str], int]] = {K.SUM_INT_OR_NULL: (["int"], 2), K.SUM_INT_CHECKED: (["int"], 2)}
REGISTER_WORDS = 52


def is_combined(jvm: Jvm, kind: K, types: list[str], fields: int, key: str = "string") -> bool:
    """Return whether Spark aggregates rows of a key and an accumulator."""
    columns = {"k0": key, **{f"v{index}": name for index, name in enumerate(types)}, "__hash": "int"}
    words = jvm.named("scala.Option").empty()
    if kind is K.DISTINCT_REGISTERS:
        columns["__v0"] = "string"
        words = jvm.named("scala.Option").apply(REGISTER_WORDS)
    inputs, state = [f"v{index}" for index in range(len(types))], [f"a_{index}" for index in range(fields)]
    accumulator = jvm.own("Accumulator")(str(kind), jvm.seq(inputs), jvm.seq(state), words)
    attributes = jvm.module(f"{CATALYST}.types.DataTypeUtils").toAttributes(jvm.struct(columns))
    aggregation = jvm.own("PartialAggregation").of(jvm.seq([accumulator]), attributes)
    return bool(aggregation.isDefined())


@pytest.mark.parametrize("kind", COMBINED)
def test_spark_aggregates_these(jvm: Jvm, kind: K) -> None:
    types, fields = COMBINED[kind]
    assert is_combined(jvm, kind, types, fields)
    # A state with another number of fields than Spark's buffer has is not filled from it.
    assert kind is K.DISTINCT_REGISTERS or not is_combined(jvm, kind, types, fields + 1)


@pytest.mark.parametrize("kind", [*AS_ROWS, *SOMETIMES])
def test_rows_of_others_are_shuffled_as_they_are(jvm: Jvm, kind: K) -> None:
    types, fields = SOMETIMES.get(kind, (["bigint"], 1))
    assert not is_combined(jvm, kind, types, fields)


def test_texts_are_aggregated_in_groups_that_spark_can_sort(jvm: Jvm) -> None:
    assert is_combined(jvm, K.MAX, ["bigint"], 1, key="map<string, int>")
    assert not is_combined(jvm, K.MAX, ["string"], 1, key="map<string, int>")


def test_every_kind_of_the_engine_is_one_of_these() -> None:
    assert {*COMBINED, *AS_ROWS} == set(K)
    assert not COMBINED.keys() & AS_ROWS.keys()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 16, 60])
def test_sparks_partitioning_puts_each_route_on_its_shard(jvm: Jvm, shards: int) -> None:
    literal = jvm.module(f"{CATALYST}.expressions.Literal")
    routes = list(jvm.own("Shards").routes(shards))
    hashes = [
        jvm.named(f"{CATALYST}.expressions.Murmur3Hash")(jvm.seq([literal.apply(route)]), 42).eval(None)
        for route in routes
    ]
    assert [value % shards for value in hashes] == list(range(shards))
    assert len(set(routes)) == shards
    assert min(routes) == 0

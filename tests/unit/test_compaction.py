"""Memory of strings and lists that no version has any more is freed while a shard runs, for every operator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, OperatorKind, StateSchema
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.operators.deduplicate import DeduplicateShard
from store_actors.operators.join import JoinShard
from store_actors.operators.join_schema import join_schema
from store_actors.operators.session_windows import SessionShard
from store_actors.operators.top import top_shard
from store_actors.operators.top_schema import top_schema

#: Rows of a batch, and bytes of a string: a batch adds 200 kB of new strings, all batches together 40 MB.
ROWS, LENGTH, BATCHES = 200, 1000, 200
BATCH = ROWS * LENGTH
SECOND = 1_000_000

Step = Callable[[int], int]


def texts(batch: int, name: str) -> pa.Array:
    return pa.array([f"{name} {batch} {row} ".ljust(LENGTH, "x") for row in range(ROWS)])


def times(batch: int) -> pa.Array:
    return pa.array(np.full(ROWS, batch * SECOND)).cast(pa.timestamp("us", "UTC"))


def ids() -> pa.Array:
    return pa.array(range(ROWS), pa.int64())


def of_raw(schema: StateSchema, **columns: pa.Array) -> ShardInput:
    return ShardInput.of_raw(schema, pa.record_batch(columns).cast(schema.raw_schema()))


def running(shard: AggregateShard, rows: Callable[[int], ShardInput], *, watermark: bool = True) -> Step:
    def step(batch: int) -> int:
        shard.apply(rows(batch), (batch - 1) * 1000 if watermark else 0, batch)
        shard.commit()
        return shard.nbytes

    return step


LARGEST = Accumulator(AccumulatorKind.LAST, ("v",), (Field("a0_last", "string"), Field("a0_set", "bool")))


def overwritten_values() -> Step:
    """An aggregation whose groups never expire, and whose values are strings."""
    schema = StateSchema((Field("k", "int64"),), (Field("v", "string"),), (LARGEST,), None, None, "update")
    shard = AggregateShard(schema)
    return running(shard, lambda batch: of_raw(schema, k=ids(), v=texts(batch, "v")), watermark=False)


def late_rows() -> Step:
    """Keys that come too late, which the state never has."""
    schema = StateSchema(
        (Field("t", "timestamp"), Field("k", "string")), (Field("v", "string"),), (LARGEST,), "t", 0, "append"
    )
    shard = AggregateShard(schema)
    shard.apply(of_raw(schema, t=times(0), k=texts(0, "k"), v=texts(0, "v")), 10**9, 1)
    shard.commit()

    def step(batch: int) -> int:
        shard.apply(of_raw(schema, t=times(batch), k=texts(batch, "k"), v=texts(batch, "v")), 10**9, batch + 1)
        shard.commit()
        return shard.nbytes

    return step


def closed_groups() -> Step:
    schema = StateSchema(
        (Field("t", "timestamp"), Field("k", "string")), (Field("v", "string"),), (LARGEST,), "t", 0, "append"
    )
    shard = AggregateShard(schema)
    return running(shard, lambda batch: of_raw(schema, t=times(batch), k=texts(batch, "k"), v=texts(batch, "v")))


def closed_sessions() -> Step:
    keys, session = (Field("k", "string"), Field(ROW_COLUMN, "int64", False)), ("session_start", "session_end")
    bounds = [
        Accumulator(kind, (name,), (Field(name, "timestamp"),))
        for kind, name in zip((AccumulatorKind.MIN, AccumulatorKind.MAX), session, strict=True)
    ]
    schema = StateSchema(
        keys, (*(Field(name, "timestamp") for name in session), Field("v", "string")), (*bounds, LARGEST),
        "session_end", 0, "append", operator=OperatorKind.SESSION,
    )  # fmt: skip
    shard = SessionShard(schema)

    def rows(batch: int) -> ShardInput:
        columns = {"k": texts(batch, "k"), "session_start": times(batch), "session_end": times(batch + 1)}
        table = pa.table({**columns, "v": texts(batch, "v")})
        table = table.select(schema.raw_schema().names).cast(schema.raw_schema())
        return ShardInput((table,), ROWS)

    return running(shard, rows)  # type: ignore[arg-type]


def forgotten_duplicates() -> Step:
    schema = StateSchema(
        (Field("k", "string"), Field("t", "timestamp")), (), (), "t", 0, "append",
        operator=OperatorKind.DEDUPLICATE, options={"late_us": 0},
    )  # fmt: skip
    shard = DeduplicateShard(schema)
    return running(shard, lambda batch: of_raw(schema, k=texts(batch, "k"), t=times(batch)))  # type: ignore[arg-type]


def first_rows(n: int) -> Callable[[], Step]:
    def make() -> Step:
        order = [{"column": "n", "descending": True, "nulls_first": False}]
        schema = top_schema((Field("k", "int64"),), (Field("n", "int64"), Field("v", "string")), n, order)
        shard = top_shard(schema)
        number = pa.array(np.zeros(ROWS, np.int64))
        return running(
            shard,  # type: ignore[arg-type]
            lambda batch: of_raw(schema, k=ids(), n=pc_add(number, batch), v=texts(batch, "v")),
            watermark=False,
        )

    return make


def pc_add(array: pa.Array, number: int) -> pa.Array:
    return pa.array(array.to_numpy() + number)


def joined_rows() -> Step:
    keys = (Field("k0", "string"),)
    sides = (Field("lt", "timestamp"),), (Field("r0", "string"), Field("rt", "timestamp"))
    shard = JoinShard(join_schema(keys, *sides, {"join_type": "full_outer", "expiry": ["lt", "rt"]}))

    def step(batch: int) -> int:
        left = pa.table({"k0": texts(batch, "k"), "lt": times(batch)})
        right = pa.table({"k0": texts(batch, "k"), "r0": texts(batch, "r"), "rt": times(batch)})
        shard.apply(ShardInput((left, right), 2 * ROWS), (batch - 1) * 1000, batch)
        shard.commit()
        return shard.nbytes

    return step


def keyed_values(remove: bool) -> Callable[[], Step]:
    """Keys that each version overwrites or removes."""

    def make() -> Step:
        key = Field("k", "string" if remove else "int64")
        shard = KeyedShard((key,), (Field("v", "string"),))

        def step(batch: int) -> int:
            handle = shard.begin(shard.version)
            if remove and batch > 1:
                handle.remove(pa.table({"k": texts(batch - 1, "k")}))
            handle.put(pa.table({"k": texts(batch, "k") if remove else ids(), "v": texts(batch, "v")}))
            handle.commit()
            return shard.nbytes

        return step

    return make


def growing_lists() -> Step:
    collect = Accumulator(AccumulatorKind.COLLECT_LIST, ("v",), (Field("a0_values", "list<string>", False),))
    schema = StateSchema(
        (Field("t", "timestamp"), Field("k", "int64")), (Field("v", "string"),), (collect,), "t", 0, "append"
    )
    shard = AggregateShard(schema)
    return running(shard, lambda batch: of_raw(schema, t=times(batch), k=ids(), v=texts(batch, "v")))


CASES: dict[str, Callable[[], Step]] = {
    "overwritten values": overwritten_values,
    "late rows": late_rows,
    "closed groups": closed_groups,
    "closed sessions": closed_sessions,
    "forgotten duplicates": forgotten_duplicates,
    "the first row": first_rows(1),
    "the first two rows": first_rows(2),
    "joined rows": joined_rows,
    "overwritten rows": keyed_values(False),
    "removed rows": keyed_values(True),
    "lists": growing_lists,
}


@pytest.mark.parametrize("case", CASES)
def test_memory_follows_what_versions_hold(case: str) -> None:
    """Two versions and their undo have at most 8 strings a row; all batches together add 200 and more."""
    step = CASES[case]()
    largest = max(step(batch) for batch in range(1, BATCHES + 1))
    assert largest < 5 * 8 * BATCH


def test_a_pool_that_is_fully_in_use_is_not_copied() -> None:
    schema = StateSchema((Field("k", "string"),), (Field("v", "string"),), (LARGEST,), None, None, "update")
    shard = AggregateShard(structs.replace(schema))
    pools = set()
    for batch in range(1, 50):
        shard.apply(of_raw(schema, k=texts(batch, "k"), v=texts(0, "v")), 0, batch)
        shard.commit()
        pools.add(id(shard.table.pool))
    assert len(shard) == 49 * ROWS
    assert len(pools) == 1

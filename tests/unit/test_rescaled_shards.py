"""Shards of rescaled states, made of other shards in memory or of their files: every operator against a state of one shard."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from coordinator.model.errors import CorruptStateError
from coordinator.model.schema import Field, StateSchema
from store_actors.engine.spark_hash import shards_of
from store_actors.messages.requests import OpenRequest, ShardInput, StoreSpec
from store_actors.operators.join_schema import join_schema
from store_actors.operators.top_schema import top_schema
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.loading import Split
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partitions import Partitions
from tests.unit.deduplicate_machine import WITHIN
from tests.unit.deduplicate_machine import input_of as dedup_input
from tests.unit.join_machine import table_of
from tests.unit.rescaled_query import KEYS, SUMS, WORD, RescaledQuery, random_sums
from tests.unit.session_machine import COUNT, schema_of
from tests.unit.session_machine import input_of as session_input
from tests.unit.top_machine import at, by
from tests.unit.top_machine import input_of as top_input

SECOND = 1_000_000
SESSIONS = schema_of((WORD,), (), (COUNT,), "append")
BEST = top_schema((WORD,), (Field("id", "int64"), Field("t", "timestamp")), 2, [by("id", descending=True)])
PAIRS = join_schema(
    (WORD,),
    (Field("l0", "int64"), Field("lt", "timestamp")),
    (Field("r0", "int64"), Field("rt", "timestamp")),
    {"join_type": "full_outer", "expiry": ["lt", "rt"], "event_time": ["lt", "rt"]},
)


def sessions(chance: random.Random, batch: int) -> ShardInput:
    starts = [10 * batch + chance.randint(0, 40) for _ in range(20)]
    return session_input(SESSIONS, [[chance.choice(KEYS[2:]) for _ in starts], starts, [start + 5 for start in starts]])


def first_rows(chance: random.Random, batch: int) -> ShardInput:
    return dedup_input([(chance.choice(KEYS), 10 * batch + chance.randint(0, 20), 1) for _ in range(20)])


def best(chance: random.Random, batch: int) -> ShardInput:
    return top_input(
        BEST, [{"k": chance.choice(KEYS), "id": chance.randint(0, 10**6), "t": at(batch)} for _ in range(20)]
    )


def pairs(chance: random.Random, batch: int) -> ShardInput:
    tables = []
    for side, schema in zip("lr", PAIRS.input_schemas(), strict=True):
        rows = [
            {
                "k": chance.choice(KEYS),
                f"{side}0": chance.randint(0, 99),
                f"{side}t": (10 * batch + chance.randint(0, 30)) * SECOND,
            }
            for _ in range(8)
        ]
        tables.append(table_of(schema, rows))
    return ShardInput(tuple(tables), 16)


@dataclass(frozen=True)
class Kind:
    schema: StateSchema
    rows: Callable[[random.Random, int], ShardInput]


KINDS = {
    "aggregation": Kind(SUMS, random_sums),
    "sessions": Kind(SESSIONS, sessions),
    "dropDuplicatesWithinWatermark": Kind(WITHIN, first_rows),
    "topN": Kind(BEST, best),
    "full outer join": Kind(PAIRS, pairs),
}


@pytest.mark.parametrize("way", ["memory", "files", "snapshots", "some of each"])
@pytest.mark.parametrize("kind", KINDS)
def test_rescaled_shards_go_on_as_one_shard_does(kind: str, way: str) -> None:
    chance, schema = random.Random(f"{kind} {way}"), KINDS[kind].schema
    query, alone = RescaledQuery(schema, 2), RescaledQuery(schema, 1)
    store, alone_store = query.fleet.new_store(), alone.fleet.new_store()
    for step, num_shards in enumerate((2, 4, 3, 1, 6)):
        if step:
            if way == "files" or (way == "some of each" and step % 2):
                store = query.fleet.new_store()
            if way in ("snapshots", "some of each") and step % 3:
                store.partitions.maintain(1)
            query.rescale(num_shards)
        before = store.metrics.bytes_loaded
        for _ in range(2):
            rows = KINDS[kind].rows(chance, query.batch)
            watermark_ms = 0 if schema.delay_ms is None else max(0, 10 * query.batch - 10) * 1000
            assert query.apply(rows, watermark_ms, store) == alone.apply(rows, watermark_ms, alone_store)
            if way == "memory":
                assert store.metrics.bytes_loaded == before, "all rows were in memory"
        assert query.state() == alone.state()
    if way == "memory":
        assert store.metrics.made_of_memory > 0


def test_rows_of_another_shard_than_their_key_says_are_an_error_and_not_lost() -> None:
    table = pa.table({"k": ["a", "b", "c"]})
    shard = int(shards_of(table, ["k"], 5)[0])
    with pytest.raises(CorruptStateError, match=r"belong to another shard.*s\.delta"):
        Split(("k",), (shard, 5), ((0, 10),)).rows(table, "s.delta")


# -- keyed stores -----------------------------------------------------------------------------------------------------

COUNTS = StoreSpec("default", (WORD,), (Field("n", "int64"), Field("due", "int64")), "due")
LISTS = StoreSpec("list.of", (WORD, Field("place", "int64")), (Field("x", "float64"),))


class KeyedQuery(RescaledQuery):
    """A function with state, in two stores; the second has more key columns than rows are partitioned by."""

    def __init__(self, num_shards: int) -> None:
        super().__init__(structs.replace(SUMS, keys=(WORD,)), num_shards)
        self.model: dict[str | None, tuple[int, list[float]]] = {}

    def new_stores(self) -> KeyedStores:
        return KeyedStores(Partitions(self.fleet.objects, self.fleet.coordinator, StoreMetrics()))

    def write(self, stores: KeyedStores, changes: dict[str | None, int], counts: StoreSpec = COUNTS) -> None:
        for shard, partition in enumerate(self.layout.partitions):
            names = pa.table({"k": pa.array(list(changes), pa.string())})
            shard_keys = [
                key
                for key, of in zip(changes, shards_of(names, ["k"], self.layout.num_shards), strict=True)
                if of == shard
            ]
            task = self.task(partition)
            grant = self.fleet.coordinator.lease(task, "a")
            session, _ = stores.open_update(OpenRequest(task, grant.lease, grant.base_version, (counts, LISTS)))
            for key in shard_keys:
                stored = stores.call(session, "default", "get", ((key,),))
                n = (0 if stored is None else stored["n"] or 0) + changes[key]
                row = {"k": key, "n": n, "due": n}
                fields = pa.schema([field.arrow() for field in (*counts.keys, *counts.values)])
                stores.call(session, "default", "put", (pa.RecordBatch.from_pylist([row], schema=fields),))
                fields = pa.schema([field.arrow() for field in (*LISTS.keys, *LISTS.values)])
                row = {"k": key, "place": self.batch, "x": float(n)}
                stores.call(session, "list.of", "put", (pa.RecordBatch.from_pylist([row], schema=fields),))
                _, of_key = self.model.get(key, (0, []))
                self.model[key] = n, [*of_key, float(n)]
            assert stores.commit(session) == self.batch + 1
        self.batch += 1

    def check(self, stores: KeyedStores, counts: StoreSpec = COUNTS) -> None:
        stored: dict[str | None, tuple[int, list[float]]] = {}
        for partition in self.layout.partitions:
            task = self.task(partition)
            grant = self.fleet.coordinator.lease(task, "a")
            session, _ = stores.open_read(OpenRequest(task, grant.lease, self.batch, (counts, LISTS)))
            for row in rows_of(stores, session, "default"):
                assert row["k"] not in stored
                stored[row["k"]] = row["n"], []
            for row in sorted(rows_of(stores, session, "list.of"), key=lambda row: row["place"]):
                stored[row["k"]][1].append(row["x"])
        assert stored == self.model


def rows_of(stores: KeyedStores, session: str, store: str) -> Iterator[dict[str, Any]]:
    scan = stores.call(session, store, "iterator", ())
    while (batch := stores.next_batch(session, scan)) is not None:
        yield from batch.to_pylist()


@pytest.mark.parametrize("way", ["memory", "files", "snapshots"])
def test_keyed_stores_are_rescaled_together(way: str) -> None:
    chance, query = random.Random(way), KeyedQuery(2)

    new_stores = query.new_stores
    stores = new_stores()
    for step, num_shards in enumerate((2, 4, 3, 1, 6)):
        if step:
            if way == "files":
                stores = new_stores()
            if way == "snapshots":
                stores.partitions.maintain(1)
                stores = new_stores()
            query.rescale(num_shards)
        for _ in range(2):
            query.write(stores, {chance.choice(KEYS): chance.randint(1, 9) for _ in range(6)})
        query.check(stores)
        query.check(new_stores())


def test_a_column_that_was_dropped_before_a_rescale_stays_dropped_when_shards_are_put_together() -> None:
    query = KeyedQuery(4)
    new_stores = query.new_stores
    without = replace(COUNTS, values=COUNTS.values[:1], due=None)
    query.write(new_stores(), dict.fromkeys(KEYS, 1))
    query.run += "+"
    query.write(new_stores(), {"a": 1, "b": 1}, without)
    query.run += "+"
    query.write(new_stores(), {"b": 5, "c": 7})
    query.rescale(2)
    query.write(new_stores(), {"d": 3})
    due = {}
    stores = new_stores()
    for partition in query.layout.partitions:
        task = query.task(partition)
        grant = query.fleet.coordinator.lease(task, "a")
        session, _ = stores.open_read(OpenRequest(task, grant.lease, query.batch, (COUNTS,)))
        due |= {row["k"]: row["due"] for row in rows_of(stores, session, "default") if row["due"] is not None}
    assert due == {"b": 7, "c": 8, "d": 4}

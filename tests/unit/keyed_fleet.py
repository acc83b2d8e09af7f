"""Keyed stores over one object store and a coordinator in this process, calls of their sessions, and copies of shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from coordinator.model.identities import StateStoreId, TaskIdentity
from coordinator.model.schema import Field
from store_actors.keyed.update_handle import UpdateHandle
from store_actors.messages.requests import OpenRequest, StoreSpec, Transfer
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.memory_store import MemoryObjectStore
from tests.unit.aggregation_fleet import LocalCoordinator

COUNTS = StoreSpec("default", (Field("k", "string"),), (Field("n", "int64"),))
NAMES = StoreSpec("names", (Field("id", "int64"),), (Field("name", "string"),))
Kind = OperatorShards | KeyedStores
#: Methods of a store actor's sessions by the names that a handle calls.
SESSION_METHODS = {
    "session_call": "call",
    "commit_session": "commit",
    "session_committed": "committed",
    "end_session": "end",
    "next_batch": "next_batch",
}


class KeyedFleet:
    """Keyed stores over one object store.

    Parameters
    ----------
    batches
        Counts by key of the batches that are there.

    Attributes
    ----------
    query, run, partition
        Whose the state is, the run that reads, and the partition that is opened.
    """

    query, run, partition = "query", "run-1", 0

    def __init__(self, *batches: dict[str, int]) -> None:
        self.objects = MemoryObjectStore()
        self.coordinator = LocalCoordinator(self.objects)
        self.stores = self.new_stores()
        for batch, written in enumerate(batches):
            self.write(batch, **written)

    def new_stores(self) -> KeyedStores:
        self.metrics = StoreMetrics()
        return KeyedStores(Partitions(self.objects, self.coordinator, self.metrics))

    def request(self, batch: int, run: str = "run-1", attempt: int = 0, *specs: StoreSpec) -> OpenRequest:
        task = TaskIdentity("s", self.query, run, batch, self.partition, attempt, "executor")
        grant = self.coordinator.lease(task, "a")
        return OpenRequest(task, grant.lease, grant.base_version, specs or (COUNTS,))

    def open(self, batch: int, run: str = "run-1", attempt: int = 0, *specs: StoreSpec) -> str:
        return self.stores.open_update(self.request(batch, run, attempt, *specs))[0]

    def put(self, session: str, **counts: int) -> None:
        self.call(session, "put", pa.record_batch({"k": list(counts), "n": pa.array(counts.values(), pa.int64())}))

    def call(self, session: str, method: str, *args: Any, store: str = "default") -> Any:
        return self.stores.call(session, store, method, args)

    def write(self, batch: int, run: str = "run-1", **counts: int) -> int:
        session = self.open(batch, run)
        self.put(session, **counts)
        return self.stores.commit(session)

    def read(self, version: int, *specs: StoreSpec) -> list[dict[str, Any]]:
        session, _ = self.stores.open_read(self.request(version, self.run, 0, *(specs or (COUNTS,))))
        scan = self.call(session, "iterator", store=(specs or (COUNTS,))[0].name)
        rows: list[dict[str, Any]] = []
        while (batch := self.stores.next_batch(session, scan)) is not None:
            rows += batch.to_pylist()
        return sorted(rows, key=str)


def ask(stores: KeyedStores, session: str, kind: str, *args: Any) -> Any:
    """Return the answer of a session to a call of its handle, as a store actor gives it."""
    return getattr(stores, SESSION_METHODS[kind])(session, *args)


def counts(**values: int) -> pa.RecordBatch:
    return pa.record_batch({"k": list(values), "n": pa.array(values.values(), pa.int64())})


def answer(handles: Mapping[str, UpdateHandle], kind: str, *args: Any) -> Any:
    """Return a store actor's answer to a session's call or commit; the writes that come with it are carried out first."""
    *call, writes = args
    for name, method, inner in writes:
        getattr(handles[name], method)(*inner)
    if kind == "commit_session":
        return max(handle.commit().version for handle in handles.values())
    name, method, inner = call
    return getattr(handles[name], method)(*inner)


def store_id(coordinator: LocalCoordinator, batch: int) -> StateStoreId:
    return coordinator.lease(TaskIdentity("s", "query", "run-1", batch, 0, 0, "executor"), "a").lease.store_id


def offer_of(source: Kind, shard: StateStoreId) -> Transfer:
    offer = source.partitions.transfers.begin(shard)
    assert offer is not None
    return offer


def pieces(source: Kind, offer: Transfer) -> Iterator[tuple[int, pa.Table]]:
    while (piece := source.partitions.transfers.next_piece(offer.transfer_id)) is not None:
        yield piece


def transfer_shard(source: Kind, target: Kind, shard: StateStoreId) -> int:
    """Copy a shard from `source` to `target`, and return the version that `target` then has."""
    offer = offer_of(source, shard)
    return target.partitions.transfers.take(shard, offer, pieces(source, offer))[0]

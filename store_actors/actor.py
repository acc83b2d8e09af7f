"""The store actor: a Ray shell around :class:`~store_actors.serving.operator_shards.Store`."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import ray

from coordinator.deploy import CoordinatorClient
from coordinator.model import (
    DEFAULT_STORE,
    ActorLocation,
    CommitEntry,
    LoadPlan,
    Maintenance,
    SnapshotEntry,
    StateStoreId,
    StateStoreProviderId,
)
from coordinator.storage.uris import open_object_store
from store_actors.messages import ApplyRequest, BatchFacts, OpenRequest, ShardInput, Write
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.operator_shards import Store

__all__ = ["StoreActor"]

log = logging.getLogger(__name__)


class _RemoteCoordinator:
    """The coordinator as a store sees it: plain calls, repeated while the coordinator restarts."""

    def __init__(
        self, uri: str, storage_options: Mapping[str, str] | None, maintenance: Maintenance, location: ActorLocation
    ) -> None:
        self._client = CoordinatorClient(uri, storage_options, maintenance)
        self._location = location

    def commit(self, state_name: str, entry: CommitEntry) -> CommitEntry:
        counted: CommitEntry = self._client.call("commit", state_name, entry)
        return counted

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        counted: Sequence[CommitEntry] = self._client.call("commit_all", state_name, list(entries))
        return counted

    def load_plan(self, state_name: str, partition_id: int, version: int, store_name: str = DEFAULT_STORE) -> LoadPlan:
        plan: LoadPlan = self._client.call("load_plan", state_name, partition_id, version, store_name)
        return plan

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        return bool(self._client.call("add_snapshot", state_name, snapshot))

    def report_active_instance(
        self, provider_id: StateStoreProviderId, ids_to_check: Sequence[StateStoreProviderId]
    ) -> Sequence[StateStoreProviderId]:
        stale: Sequence[StateStoreProviderId] = self._client.call(
            "report_active_instance", provider_id, self._location, list(ids_to_check)
        )
        return stale

    def is_elsewhere(self, store_id: StateStoreId) -> bool:
        holder: ActorLocation | None = self._client.call("locate", store_id.state_name, store_id.partition_id)[2]
        # By name: a shard that a former life was given is this one's.
        return holder is not None and holder.actor_name != self._location.actor_name

    def report_store_actor(self) -> None:
        self._client.call("report_store_actor", self._location)


class StoreActor:
    """Holds shards on one Ray node; deployed by :mod:`store_actors.deploy`, which has the options and their reasons."""

    def __init__(
        self, actor_name: str, uri: str, storage_options: Mapping[str, str] | None, maintenance: Maintenance
    ) -> None:
        self._location = ActorLocation(
            actor_name=actor_name,
            instance_id=uuid.uuid4().hex,
            node_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        coordinator = _RemoteCoordinator(uri, storage_options, maintenance, self._location)
        objects = open_object_store(uri, storage_options)
        self._store = Store(objects, coordinator)
        self._keyed = KeyedStores(objects, coordinator, self._store.metrics)
        coordinator.report_store_actor()
        self._maintenance = maintenance
        threading.Thread(target=self._maintain, name="statefleet-maintenance", daemon=True).start()

    def _maintain(self) -> None:
        while True:
            time.sleep(self._maintenance.interval_s)
            try:
                self._store.maintain(self._maintenance.min_deltas_for_snapshot)
                self._keyed.maintain(self._maintenance.min_deltas_for_snapshot)
            except Exception:  # the thread must outlive any round; Store counts the failures it knows
                log.exception("a round of maintenance failed; the next one tries again")

    @ray.method(concurrency_group="control")
    def ping(self) -> str:
        """Id of this life of the actor, at once."""
        return self._location.instance_id

    def location(self) -> ActorLocation:
        """This life of the actor."""
        return self._location

    def apply(self, request: ApplyRequest, rows: ShardInput) -> tuple[pa.Table, CommitEntry]:
        """See :meth:`Store.apply`."""
        return self._store.apply(request, rows)

    # -- keyed stores: see KeyedStores, method by method ------------------------------------------------------------

    def open_update(self, request: OpenRequest) -> tuple[str, int]:
        return self._keyed.open_update(request)

    def open_read(self, request: OpenRequest) -> tuple[str, int]:
        return self._keyed.open_read(request)

    def session_call(
        self, session_id: str, store_name: str, method: str, args: tuple[Any, ...], writes: Sequence[Write]
    ) -> Any:
        return self._keyed.call(session_id, store_name, method, args, writes)

    def next_batch(self, session_id: str, scan_id: str) -> pa.RecordBatch | None:
        return self._keyed.next_batch(session_id, scan_id)

    def commit_session(self, session_id: str, facts: BatchFacts | int | None, writes: Sequence[Write]) -> int:
        return self._keyed.commit(session_id, facts, writes)

    def session_committed(self, session_id: str) -> bool:
        return self._keyed.committed(session_id)

    def end_session(self, session_id: str) -> None:
        self._keyed.end(session_id)

    def unload(self, store_id: StateStoreId) -> bool:
        """See :meth:`Store.unload`."""
        return self._store.unload(store_id)

    def metrics(self) -> dict[str, Any]:
        """Counters since the process started, and the shards in memory."""
        loaded = [
            {"path": store_id.path(), "version": version, "rows": rows}
            for store_id, version, rows in self._store.loaded()
        ]
        return {**asdict(self._store.metrics), "loaded": loaded}

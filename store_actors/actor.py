"""The store actor: a Ray shell around :class:`~store_actors.store.Store`."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import ray

from coordinator.deploy import call, ensure_coordinator
from coordinator.model import ActorLocation, CommitEntry, StateStoreId, StateStoreProviderId
from coordinator.storage import open_object_store
from store_actors.messages import ApplyRequest, ShardInput
from store_actors.store import Store

__all__ = ["StoreActor"]


class _RemoteCoordinator:
    """The coordinator as a store sees it: plain calls, repeated while the coordinator restarts."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None, location: ActorLocation) -> None:
        self._handle = ensure_coordinator(uri, storage_options)
        self._location = location

    def commit(self, state_name: str, entry: CommitEntry) -> CommitEntry:
        counted: CommitEntry = call(self._handle, "commit", state_name, entry)
        return counted

    def commit_chain(self, state_name: str, partition_id: int, version: int) -> Sequence[CommitEntry]:
        chain: Sequence[CommitEntry] = call(self._handle, "commit_chain", state_name, partition_id, version)
        return chain

    def report_active_instance(
        self, provider_id: StateStoreProviderId, ids_to_check: Sequence[StateStoreProviderId]
    ) -> Sequence[StateStoreProviderId]:
        stale: Sequence[StateStoreProviderId] = call(
            self._handle, "report_active_instance", provider_id, self._location, list(ids_to_check)
        )
        return stale

    def report_store_actor(self) -> None:
        call(self._handle, "report_store_actor", self._location)


class StoreActor:
    """Holds shards on one Ray node; deployed by :mod:`store_actors.deploy`, which has the options and their reasons."""

    def __init__(self, actor_name: str, uri: str, storage_options: Mapping[str, str] | None) -> None:
        self._location = ActorLocation(
            actor_name=actor_name,
            instance_id=uuid.uuid4().hex,
            node_id=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        coordinator = _RemoteCoordinator(uri, storage_options, self._location)
        self._store = Store(open_object_store(uri, storage_options), coordinator)
        coordinator.report_store_actor()

    def location(self) -> ActorLocation:
        """This life of the actor."""
        return self._location

    def apply(self, request: ApplyRequest, rows: ShardInput) -> tuple[pa.Table, CommitEntry]:
        """See :meth:`Store.apply`."""
        return self._store.apply(request, rows)

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

"""Maintenance of a process's partitions beside its batches: writes due snapshots, and evicts reassigned partitions. No Ray."""

from __future__ import annotations

import logging
from contextlib import closing

from msgspec import structs

from coordinator.model.identities import StateStoreId
from store_actors.serving.commits import Commits
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.frozen_store import tables_of
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition import Partition
from store_actors.serving.partition_cache import PartitionCache
from store_actors.serving.restoring import partition_fields
from store_actors.spilling.store_memory import StoreMemory

log = logging.getLogger(__name__)


class PartitionMaintenance:
    """Maintains the partitions of one process. One thread at a time may call it.

    Parameters
    ----------
    cache, coordinator, commits
        The partitions in memory; the coordinator, which knows where partitions are; the writer of snapshots.
    memory, metrics
        The process's memory, and its counters.
    """

    def __init__(
        self,
        cache: PartitionCache,
        coordinator: CoordinatorRef,
        commits: Commits,
        memory: StoreMemory,
        metrics: StoreMetrics,
    ) -> None:
        self._cache = cache
        self._coordinator = coordinator
        self._commits = commits
        self._memory = memory
        self._metrics = metrics

    def run_round(self, min_deltas_for_snapshot: int) -> None:
        """Write the snapshots that are due, and evict partitions that the coordinator has reassigned.

        If one partition fails, the error is logged and counted, and the other partitions are maintained as usual.
        """
        reassigned = self._reassigned()
        for store_id, partition in self._cache.items():
            try:
                if self._cache.is_pinned(store_id):
                    continue
                if store_id in reassigned:
                    self._evict(partition)
                elif partition.lineage.deltas >= min_deltas_for_snapshot:
                    self._write_snapshots(store_id, partition)
            except Exception as error:  # of any kind: the other shards are maintained as usual
                self._metrics.maintenance_failed(store_id.path(), error)
                log.exception(
                    "maintenance of a shard failed; it is tried again in the next round: %s",
                    store_id.path(),
                    extra=partition_fields(store_id, partition),
                )
            else:
                self._metrics.maintenance_succeeded(store_id.path())

    def _reassigned(self) -> set[StateStoreId]:
        """Return the partitions in memory that the coordinator has reassigned; there is one request for each state."""
        by_state: dict[str, list[StateStoreId]] = {}
        for store_id, partition in self._cache.items():
            if partition.lineage.is_loaded:
                by_state.setdefault(store_id.state_name, []).append(store_id)
        reassigned: set[StateStoreId] = set()
        for name, store_ids in by_state.items():
            try:
                reassigned.update(self._coordinator.reassigned(name, store_ids))
            except Exception as error:  # of any kind: the other states are asked for as usual
                self._metrics.maintenance_failed(name, error)
                log.exception(
                    "where a state's shards are cannot be learned; it is asked again in the next round: %s",
                    name,
                    extra={"state": name},
                )
            else:
                self._metrics.maintenance_succeeded(name)
        return reassigned

    def _evict(self, partition: Partition) -> None:
        """Evict a reassigned partition. If its lock is in use, possibly for long, leave it to a later round."""
        if not partition.lock.acquire(blocking=False):
            return
        try:
            partition.evict()
        finally:
            partition.lock.release()
        self._metrics.shards_unloaded += 1

    def _write_snapshots(self, store_id: StateStoreId, partition: Partition) -> None:
        # The lock is held only while a piece of the rows is copied: batches go on while it is encoded and stored.
        with partition.lock:
            stores = partition.newest_commits() if partition.lineage.is_loaded else ()
            deltas = partition.lineage.deltas
        for store in stores:
            with self._memory.using(store_id), closing(tables_of(partition.lock, store.pieces)) as tables:
                self._commits.write_snapshot(
                    structs.replace(store_id, store_name=store.entry.store_name),
                    store.entry,
                    tables,
                    store.schema,
                    store.room,
                )
        if stores:
            # A snapshot that the coordinator did not accept is obsolete or exists already: it is not written again.
            with partition.lock:
                partition.lineage.snapshot_written(deltas)

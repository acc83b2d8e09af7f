"""All that is done with the partitions of one process, put together, and their maintenance beside the batches. No Ray."""

from __future__ import annotations

import logging
from contextlib import closing

from msgspec import structs

from coordinator.model.identities import StateStoreId
from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.serving.commits import CommitReplicator, Commits
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import PIECE_BYTES
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition import Partition, PartitionCache
from store_actors.serving.readable_rows import StoredRows, tables_of
from store_actors.serving.restoring import Restorer, partition_fields
from store_actors.serving.transfers import Transfers
from store_actors.spilling.store_memory import StoreMemory, UnlimitedMemory

log = logging.getLogger(__name__)


class Partitions:
    """The partitions of one process, of operators and keyed stores alike. Thread-safe: one lock a partition.

    Parameters
    ----------
    piece_bytes
        Bytes of rows from which on a file of a snapshot is closed, and another one begun.
    """

    def __init__(
        self,
        objects: ObjectStore,
        coordinator: CoordinatorRef,
        metrics: StoreMetrics | None = None,
        runtime: Runtime | None = None,
        piece_bytes: int = PIECE_BYTES,
        standbys: CommitReplicator | None = None,
        memory: StoreMemory | None = None,
    ) -> None:
        self.metrics = metrics = metrics or StoreMetrics()
        self.runtime = runtime = runtime or Runtime()
        self.memory = memory = memory or UnlimitedMemory()
        self.coordinator = coordinator
        loader = Loader(objects, metrics, runtime, memory.ahead_bytes)
        piece_bytes = min(piece_bytes, memory.file_bytes)
        self.commits = Commits(objects, coordinator, loader, metrics, runtime, piece_bytes, standbys)
        self.cache = PartitionCache(runtime)
        self.restorer = Restorer(self.cache, coordinator, loader, runtime, memory, metrics)
        self.transfers = Transfers(self.cache, self.restorer, coordinator, runtime, memory, metrics)
        self.stored = StoredRows(loader, runtime, memory)

    # -- maintenance --------------------------------------------------------------------------------------------------

    def maintain(self, min_deltas_for_snapshot: int) -> None:
        """Write the snapshots that are due, and evict partitions that the coordinator has reassigned.

        If one partition fails, the error is logged and counted, and the other partitions are maintained as usual. One thread at a time
        may call it.
        """
        self.transfers.close_idle()
        reassigned = self._reassigned()
        for store_id, partition in self.cache.items():
            try:
                if self.cache.is_pinned(store_id):
                    continue
                if store_id in reassigned:
                    self._evict(partition)
                elif partition.lineage.deltas >= min_deltas_for_snapshot:
                    self._write_snapshots(store_id, partition)
            except Exception as error:  # of any kind: the other shards are maintained as usual
                self.metrics.maintenance_failed(store_id.path(), error)
                log.exception(
                    "maintenance of a shard failed; it is tried again in the next round: %s",
                    store_id.path(),
                    extra=partition_fields(store_id, partition),
                )
            else:
                self.metrics.maintenance_succeeded(store_id.path())

    def _reassigned(self) -> set[StateStoreId]:
        """Return the partitions in memory that the coordinator has reassigned; there is one request for each state."""
        by_state: dict[str, list[StateStoreId]] = {}
        for store_id, partition in self.cache.items():
            if partition.lineage.is_loaded:
                by_state.setdefault(store_id.state_name, []).append(store_id)
        reassigned: set[StateStoreId] = set()
        for name, store_ids in by_state.items():
            try:
                reassigned.update(self.coordinator.reassigned(name, store_ids))
            except Exception as error:  # of any kind: the other states are asked for as usual
                self.metrics.maintenance_failed(name, error)
                log.exception(
                    "where a state's shards are cannot be learned; it is asked again in the next round: %s",
                    name,
                    extra={"state": name},
                )
            else:
                self.metrics.maintenance_succeeded(name)
        return reassigned

    def _evict(self, partition: Partition) -> None:
        """Evict a reassigned partition. If its lock is in use, possibly for long, leave it to a later round."""
        if not partition.lock.acquire(blocking=False):
            return
        try:
            partition.evict()
        finally:
            partition.lock.release()
        self.metrics.shards_unloaded += 1

    def _write_snapshots(self, store_id: StateStoreId, partition: Partition) -> None:
        # The lock is held only while a piece of the rows is copied: batches go on while it is encoded and stored.
        with partition.lock:
            stores = partition.newest_commits() if partition.lineage.is_loaded else ()
            deltas = partition.lineage.deltas
        for store in stores:
            with self.memory.using(store_id), closing(tables_of(partition.lock, store.pieces)) as tables:
                self.commits.write_snapshot(
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

"""All that is done with the partitions of one process, put together: their maintenance beside the batches, and copies of them. No Ray.

Copies go from one store actor's memory to another's, and stay up to date there. The source freezes its newest version, as for a
snapshot, and sends it in pieces while its own batches go on. The target loads the pieces into stores of its own. It then reads from the
log what was committed meanwhile, as any partition in memory that is behind (:class:`~store_actors.serving.partition.Lineage`). So no
version depends on what the source sent: the copy only saves time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing

import pyarrow as pa
from msgspec import structs

from coordinator.model.identities import StateStoreId
from coordinator.runtime.runtime import Lock, Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.engine.versions import Frozen, VersionedStore
from store_actors.messages.requests import ReplicatedCommit, Transfer
from store_actors.serving.commits import Commits, Replicate
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import PIECE_BYTES, as_snapshot, decode_file
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition import Partition, tables_of
from store_actors.serving.reads import StoredRows
from store_actors.serving.restoring import PartitionCache, Restorer, StoreMemory, partition_fields
from store_actors.serving.sessions import PieceStreams

log = logging.getLogger(__name__)
#: Bytes of memory that applying a delta takes for each byte of its file: files are compressed.
_APPLIED = 8


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
        replicate: Replicate | None = None,
        memory: StoreMemory | None = None,
    ) -> None:
        self.metrics = metrics = metrics or StoreMetrics()
        self.runtime = runtime = runtime or Runtime()
        self.memory = memory = memory or StoreMemory()
        self.coordinator = coordinator
        loader = Loader(objects, metrics, runtime, memory.ahead_bytes)
        piece_bytes = min(piece_bytes, memory.file_bytes)
        self.commits = Commits(objects, coordinator, loader, metrics, runtime, piece_bytes, replicate)
        self.cache = PartitionCache(runtime)
        self.restorer = Restorer(self.cache, coordinator, loader, runtime, memory, metrics)
        self.transfers = Transfers(self)
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
                elif partition.lineage.is_snapshot_due(min_deltas_for_snapshot):
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
            stores = [
                (entry, store.schema, store.room(), partition.frozen(entry.store_name))
                for entry in partition.lineage.newest
                if (store := partition.stores.get(entry.store_name)) is not None
            ]
            covered = partition.lineage.deltas, partition.lineage.delta_bytes
        for entry, schema, room, pieces in stores:
            of_store = structs.replace(store_id, store_name=entry.store_name)
            with self.memory.using(store_id), closing(tables_of(partition.lock, pieces)) as tables:
                self.commits.write_snapshot(of_store, entry, tables, schema, room)
        if stores:
            # A snapshot that the coordinator did not accept is obsolete or exists already: it is not written again.
            with partition.lock:
                partition.lineage.snapshot_written(*covered)


class Transfers:
    """Copies of one process's partitions, to and from other store actors. Thread-safe."""

    def __init__(self, partitions: Partitions) -> None:
        self._cache, self._restorer = partitions.cache, partitions.restorer
        self._coordinator = partitions.coordinator
        self._memory, self._metrics = partitions.memory, partitions.metrics
        runtime = partitions.runtime
        self._streams: PieceStreams[tuple[int, pa.Table]] = PieceStreams(
            runtime.threads.lock(), runtime.new_id, runtime.clock.elapsed_s
        )
        #: The next rows of a transfer (in ``row_schema``), with the index of their store in it; None after the last.
        self.next_piece = self._streams.next_piece
        self.close_idle = self._streams.close_idle

    # -- at the source ------------------------------------------------------------------------------------------------

    def begin(self, store_id: StateStoreId) -> Transfer | None:
        """Begin to send the rows of a partition as they are now; return None if memory does not have it."""
        partition = self._cache.find(store_id)
        if partition is None:
            return None
        with partition.lock:
            lineage = partition.lineage
            frozen = partition.frozen_stores() if lineage.is_loaded else ()
            if not frozen:
                return None
            self._metrics.handed_over += 1
            transfer_id = self._streams.add(_pieces(partition.lock, [rows for _, rows in frozen]))
            attempt_id = lineage.attempt_of(lineage.version)
            stores = tuple(store for store, _ in frozen)
            return Transfer(transfer_id, lineage.version, attempt_id, lineage.deltas, stores)

    # -- at the target ------------------------------------------------------------------------------------------------

    def take(
        self, store_id: StateStoreId, transfer: Transfer, pieces: Iterable[tuple[int, pa.Table]]
    ) -> tuple[int, int]:
        """Load the rows that are sent, unless memory has a version as new; then catch up with the commits since.

        The copy is pinned: it stays for some rounds of maintenance, though another store actor has the lease.

        Returns
        -------
        tuple of int
            The version in memory, 0 if there is none, and the bytes of the rows that were sent.
        """
        formats = {store.name: self._restorer.format_of(store_id, store.definition) for store in transfer.stores}
        stores = {name: row_format.empty() for name, row_format in formats.items()}
        with self._memory.using(store_id):
            size = _fill(list(stores.values()), transfer, pieces)
        partition = self._cache.of(store_id)
        with partition.lock:
            lineage = partition.lineage
            if partition.writer is not None:
                return lineage.version, size
            if not lineage.is_loaded or lineage.version < transfer.version:
                partition.forget()
                for name, store in stores.items():
                    partition.put(name, formats[name], store)
                lineage.loaded(transfer.version, transfer.attempt_id, transfer.deltas)
                lineage.unleased()
                self._metrics.taken_over += 1
            self._cache.pin(store_id)
            loading = self._coordinator.load_plans(
                store_id.state_name, store_id.partition_id, sys.maxsize, list(stores)
            )
            self._restorer.sync(partition, store_id, loading.newest_version(), loading)
            return (lineage.version if lineage.is_loaded else 0), size

    def replicate(self, commit: ReplicatedCommit) -> bool:
        """Apply a commit of another store actor to the copy that is here; return False if there is none that it builds on."""
        store_id, first = commit.store_id, commit.entries[0]
        partition = self._cache.of(store_id)
        with partition.lock:
            self._cache.pin(store_id)
            lineage = partition.lineage
            if lineage.knows(first.version, first.attempt_id):
                return True
            builds_on = lineage.version == first.base_version and lineage.knows(lineage.version, commit.base_attempt)
            if partition.writer is not None or not builds_on:
                return False
            size = sum(len(file) for file in commit.files)
            with self._memory.working(store_id, first.version, 2 * size, _APPLIED * size):
                try:
                    rows = [decode_file(file, entry) for file, entry in zip(commit.files, commit.entries, strict=True)]
                    is_applied = partition.replicate(commit.entries, rows)
                except BaseException:
                    partition.forget()
                    raise
            if is_applied:
                lineage.caught_up(first.version, first.attempt_id, 1)
                lineage.unleased()
                self._metrics.followed += 1
            else:
                partition.forget()
            return is_applied


def _fill(stores: Sequence[VersionedStore], transfer: Transfer, pieces: Iterable[tuple[int, pa.Table]]) -> int:
    """Load the rows that are sent into empty stores; return the bytes of the rows."""
    size = 0
    for store, sent in zip(stores, transfer.stores, strict=True):
        store.reserve(sent.room)
        # A store may have no rows, and is at the version nevertheless.
        nothing = as_snapshot(store.schema.row_schema().empty_table(), store.schema)
        store.load(nothing, transfer.version, sent.watermark_ms)
    for index, rows in pieces:
        store = stores[index]
        store.load(as_snapshot(rows, store.schema), transfer.version, transfer.stores[index].watermark_ms)
        size += rows.nbytes
    return size


def _pieces(lock: Lock, stores: Sequence[Frozen]) -> Generator[tuple[int, pa.Table]]:
    """Yield all rows of some stores, each with the index of its store."""
    try:
        for index, rows in enumerate(stores):
            for table in tables_of(lock, rows):
                yield index, table
    finally:
        with lock:
            for rows in stores:
                rows.close()

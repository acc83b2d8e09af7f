"""The partitions that a process has in memory, and how each is restored to the version that a task reads. No Ray.

It is restored in memory if memory has committed versions, else from storage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pyarrow as pa
from msgspec import structs

from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId, StateStoreProviderId
from coordinator.model.leases import Lease
from coordinator.model.load_plans import LoadPlan, LoadPlans, Parent
from coordinator.model.schema import StateSchema
from coordinator.runtime.logs import about
from coordinator.runtime.runtime import Lock, Runtime
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.versions import Frozen, VersionedStore
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import as_snapshot
from store_actors.serving.loading import InMemory, Loader, MemoryRows
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition import Partition, ReadableRows, SyncAction, catch_up_empty, tables_of
from store_actors.serving.store_formats import StoreDefinition, StoreFormat, store_format

log = logging.getLogger(__name__)

#: Number of partitions that are reported when another one is opened, so that the coordinator returns the reassigned ones.
_REPORTED = 64
#: Rounds of maintenance for which a pinned copy is kept.
_PINNED_ROUNDS = 10
#: Bytes of versions that are kept loaded for readers, where no limit says less.
READ_BYTES = 1 << 28


class PartitionCache:
    """Partitions by identity. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._new_lock = runtime.threads.lock
        self._guard = self._new_lock()
        self._partitions: dict[StateStoreId, Partition] = {}
        #: Index of the partition that is reported next.
        self._next_reported = 0
        #: Remaining rounds of maintenance of pinned partitions. Another store actor has their lease, and this one is about to get it.
        self._pinned: dict[StateStoreId, int] = {}

    def of(self, store_id: StateStoreId) -> Partition:
        """Return a partition; it is created empty by the first call."""
        with self._guard:
            partition = self._partitions.get(store_id)
            if partition is None:
                partition = self._partitions[store_id] = Partition(self._new_lock(), self._new_lock())
            return partition

    def find(self, store_id: StateStoreId) -> Partition | None:
        """Return a partition; None if :meth:`of` never created it."""
        return self._partitions.get(store_id)

    def items(self) -> list[tuple[StateStoreId, Partition]]:
        """Return all partitions that :meth:`of` has created."""
        with self._guard:
            return list(self._partitions.items())

    def count(self) -> int:
        """Return the number of partitions in memory."""
        return sum(partition.lineage.is_loaded for _, partition in self.items())

    def further_of_run(self, store_id: StateStoreId, run_id: str) -> list[StateStoreProviderId]:
        """Return further partitions in memory that a run has opened: at most ``_REPORTED``, taken in turns.

        Only these may be reassigned. Partitions of ended runs stay in memory for the next run of their query (Spark would unload them).
        A report of all partitions, as Spark's stores send it, would make the work of a run's first batch quadratic.
        """
        partitions = self.items()
        begin = self._next_reported
        reported = [*partitions, *partitions][begin : begin + min(_REPORTED, len(partitions))]
        self._next_reported = (begin + len(reported)) % max(1, len(partitions))
        return [
            StateStoreProviderId(reported_id, run_id)
            for reported_id, partition in reported
            if reported_id != store_id and partition.lineage.is_loaded and partition.lineage.run_id == run_id
        ]

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self, store_id: StateStoreId) -> tuple[int, str]:
        """Return the newest committed version of a partition that memory has, and the attempt that made it; -1 if it has none."""
        partition = self.find(store_id)
        if partition is None:
            return -1, ""
        with partition.changing:
            lineage = partition.lineage
            return (lineage.version, lineage.attempt_of(lineage.version)) if lineage.is_loaded else (-1, "")

    def view(self, store_id: StateStoreId, store_name: str, version: int, attempt_id: str) -> ReadableRows | None:
        """Return a version of a store as a committed attempt made it, from memory; None if memory does not have it."""
        partition = self.find(store_id)
        if partition is None:
            return None
        rows = self._view(partition, store_name, version, attempt_id)
        if rows is None:
            # The coordinator may have accepted a commit that this process is still recording, under the lock.
            with partition.lock:
                rows = self._view(partition, store_name, version, attempt_id)
        return rows

    @staticmethod
    def _view(partition: Partition, store_name: str, version: int, attempt_id: str) -> ReadableRows | None:
        with partition.changing:
            view = partition.view(store_name, version) if partition.lineage.knows(version, attempt_id) else None
            return None if view is None else ReadableRows(partition.changing, view)

    # -- out of memory ------------------------------------------------------------------------------------------------

    def unload(self, store_id: StateStoreId, *, wait: bool = True) -> bool:
        """Drop a partition from memory; storage keeps every version. Return whether a loaded partition was dropped.

        Unless `wait` is true, a partition that is being changed stays.
        """
        partition = self.find(store_id)
        if partition is None or not partition.lock.acquire(blocking=wait):
            return False
        try:
            if partition.writer is not None and not wait:
                return False
            was_loaded = partition.lineage.is_loaded
            partition.forget()
            return was_loaded
        finally:
            partition.lock.release()

    def pin(self, store_id: StateStoreId) -> None:
        """Keep a copy for ``_PINNED_ROUNDS`` rounds of maintenance although another store actor has the lease."""
        self._pinned[store_id] = _PINNED_ROUNDS

    def unpin(self, store_id: StateStoreId) -> None:
        """Stop keeping a copy beyond its lease."""
        self._pinned.pop(store_id, None)

    def is_pinned(self, store_id: StateStoreId) -> bool:
        """Return whether a partition is pinned; each call counts as a round of maintenance."""
        rounds = self._pinned.pop(store_id, 0)
        if rounds > 1:
            self._pinned[store_id] = rounds - 1
        return rounds > 0


class StoreMemory:
    """The memory of a process, as its partitions use it; this one is as much as the state takes.

    :class:`~store_actors.spilling.limited_memory.LimitedMemory` stays below a limit.
    """

    #: Bytes of rows from which on a file of a snapshot is closed, at most.
    file_bytes = sys.maxsize
    #: Bytes of files, as they are stored, that are fetched before they are used, at most; one file may be larger.
    ahead_bytes = sys.maxsize
    #: Bytes of versions that were loaded for readers and are kept for them, at most.
    read_bytes = READ_BYTES

    def region(self, store_id: StateStoreId) -> Memory:
        """Return the memory for the arrays of a partition: the same object each time."""
        return HEAP

    def working(self, store_id: StateStoreId, version: int, certain: int, likely: int) -> AbstractContextManager[None]:
        """Work on a partition, once there is memory for it: for so many bytes certainly, and for so many as it may need."""
        return nullcontext()

    def loading(self, store_id: StateStoreId, version: int) -> AbstractContextManager[None]:
        """Read a partition from its files; the reader waits for no other batch."""
        return nullcontext()

    def using(self, store_id: StateStoreId) -> AbstractContextManager[None]:
        """Work on a partition with no more than a piece of it beside it."""
        return nullcontext()

    def kept(self, store_id: StateStoreId, table: pa.Table) -> pa.Table:
        """Return a partition's table that is seldom read from now on, or a copy of it in a file."""
        return table


class Restorer:
    """Restores partitions to versions. The caller holds the lock of the partition."""

    def __init__(
        self,
        cache: PartitionCache,
        coordinator: CoordinatorRef,
        loader: Loader,
        runtime: Runtime,
        memory: StoreMemory,
        metrics: StoreMetrics,
    ) -> None:
        self._cache = cache
        self._coordinator = coordinator
        self._loader = loader
        self._hash_seed = runtime.hash_seed
        self._clock = runtime.clock
        self._memory = memory
        self._metrics = metrics

    def format_of(self, store_id: StateStoreId, definition: StoreDefinition) -> StoreFormat:
        """Return the format of a partition's store, whose rows are in the partition's region of memory."""
        return store_format(definition, self._hash_seed, self._memory.region(store_id))

    def restore(
        self, partition: Partition, lease: Lease, run_id: str, base: int, definitions: Mapping[str, StoreDefinition]
    ) -> None:
        """Restore a partition's stores to a lease's base version.

        The coordinator is called only if memory is not certainly at that version. It records where the partition is, and returns
        partitions of this process that it has reassigned; these are dropped from memory.

        Raises
        ------
        StateMismatchError, CorruptStateError, StorageUnavailableError
            The version cannot be read into the requested stores.
        """
        lineage = partition.lineage
        if lineage.is_hot(lease.epoch, run_id, base) and partition.has(definitions):
            return
        started_s = self._clock.elapsed_s()
        store_id = lease.store_id
        self._cache.unpin(store_id)
        provider_id = StateStoreProviderId(store_id, run_id)
        further = self._cache.further_of_run(store_id, run_id)
        opened = self._coordinator.open_instance(provider_id, further, base, tuple(definitions))
        for stale in opened.stale:
            self._cache.unload(stale.store_id, wait=False)
        self.sync(partition, store_id, base, opened.loading)
        load_bytes = 0 if lineage.is_loaded else opened.loading.file_bytes()
        self._load_missing(partition, store_id, base, definitions, opened.loading)
        lineage.leased(lease.epoch, run_id, round(1000 * (self._clock.elapsed_s() - started_s)), load_bytes)

    def _load_missing(
        self,
        partition: Partition,
        store_id: StateStoreId,
        base: int,
        definitions: Mapping[str, StoreDefinition],
        loading: LoadPlans,
    ) -> None:
        """Load the stores that are not in memory, or have another definition there."""
        deltas = 0
        for name, definition in definitions.items():
            if partition.is_loaded_as(name, definition):
                continue
            row_format = self.format_of(store_id, definition)
            in_memory = partial(self.rows_in_memory, store_id, name, definition)
            store, replayed = self.load(store_id, base, row_format, loading.plans[name], in_memory)
            catch_up_empty(store, base)
            partition.put(name, row_format, store)
            deltas = max(deltas, replayed)
        if not partition.lineage.is_loaded:
            partition.lineage.loaded(base, loading.attempt_id, deltas)

    def load(
        self,
        store_id: StateStoreId,
        version: int,
        row_format: StoreFormat,
        plan: LoadPlan,
        in_memory: InMemory | None = None,
    ) -> tuple[VersionedStore, int]:
        """Return a store at a plan's version, and how many deltas were replayed; the partition in memory is not changed."""
        with self._memory.loading(store_id, version):
            return row_format.load(self._loader, plan, in_memory)

    # -- in memory ----------------------------------------------------------------------------------------------------

    def sync(self, partition: Partition, store_id: StateStoreId, base: int, loading: LoadPlans) -> None:
        """Bring a partition in memory to a version if memory is part of the committed history; otherwise forget the partition."""
        with self._memory.using(store_id):
            match partition.lineage.sync_action(base, loading.attempt_id, loading.made()):
                case SyncAction.RELOAD:
                    partition.forget()
                case SyncAction.CATCH_UP:
                    self._catch_up(partition, store_id, base, loading)
                case action:
                    self._rollback(partition, base, action)

    def _rollback(self, partition: Partition, base: int, action: SyncAction) -> None:
        try:
            is_retained = partition.rollback(base)
        except BaseException:
            # A partial rollback is not a version.
            partition.forget()
            raise
        if not is_retained:
            partition.forget()
        elif action is SyncAction.ROLLBACK:
            partition.lineage.rolled_back(base)
            self._metrics.rollbacks += 1

    def _catch_up(self, partition: Partition, store_id: StateStoreId, base: int, loading: LoadPlans) -> None:
        try:
            deltas = partition.catch_up(loading, base, self._loader)
        except CorruptStateError as error:
            # A snapshot may replace the damaged file.
            fields = partition_fields(store_id, partition)
            log.warning("falling back to loading a shard from its start: %s", error, extra=fields)
            deltas = None
        except BaseException:
            partition.forget()
            raise
        if deltas is None:
            partition.forget()
        else:
            partition.lineage.caught_up(base, loading.attempt_id, deltas)
            self._metrics.caught_up += 1

    def rows_in_memory(
        self, store_id: StateStoreId, store_name: str, definition: StoreDefinition, parent: Parent, version: int
    ) -> MemoryRows | None:
        """Return the rows of another partition's store of a state; None if memory does not have exactly this committed version.

        Parameters
        ----------
        definition
            Definition that the store must have, so that its rows have the requested columns.
        """
        partition = self._cache.find(structs.replace(store_id, partition_id=parent.partition_id))
        if partition is None:
            return None
        with partition.lock:
            lineage = partition.lineage
            if lineage.version != version or not lineage.knows(version, parent.attempt_id):
                return None
            if partition.writer is not None:
                return None
            stores = partition.frozen_stores()
        rows_of_store = None
        for store, rows in stores:
            if store.name == store_name and store.definition == definition:
                schema = self.format_of(store_id, definition).schema
                rows_of_store = MemoryRows(store.watermark_ms, _as_snapshot(partition.lock, schema, rows))
            else:
                rows.close()
        return rows_of_store


def partition_fields(store_id: StateStoreId, partition: Partition) -> dict[str, object]:
    """Return the fields of a log line about a partition."""
    lineage = partition.lineage
    return about(store_id, run=lineage.run_id or None, version=lineage.version, epoch=lineage.epoch)


def _as_snapshot(lock: Lock, schema: StateSchema, rows: Frozen) -> Iterator[pa.Table]:
    # A store without rows has one table, too: it exists at the version.
    yield as_snapshot(schema.row_schema().empty_table(), schema)
    for table in tables_of(lock, rows):
        yield as_snapshot(table, schema)

"""The partitions that a process has in memory: each with its stores at one version, their history, and its locks. No Ray.

An operator's shard is a partition with one store. All stores of a partition go to a version together, by the rules of
:mod:`store_actors.serving.lineage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.identities import StateStoreId, StateStoreProviderId, TaskIdentity
from coordinator.model.load_plans import LoadPlans
from coordinator.runtime.runtime import Lock, Runtime
from store_actors.engine.table_view import ShardView
from store_actors.engine.versioned_store import VersionedStore
from store_actors.engine.versions import CHANGE_COLUMN, Frozen
from store_actors.messages.requests import TransferredStore
from store_actors.serving.lineage import Lineage
from store_actors.serving.loading import Loader
from store_actors.serving.readable_rows import FrozenStore, ReadableRows, Views
from store_actors.serving.store_formats import StoreDefinition, StoreFormat

#: Number of partitions that are reported when another one is opened, so that the coordinator returns the reassigned ones.
_REPORTED = 64
#: Rounds of maintenance for which a pinned copy is kept.
_PINNED_ROUNDS = 10


class Writer(Protocol):
    """A session that changes a partition over several calls.

    Attributes
    ----------
    used_s
        When it was last called, in seconds of a clock that only elapses.
    """

    used_s: float

    @property
    def task(self) -> TaskIdentity: ...

    def end(self, reason: str, *, fenced: bool = False) -> None:
        """Abort the changes; the partition has no writer afterwards."""


@dataclass(slots=True)
class Partition:
    """The stores of one partition, by name, all at the version of its lineage.

    Attributes
    ----------
    lock
        Taken to look at or change anything of the partition but committed versions.
    changing
        Taken, after `lock`, for as long as rows change. Readers of committed versions take only this one, and wait for no commit.
    emitted
        Rows that the newest batch of an operator emitted, for a retry of the task that made it.
    """

    lock: Lock
    changing: Lock
    lineage: Lineage = field(default_factory=Lineage)
    views: Views = field(default_factory=Views)
    stores: dict[str, VersionedStore] = field(default_factory=dict)
    formats: dict[str, StoreFormat] = field(default_factory=dict)
    writer: Writer | None = None
    emitted: pa.Table | None = None

    def is_loaded_as(self, name: str, definition: StoreDefinition) -> bool:
        """Return whether memory has a store, as it is asked for now."""
        return name in self.formats and self.formats[name].definition == definition

    def has(self, definitions: Mapping[str, StoreDefinition]) -> bool:
        """Return whether memory has all the stores as they are asked for, at the lineage's version."""
        version = self.lineage.version
        return all(
            self.is_loaded_as(name, definition) and self.stores[name].version == version
            for name, definition in definitions.items()
        )

    def put(self, name: str, store_format: StoreFormat, store: VersionedStore) -> None:
        """Have a store from now on, in place of one of the same name."""
        with self.changing:
            self.views.clear()
            self.stores[name], self.formats[name] = store, store_format

    # -- what memory has ----------------------------------------------------------------------------------------------

    def newest_commits(self) -> Sequence[FrozenStore]:
        """Return the stores as their newest commits made them; none if memory was loaded. The caller has `lock`."""
        return [
            FrozenStore(entry, store.frozen(), store.room(), store.schema)
            for entry in self.lineage.newest
            if (store := self.stores.get(entry.store_name)) is not None
        ]

    def frozen_stores(self) -> Sequence[tuple[TransferredStore, Frozen]]:
        """Return all stores at the lineage's version with their rows as they are now. The caller has `lock`."""
        return [
            (
                TransferredStore(name, self.formats[name].definition, store.room(), store.watermark_ms),
                store.frozen(),
            )
            for name, store in self.stores.items()
            if store.version == self.lineage.version
        ]

    def view(self, store_name: str, version: int) -> ShardView | None:
        """Return a version of a store, to be read; None if memory does not have it. The caller has `changing`."""
        store = self.stores.get(store_name)
        if store is None or version not in store.retained():
            return None
        return self.views.of(store_name, version, lambda: self.formats[store_name].view(store, version))

    # -- to another version -------------------------------------------------------------------------------------------

    def rollback(self, version: int) -> bool:
        """Bring all stores to an earlier version of the same history; return False if memory has no way there."""
        # Also stores that the present task does not ask for.
        with self.changing:
            return all(store.rollback(version) for store in self.stores.values())

    def catch_up(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        """Bring all stores to the version `base` by the commits since; return how many these were.

        Returns
        -------
        int or None
            None if that is not possible: some stores are as they were, or at a version in between.
        """
        with self.changing:
            return self._catch_up(loading, base, loader)

    def _catch_up(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        deltas = 0
        for name, store in list(self.stores.items()):
            if name not in loading.plans:
                # No task asks for it now, and it would stay behind.
                del self.stores[name], self.formats[name]
                continue
            replayed = self.formats[name].catch_up(loader, store, loading.plans[name], self.lineage.version)
            if replayed is None:
                return None
            deltas = max(deltas, replayed)
            catch_up_empty(store, base)
        return deltas

    def replicate(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        """Apply the deltas of a commit, one a store; return False if that is not possible: some stores are as they were."""
        with self.changing:
            return self._replicate(entries, rows)

    def _replicate(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        for entry, delta in zip(entries, rows, strict=True):
            store = self.stores.get(entry.store_name)
            if store is None or not self.formats[entry.store_name].has_columns_of(delta):
                return False
            store.load(delta, entry.version, entry.watermark_ms)
        for store in self.stores.values():
            catch_up_empty(store, entries[0].version)
        return True

    # -- out of memory ------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop everything; what is stored is loaded when it is asked for again."""
        with self.changing:
            self.stores.clear()
            self.formats.clear()
            self.views.clear()
            self.lineage.forget()
            self.emitted = None

    def evict(self) -> None:
        """:meth:`forget` because another store actor has the partition; the session that updates it, if there is one, is fenced."""
        if self.writer is not None:
            self.writer.end("another store actor took the partition over", fenced=True)
        self.forget()


def catch_up_empty(store: VersionedStore, version: int) -> None:
    """Bring a store to its partition's version that none of the last commits changed, or that is empty."""
    if store.version < version:
        nothing = store.schema.row_schema().empty_table().append_column(CHANGE_COLUMN, pa.array([], pa.int8()))
        store.load(nothing, version, 0)


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

    def evict_reassigned(self, reassigned: Sequence[StateStoreProviderId]) -> None:
        """Drop partitions that were reassigned to other store actors, except those that are being changed."""
        for provider_id in reassigned:
            self.unload(provider_id.store_id, wait=False)

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

"""The partitions that a process has in memory, of operators and keyed stores alike. No Ray."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.model.identities import StateStoreId, StateStoreProviderId
from coordinator.runtime.runtime import Runtime
from store_actors.serving.partition import Partition
from store_actors.serving.readable_rows import ReadableRows

#: Number of partitions that are reported when another one is opened, so that the coordinator returns the reassigned ones.
_REPORTED = 64
#: Rounds of maintenance for which a pinned copy is kept.
_PINNED_ROUNDS = 10


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

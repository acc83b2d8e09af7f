"""The memory of a store actor's process: with a limit, or as much as its state takes."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import pyarrow as pa

from coordinator.model.errors import MemoryLimitError
from coordinator.model.identities import StateStoreId
from coordinator.model.memory_options import MemoryUse
from coordinator.runtime.runtime import MachineThreads
from store_actors.engine.memory import HEAP, Memory
from store_actors.spilling.memory_keeper import MemoryKeeper
from store_actors.spilling.region import PieceSizes, Region
from store_actors.spilling.resident_memory import keep_nothing_back, resident_bytes
from store_actors.spilling.spill_folder import checked_folder
from store_actors.spilling.work_budget import WorkBudget

#: Bytes of versions that are kept loaded for readers, where no limit says less.
READ_BYTES = 1 << 28
#: Seconds that a request waits for memory that others have.
_PATIENCE_S = 60.0
#: Smallest capacity: bytes between the process's memory before any state and the limit.
_MIN_CAPACITY = 1 << 26
#: Fraction of the capacity that requests may reserve. The rest is for the state that they use.
_WORK = 0.75


class StoreMemory(Protocol):
    """The memory of a process, as its partitions use it.

    Attributes
    ----------
    file_bytes
        Bytes of rows from which on a file of a snapshot is closed, at most.
    ahead_bytes
        Bytes of files, as they are stored, that are fetched before they are used, at most; one file may be larger.
    read_bytes
        Bytes of versions that were loaded for readers and are kept for them, at most.
    """

    file_bytes: int
    ahead_bytes: int
    read_bytes: int

    def region(self, store_id: StateStoreId) -> Memory:
        """Return the memory for the arrays of a partition: the same object each time."""

    def working(self, store_id: StateStoreId, version: int, certain: int, likely: int) -> AbstractContextManager[None]:
        """Work on a partition; see :meth:`WorkBudget.admitted <store_actors.spilling.work_budget.WorkBudget.admitted>`."""

    def loading(self, store_id: StateStoreId, version: int) -> AbstractContextManager[None]:
        """Read a partition from its files; the reader waits for no other batch."""

    def using(self, store_id: StateStoreId) -> AbstractContextManager[None]:
        """Work on a partition with no more than a piece of it beside it."""

    def kept(self, store_id: StateStoreId, table: pa.Table) -> pa.Table:
        """Return a partition's table that is seldom read from now on, or a copy of it in a file."""

    def use(self) -> MemoryUse:
        """Return the memory of the process."""


class UnlimitedMemory:
    """As much memory as the state takes."""

    file_bytes = sys.maxsize
    ahead_bytes = sys.maxsize
    read_bytes = READ_BYTES

    def region(self, store_id: StateStoreId) -> Memory:
        return HEAP

    def working(self, store_id: StateStoreId, version: int, certain: int, likely: int) -> AbstractContextManager[None]:
        return nullcontext()

    def loading(self, store_id: StateStoreId, version: int) -> AbstractContextManager[None]:
        return nullcontext()

    def using(self, store_id: StateStoreId) -> AbstractContextManager[None]:
        return nullcontext()

    def kept(self, store_id: StateStoreId, table: pa.Table) -> pa.Table:
        return table

    def use(self) -> MemoryUse:
        return MemoryUse(None, resident_bytes(), 0)


class LimitedMemory:
    """Memory of a process that stays below a limit.

    Parameters
    ----------
    limit
        Bytes that the process may have, without Ray's shared object store.

    Raises
    ------
    MemoryLimitError
        The limit leaves no room, or the folder cannot be used.
    """

    def __init__(self, limit: int, folder: str) -> None:
        self._folder = checked_folder(folder)
        self._keeper = keeper = MemoryKeeper(limit)
        capacity = keeper.high - keeper.base
        if capacity < _MIN_CAPACITY:
            raise MemoryLimitError(
                "a store actor's memory limit is too small: its process has so much before any state; nothing was changed; raise "
                "memory_limit",
                memory_limit=limit,
                process_bytes=keeper.base,
                least=(keeper.base + _MIN_CAPACITY) * 8 // 7 + 1,
            )
        self.budget = WorkBudget(int(capacity * _WORK), _PATIENCE_S)
        self._sizes = PieceSizes(
            array=_between(limit >> 13, 1 << 16, 1 << 20),
            piece=_between(capacity >> 4, 1 << 20, HEAP.piece_bytes),
            snapshot=_between(capacity >> 6, 1 << 18, HEAP.snapshot_bytes),
        )
        self.file_bytes = self.ahead_bytes = max(capacity >> 4, 1 << 20)
        self.read_bytes = min(READ_BYTES, capacity >> 3)
        self._regions: dict[StateStoreId, Region] = {}
        self._guard = threading.Lock()
        self._loading = threading.Lock()
        _open_many_files()
        keep_nothing_back()
        MachineThreads().start(keeper.run, "statefleet-memory")

    def region(self, store_id: StateStoreId) -> Region:
        """Return the memory for the arrays of a partition: the same object each time."""
        with self._guard:
            region = self._regions.get(store_id)
            if region is None:
                region = self._regions[store_id] = Region(store_id, self._folder, self._sizes, self._keeper)
            return region

    @contextmanager
    def working(self, store_id: StateStoreId, version: int, certain: int, likely: int) -> Iterator[None]:
        """Work on a partition, once the budget admits it and there is memory."""
        region = self.region(store_id)
        with self.budget.admitted(certain, likely, region.facts | {"version": version}):
            region.version, region.is_new_batch = version, True
            self._keeper.make_room(min(likely, self.budget.capacity))
            with self._keeper.using(region):
                yield

    @contextmanager
    def loading(self, store_id: StateStoreId, version: int) -> Iterator[None]:
        """Read a partition from its files, one partition at a time, as each has some of its files in memory."""
        region = self.region(store_id)
        with self._loading:
            region.version, region.is_new_batch = version, False
            self._keeper.make_room(4 * self.file_bytes)
            with self._keeper.using(region):
                yield

    def using(self, store_id: StateStoreId) -> AbstractContextManager[None]:
        """Work on a partition with no more than a piece of it beside it."""
        return self._keeper.using(self.region(store_id))

    def kept(self, store_id: StateStoreId, table: pa.Table) -> pa.Table:
        """Return a partition's table that is seldom read from now on, or a copy of it in a file."""
        return self.region(store_id).kept_table(table)

    def use(self) -> MemoryUse:
        """Return the memory of the process, and the bytes of state that are only in files."""
        with self._guard:
            regions = list(self._regions.values())
        spilled = sum(region.nbytes for region in regions) - self._keeper.resident_of_files()
        return MemoryUse(self._keeper.limit, self._keeper.resident(), max(0, spilled))


def _between(size: int, least: int, most: int) -> int:
    return max(least, min(most, size))


def _open_many_files() -> None:
    """Raise the limit of open files as far as the machine allows: each large array is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

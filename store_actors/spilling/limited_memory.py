"""The memory of a store actor's process with a limit, which requests share, and how much memory a process has."""

from __future__ import annotations

import resource
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pyarrow as pa
from humanize import naturalsize

from coordinator.model.errors import MemoryLimitError
from coordinator.model.identities import StateStoreId
from coordinator.model.memory_options import MemoryUse
from coordinator.runtime.runtime import Threads
from store_actors.engine.memory import HEAP
from store_actors.serving.restoring import READ_BYTES, StoreMemory
from store_actors.spilling.memory_keeper import MemoryKeeper, keep_nothing_back, resident_bytes
from store_actors.spilling.region import PieceSizes, Region
from store_actors.spilling.spill_folder import checked_folder

#: Seconds that a request waits for memory that others have.
_PATIENCE_S = 60.0
#: Smallest capacity: bytes between the process's memory before any state and the limit.
_MIN_CAPACITY = 1 << 26
#: Fraction of the capacity that requests may reserve. The rest is for the state that they use.
_WORK = 0.75


class WorkBudget:
    """Memory beside the state that the requests of a process share; those that do not fit wait, in the order of their arrival.

    Thread-safe.

    An admitted batch never waits for a batch that is not admitted, as a request acquires the locks of its partitions first.

    Parameters
    ----------
    capacity
        Bytes for all requests together.
    """

    def __init__(self, capacity: int, patience_s: float) -> None:
        self.capacity = capacity
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._reserved_bytes = 0
        self._queue: deque[object] = deque()
        #: Number of requests that had to wait, and that were refused.
        self.waits = 0
        self.refusals = 0

    @contextmanager
    def admitted(self, certain: int, likely: int, facts: Mapping[str, Any]) -> Iterator[None]:
        """Wait until there is memory for a request, and reserve it until the block ends.

        Parameters
        ----------
        certain
            Bytes that it certainly needs.
        likely
            Bytes that it may need. If they exceed the capacity, the request reserves the whole capacity.

        Raises
        ------
        MemoryLimitError
            The request exceeds the capacity, or waited for `patience_s`. Nothing was begun.
        """
        if certain > self.capacity:
            self.refusals += 1
            raise MemoryLimitError(
                f"a batch of a shard needs {naturalsize(certain)} for itself, and its store actor has {naturalsize(self.capacity)} for "
                "that; nothing was changed or counted; make batches smaller (maxOffsetsPerTrigger, maxFilesPerTrigger), use more "
                "shards, or raise memory_limit, and start the query again",
                **facts,
                bytes=certain,
                available=self.capacity,
            )
        size, ticket = min(max(certain, likely), self.capacity), object()
        with self._changed:
            self._queue.append(ticket)
            if not self._has_turn(ticket, size):
                self.waits += 1
            has_turn = self._changed.wait_for(lambda: self._has_turn(ticket, size), self._patience_s)
            self._queue.remove(ticket)
            self._changed.notify_all()
            if not has_turn:
                self.refusals += 1
                raise MemoryLimitError(
                    f"a batch of a shard waited {self._patience_s:.0f} s for memory that other requests of its store actor have; "
                    "nothing was changed or counted, and Spark tries the task again; if "
                    "this comes again, raise memory_limit, or use more nodes",
                    **facts,
                    bytes=size,
                    available=self.capacity - self._reserved_bytes,
                )
            self._reserved_bytes += size
        try:
            yield
        finally:
            with self._changed:
                self._reserved_bytes -= size
                self._changed.notify_all()

    def _has_turn(self, ticket: object, size: int) -> bool:
        return self._queue[0] is ticket and self._reserved_bytes + size <= self.capacity


class LimitedMemory(StoreMemory):
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
        Threads().start(keeper.run, "statefleet-memory")

    def region(self, store_id: StateStoreId) -> Region:
        with self._guard:
            region = self._regions.get(store_id)
            if region is None:
                region = self._regions[store_id] = Region(store_id, self._folder, self._sizes, self._keeper)
            return region

    @contextmanager
    def working(self, store_id: StateStoreId, version: int, certain: int, likely: int) -> Iterator[None]:
        region = self.region(store_id)
        with self.budget.admitted(certain, likely, region.facts | {"version": version}):
            region.version, region.is_new_batch = version, True
            self._keeper.make_room(min(likely, self.budget.capacity))
            with self._keeper.using(region):
                yield

    @contextmanager
    def loading(self, store_id: StateStoreId, version: int) -> Iterator[None]:
        # One partition at a time, as each has some of its files in memory.
        region = self.region(store_id)
        with self._loading:
            region.version, region.is_new_batch = version, False
            self._keeper.make_room(4 * self.file_bytes)
            with self._keeper.using(region):
                yield

    def using(self, store_id: StateStoreId) -> AbstractContextManager[None]:
        return self._keeper.using(self.region(store_id))

    def kept(self, store_id: StateStoreId, table: pa.Table) -> pa.Table:
        return self.region(store_id).kept_table(table)

    def use(self) -> MemoryUse:
        with self._guard:
            regions = list(self._regions.values())
        spilled = sum(region.nbytes for region in regions) - self._keeper.resident_of_files()
        return MemoryUse(self._keeper.limit, self._keeper.resident(), max(0, spilled))


def memory_use(memory: StoreMemory) -> MemoryUse:
    """Return the memory of the process."""
    return memory.use() if isinstance(memory, LimitedMemory) else MemoryUse(None, resident_bytes(), 0)


def _between(size: int, least: int, most: int) -> int:
    return max(least, min(most, size))


def _open_many_files() -> None:
    """Raise the limit of open files as far as the machine allows: each large array is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

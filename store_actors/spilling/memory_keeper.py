"""Keeps a process below its memory limit by dropping the least recently used state from its memory.

All state is in mapped files. The operating system writes dropped pages to disk, and keeps them in its cache while no other process
needs that memory. So there is no second copy to keep up to date, and the operating system, which sees every access, knows the pages
that are used often. The process only chooses the shards that it does not use at the moment.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from humanize import naturalsize

from coordinator.model.errors import MemoryLimitError

#: Highest rate, in bytes a second, at which a process's memory grows while it reads its files. The time to the next check follows it.
_GROWTH_RATE = 16 << 30
_SHORTEST_S, _LONGEST_S = 0.002, 0.05
#: Bytes by which a random access may increase the process's memory. It reads a row, an entry of an index and a string, and for each of
#: them the operating system maps up to 64 KiB around the page (``fault_around_bytes``).
_ACCESS_BYTES = 3 << 16
#: Smallest step, in accesses: with fewer, the check of the memory would take long compared with the accesses.
_MIN_STEP = 256
#: Shortest time between two requests to the allocators to return unused memory.
_GIVE_BACK_S = 1.0
_libc = ctypes.CDLL(None)
#: Of ``mallopt``: from which size on a block is a mapping of its own, which goes back as it is freed; and how many arenas there are, of
#: which each keeps what its threads freed.
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_OWN_MAPPING, _ARENAS = 1 << 18, 2
_KINDS = (b"RssAnon:", b"RssFile:")
_STATUS = Path("/proc/self/status")


class ResidentMemory:
    """Memory of this process (``/proc/self/status``), without what it shares with others, as Ray's object store."""

    def __init__(self) -> None:
        self._file = os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        """Return the bytes that belong to the process alone, and the bytes of files that it has mapped."""
        text = os.pread(self._file, 1 << 13, 0)
        own_bytes, files = (1024 * int(text.split(kind, 1)[1].split(None, 1)[0]) for kind in _KINDS)
        return own_bytes, files

    def __del__(self) -> None:
        os.close(self._file)


def resident_bytes() -> int:
    """Return the bytes of memory of this process; on a system without ``/proc``, such as macOS, the most that it has had."""
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return sum(ResidentMemory().read())


def keep_nothing_back() -> None:
    """Have what is freed go back to the operating system at once, whichever thread freed it, rather than be kept for the next use.

    Arrow's own allocators keep what each thread freed for that thread: with many threads each cache stays at its peak.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    _libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)
    _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Return memory to the operating system that allocators keep for later."""
    pa.default_memory_pool().release_unused()
    _libc.malloc_trim(0)


class Spillable(Protocol):
    """A part of a process's state that can be dropped from memory."""

    def drop(self) -> None:
        """Remove it from the process's memory; see :meth:`Mapping.drop <store_actors.spilling.region.Mapping.drop>`."""


class MemoryKeeper:
    """Decides which state stays in a process's memory. Thread-safe.

    Parameters
    ----------
    limit
        Largest number of bytes that the process may have in memory.
    resident
        Returns the bytes that it has; by default those of this process.
    """

    def __init__(self, limit: int, resident: ResidentMemory | None = None) -> None:
        self.limit = limit
        self._resident = resident or ResidentMemory()
        own_bytes, self._other_files = self._resident.read()
        #: Bytes of the process before any state.
        self.base = own_bytes + self._other_files
        #: Bytes from which on shards are dropped. The difference to the limit is for pages that are read until the next check.
        self.high = limit - limit // 8
        self._ticks = count(1)
        self._guard = threading.Lock()
        self._keeping = threading.Lock()
        self._used: dict[Spillable, int] = {}
        self._busy: dict[Spillable, int] = {}
        #: Regions that were dropped, and that no batch has used since.
        self._dropped: set[Spillable] = set()
        self._given_back_s = -_GIVE_BACK_S

    def resident(self) -> int:
        """Return the bytes that the process has in memory."""
        return sum(self._resident.read())

    def resident_of_files(self) -> int:
        """Return the bytes in memory of files with state."""
        return max(0, self._resident.read()[1] - self._other_files)

    @contextmanager
    def using(self, part: Spillable) -> Iterator[None]:
        """Mark a part of the state as in use until the block ends; it is dropped only after all parts that are not in use."""
        with self._guard:
            self._used[part] = next(self._ticks)
            self._busy[part] = self._busy.get(part, 0) + 1
            self._dropped.discard(part)
        try:
            yield
        finally:
            with self._guard:
                self._busy[part] -= 1
                if not self._busy[part]:
                    del self._busy[part]
            self.keep()

    def run(self) -> None:
        """Keep the process below its limit; never return."""
        while True:
            time.sleep(self.keep())

    def keep(self, above: int | None = None) -> float:
        """Drop shards if the process has more than `above` bytes (by default :attr:`high`); return the seconds until the next check."""
        if not self._keeping.acquire(blocking=False):
            return _SHORTEST_S
        try:
            self._keep(self.high if above is None else above)
        finally:
            self._keeping.release()
        return min(_LONGEST_S, max(_SHORTEST_S, (self.limit - self.resident()) / _GROWTH_RATE))

    def step(self, count: int) -> int:
        """Return how many of `count` random accesses are allowed before the next call; drop shards if little memory is free."""
        ceiling, slack = self.limit - self.limit // 16, self.limit // 8
        free_bytes = ceiling - self.resident()
        if free_bytes < min(slack, count * _ACCESS_BYTES):
            self.keep(above=ceiling - slack)
            free_bytes = ceiling - self.resident()
        return min(count, max(_MIN_STEP, free_bytes // (_ACCESS_BYTES * max(1, len(self._busy)))))

    def make_room(self, more: int) -> None:
        """Drop shards until `more` bytes, which cannot be spilled, fit below the limit."""
        ceiling = self.limit - self.limit // 16
        if self.resident() + more > ceiling:
            self.keep(above=max(0, ceiling - more))

    def _keep(self, above: int) -> None:
        if self.resident() <= above:
            return
        for part in self._idle():
            part.drop()
            with self._guard:
                self._dropped.add(part)
            if self.resident() <= above - self.limit // 8:
                return
        if self.resident() <= above:
            return
        if self._may_give_back():
            give_back()
        # Parts in use: their pages are read again as they are accessed. Only the operating system knows which pages were in use.
        for part in list(self._busy):
            if self.resident() <= above:
                return
            part.drop()

    def _idle(self) -> list[Spillable]:
        """Return the regions that are not in use, least recently used first; those that were dropped before come last.

        Dropped regions may be in memory again: readers, such as a copy for another store actor, do not report their use.
        """
        with self._guard:
            idle = [part for part in self._used if part not in self._busy]
            return sorted(idle, key=lambda part: (part in self._dropped, self._used[part]))

    def _may_give_back(self) -> bool:
        now = time.monotonic()
        if now - self._given_back_s < _GIVE_BACK_S:
            return False
        self._given_back_s = now
        return True

    def check(self, more: int, facts: Mapping[str, Any]) -> None:
        """Refuse a batch of `more` bytes if the process's own memory, which cannot be spilled, would exceed the limit.

        Raises
        ------
        MemoryLimitError
            The bytes do not fit.
        """
        if self._own_bytes() + more <= self.high:
            self.make_room(more)
            return
        give_back()
        own_bytes = self._own_bytes()
        if own_bytes + more <= self.high:
            self.make_room(more)
            return
        raise MemoryLimitError(
            f"a batch of a shard needs {naturalsize(more)} more for itself, beside {naturalsize(own_bytes)} that its store actor has "
            "and cannot spill, which is beyond the limit; the batch was not counted, and nothing that was is lost; make batches "
            "smaller (maxOffsetsPerTrigger, maxFilesPerTrigger), use more shards, or raise memory_limit, and start the query again",
            **facts,
            bytes=more,
            memory_limit=self.limit,
        )

    def _own_bytes(self) -> int:
        return self._resident.read()[0] + self._other_files

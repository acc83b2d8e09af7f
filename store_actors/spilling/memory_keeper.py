"""Keeps a process below its memory limit: what was used longest ago leaves it first.

What leaves is in its file: the operating system writes it to disk, and keeps it in its own cache for as long as no other process needs
that memory. So there is no second copy to keep up to date, and the operating system, which sees every access, knows the pages that are
used often. The process itself only says which shards it is done with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from coordinator.model.errors import MemoryLimitError
from coordinator.model.text import size_text
from store_actors.spilling.resident_memory import ResidentMemory, give_back

__all__ = ["MemoryKeeper", "Spillable"]

#: Bytes a second that a process may take more of, at most, as it touches its files: how soon the keeper looks again goes by that.
_FASTEST = 16 << 30
_SHORTEST_S, _LONGEST_S = 0.002, 0.05
#: Bytes that the process may have more once it has looked at one place: the operating system maps what lies round it, 64 KiB at most
#: (``fault_around_bytes``), of a row, of its place in an index and of one of its strings.
_A_PLACE = 3 << 16
#: Fewest places of a step: so few that asking takes long beside them.
_FEWEST = 256
#: Seconds between two times that allocators are asked to give back what they keep.
_GIVE_BACK_S = 1.0


class Resident(Protocol):
    """The memory of a process; see :class:`~store_actors.spilling.resident_memory.ResidentMemory`."""

    def read(self) -> tuple[int, int]:
        """Return the bytes that belong to the process alone, and the bytes of files that it has mapped."""


class Spillable(Protocol):
    """Part of a process's state."""

    def drop(self) -> None:
        """Leave the process's memory; see :meth:`Mapping.drop <store_actors.spilling.mapped_files.Mapping.drop>`."""


class MemoryKeeper:
    """Decides which state stays in a process's memory. Thread-safe.

    Parameters
    ----------
    limit
        Bytes that the process may have.
    resident
        What it has.
    """

    def __init__(self, limit: int, resident: Resident | None = None) -> None:
        self.limit = limit
        self._resident = resident or ResidentMemory()
        own_bytes, self._other_files = self._resident.read()
        #: Bytes of the process before any state.
        self.base = own_bytes + self._other_files
        #: Shards leave from here on; between here and the limit is what is touched until the keeper looks again.
        self.high = limit - limit // 8
        self._ticks = count(1)
        self._guard = threading.Lock()
        self._keeping = threading.Lock()
        self._used: dict[Spillable, int] = {}
        self._busy: dict[Spillable, int] = {}
        #: Regions that no batch used since they left memory.
        self._out: set[Spillable] = set()
        self._given_back_s = -_GIVE_BACK_S

    def resident(self) -> int:
        """Bytes of memory that the process has."""
        return sum(self._resident.read())

    def resident_of_files(self) -> int:
        """Bytes of memory that are of files with state in them."""
        return max(0, self._resident.read()[1] - self._other_files)

    @contextmanager
    def using(self, part: Spillable) -> Iterator[None]:
        """Work with a part of the state, which is the last to leave memory meanwhile."""
        with self._guard:
            self._used[part] = next(self._ticks)
            self._busy[part] = self._busy.get(part, 0) + 1
            self._out.discard(part)
        try:
            yield
        finally:
            with self._guard:
                self._busy[part] -= 1
                if not self._busy[part]:
                    del self._busy[part]
            self.keep()

    def run(self) -> None:
        """Keep the process below its limit, for ever."""
        while True:
            time.sleep(self.keep())

    def keep(self, above: int | None = None) -> float:
        """Have shards leave if the process has more than `above` bytes (:attr:`high`); return the seconds until the next check."""
        if not self._keeping.acquire(blocking=False):
            return _SHORTEST_S
        try:
            self._keep(self.high if above is None else above)
        finally:
            self._keeping.release()
        return min(_LONGEST_S, max(_SHORTEST_S, (self.limit - self.resident()) / _FASTEST))

    def step(self, left: int) -> int:
        """Return how many of `left` places may be read before the next call, and have shards leave if there is little room."""
        most, slack = self.limit - self.limit // 16, self.limit // 8
        room = most - self.resident()
        if room < min(slack, left * _A_PLACE):
            self.keep(above=most - slack)
            room = most - self.resident()
        return min(left, max(_FEWEST, room // (_A_PLACE * max(1, len(self._busy)))))

    def make_room(self, more: int) -> None:
        """Have shards leave until there is room for so many bytes that cannot be spilled."""
        most = self.limit - self.limit // 16
        if self.resident() + more > most:
            self.keep(above=max(0, most - more))

    def _keep(self, above: int) -> None:
        if self.resident() <= above:
            return
        for part in self._idle():
            part.drop()
            with self._guard:
                self._out.add(part)
            if self.resident() <= above - self.limit // 8:
                return
        if self.resident() <= above:
            return
        if self._may_give_back():
            give_back()
        # What is worked with comes back page by page as it is touched: only the operating system knows which pages were.
        for part in list(self._busy):
            if self.resident() <= above:
                return
            part.drop()

    def _idle(self) -> list[Spillable]:
        """Return regions that no batch works with, least recently used first; last those that have left memory already.

        Some of the latter may be back in memory: a mere reader, such as a copy for another store actor, does not report its use.
        """
        with self._guard:
            idle = [part for part in self._used if part not in self._busy]
            return sorted(idle, key=lambda part: (part in self._out, self._used[part]))

    def _may_give_back(self) -> bool:
        now = time.monotonic()
        if now - self._given_back_s < _GIVE_BACK_S:
            return False
        self._given_back_s = now
        return True

    def check(self, more: int, facts: Mapping[str, Any]) -> None:
        """Refuse to go on where the process would have more memory of its own, which cannot be spilled, than the limit leaves.

        Parameters
        ----------
        more
            Bytes that are about to be taken.

        Raises
        ------
        MemoryLimitError
            They do not fit.
        """
        if self._own() + more <= self.high:
            self.make_room(more)
            return
        give_back()
        own_bytes = self._own()
        if own_bytes + more <= self.high:
            self.make_room(more)
            return
        raise MemoryLimitError(
            f"a batch of a shard needs {size_text(more)} more for itself, beside {size_text(own_bytes)} that its store actor has and "
            "cannot spill, which is beyond the limit; the batch was not counted, and nothing that was is lost; make batches smaller "
            "(maxOffsetsPerTrigger, maxFilesPerTrigger), use more shards, or raise memory_limit, and start the query again",
            **facts,
            bytes=more,
            memory_limit=self.limit,
        )

    def _own(self) -> int:
        return self._resident.read()[0] + self._other_files

"""Memory that requests need beside the state: one after the other if not all fit, rather than more than there is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from coordinator.model.errors import MemoryLimitError
from coordinator.model.text import size_text

__all__ = ["WorkBudget"]


class WorkBudget:
    """Memory that is shared by the requests of a process, in the order in which they come. Thread-safe.

    A batch that was admitted never waits for one that was not: locks of partitions are taken before.

    Parameters
    ----------
    capacity
        Bytes for all of them together.
    patience_s
        Seconds that a request waits at most.
    """

    def __init__(self, capacity: int, patience_s: float) -> None:
        self.capacity = capacity
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._taken = 0
        self._queue: deque[object] = deque()
        #: Requests that had to wait, and that were refused.
        self.waits = 0
        self.refusals = 0

    @contextmanager
    def admitted(self, certain: int, likely: int, facts: Mapping[str, Any]) -> Iterator[None]:
        """Wait until there is memory for a request, and have it for so long.

        Parameters
        ----------
        certain
            Bytes that it needs for sure.
        likely
            Bytes that it may need: where that is more than there is for all, it has all.
        facts
            What the request is of.

        Raises
        ------
        MemoryLimitError
            There is never enough for it, or there was none for long. Nothing was begun.
        """
        if certain > self.capacity:
            self.refusals += 1
            raise MemoryLimitError(
                f"a batch of a shard needs {size_text(certain)} for itself, and its store actor has {size_text(self.capacity)} for "
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
            came = self._changed.wait_for(lambda: self._has_turn(ticket, size), self._patience_s)
            self._queue.remove(ticket)
            self._changed.notify_all()
            if not came:
                self.refusals += 1
                raise MemoryLimitError(
                    f"a batch of a shard waited {self._patience_s:.0f} s for memory that other requests of its store actor have; "
                    "nothing was changed or counted, and Spark tries the task again; if "
                    "this comes again, raise memory_limit, or use more nodes",
                    **facts,
                    bytes=size,
                    available=self.capacity - self._taken,
                )
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()

    def _has_turn(self, ticket: object, size: int) -> bool:
        return self._queue[0] is ticket and self._taken + size <= self.capacity

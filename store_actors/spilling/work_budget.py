"""Admits requests by the memory that they need beside the state; those that do not fit wait for the others to end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from humanize import naturalsize

from coordinator.model.errors import MemoryLimitError


class WorkBudget:
    """Memory that the requests of a process share, in the order of their arrival. Thread-safe.

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

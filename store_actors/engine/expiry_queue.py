"""When rows expire: what is due is found without a look at the rest.

Rows are entered as they are made, a batch at a time, and never taken out; the caller that evicts checks that a slot still holds a
row that is due. So the cost of an eviction follows what is evicted, not the size of the state. A queue that has far more entries
than there are rows is rebuilt from these by its owner, so its memory follows the rows, too.
"""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np

from store_actors.engine.arrays import Slots
from store_actors.engine.memory import HEAP, Memory

#: Expiry of a row that never expires, in microseconds.
NEVER = np.iinfo(np.int64).max
#: A queue with fewer entries than this is not rebuilt.
_SMALL = 1 << 16
#: Entries that take as much memory as a page besides its own.
_PAGE_ENTRIES = 32


class ExpiryQueue:
    """Slots by the time at which their rows expire, in microseconds."""

    def __init__(self, memory: Memory = HEAP) -> None:
        self._memory = memory
        #: (next expiry, number, sorted expiries, their slots, position), by next expiry. Batches come about in the order of time, so
        #: few of them hold rows that are due at once.
        self._pages: list[tuple[int, int, Slots, Slots, int]] = []
        self._numbers = count()
        #: Entries that are not due yet; some may be out of date.
        self.entries = 0

    @property
    def nbytes(self) -> int:
        """Memory of the entries, in bytes."""
        return sum(expiries.nbytes + slots.nbytes for _, _, expiries, slots, _ in self._pages)

    def is_cluttered(self, rows: int) -> bool:
        """Return whether the owner should rebuild it from its `rows` rows: most entries are out of date, or alone on their pages."""
        return self.entries + _PAGE_ENTRIES * len(self._pages) > 2 * rows + _SMALL

    def add(self, expiries: Slots, slots: Slots) -> None:
        """Enter rows; a slot that is entered again counts by each of its entries."""
        lasting = expiries == NEVER
        if lasting.any():
            expiries, slots = expiries[~lasting], slots[~lasting]
        if not len(slots):
            return
        order = np.argsort(expiries, kind="stable")
        expiries, slots = self._memory.kept(expiries[order]), self._memory.kept(slots[order])
        self.entries += len(slots)
        heapq.heappush(self._pages, (int(expiries[0]), next(self._numbers), expiries, slots, 0))

    def due(self, limit: int) -> Slots:
        """Take out what expires at or before `limit`; entries may be out of date, or double."""
        due_slots: list[Slots] = []
        while self._pages and self._pages[0][0] <= limit:
            _, number, expiries, slots, begin = heapq.heappop(self._pages)
            end = int(np.searchsorted(expiries, limit, side="right"))
            due_slots.append(slots[begin:end].copy())
            self.entries -= end - begin
            if end < len(slots):
                if 2 * end > len(slots):
                    # Else what expires late would hold the memory of all that was entered with it.
                    expiries, slots = self._memory.copied(expiries[end:]), self._memory.copied(slots[end:])
                    end = 0
                heapq.heappush(self._pages, (int(expiries[end]), number, expiries, slots, end))
        return np.concatenate(due_slots) if due_slots else np.empty(0, np.int64)

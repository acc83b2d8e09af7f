"""The rows of a table as they are at one moment, emitted piece by piece while the table goes on: what snapshots are made of.

Nothing is copied at first. A table reports to them which slots it is about to change, and what was not emitted yet is copied
then. So a snapshot takes memory for what changes while it is written, and for the piece that is on its way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from store_actors.engine.arrays import Bytes, Slots, Words, distinct
from store_actors.engine.layout import RowLayout
from store_actors.engine.lists import ListPool
from store_actors.engine.memory import Memory
from store_actors.engine.strings import StringPool


class Freezable(Protocol):
    """The methods of a table that its frozen rows call."""

    layout: RowLayout
    pool: StringPool
    lists: ListPool
    memory: Memory
    snapshot_bytes: int

    def taken(self, slots: Slots) -> Words: ...

    def taken_columns(self, chosen: Bytes, span: slice, words: Slots) -> Words: ...

    def live_flags(self) -> Bytes: ...

    def frozen_by(self, reader: FrozenRows) -> None: ...

    def thawed_by(self, reader: FrozenRows) -> None: ...


class FrozenRows(Iterator[Words]):
    """Rows of a table as they are now, as copies of their words, in no particular order.

    The owner of the table locks while it takes a piece, and while it changes the table; what was taken needs no lock. The table does
    not compact its pools as long as this is open.

    Parameters
    ----------
    selected, extra
        Which of its slots to emit (1, else 0; all live ones by default), and rows that are no longer in it.
    words
        Which of their words are wanted, all by default; the others may be anything.
    """

    def __init__(
        self, table: Freezable, selected: Bytes | None = None, extra: Words | None = None, words: Slots | None = None
    ) -> None:
        self._table = table
        self._remaining: Bytes = table.live_flags() if selected is None else selected
        self._words = np.arange(table.layout.row_words) if words is None else words
        self._position = 0
        self._kept: list[Words] = [] if extra is None or not len(extra) else [extra]
        #: The strings and lists that words refer to.
        self.pool: StringPool = table.pool
        self.lists = table.lists
        table.frozen_by(self)

    @property
    def nbytes(self) -> int:
        """Memory beside the table's, in bytes."""
        return self._remaining.nbytes + sum(rows.nbytes for rows in self._kept)

    def keep(self, slots: Slots) -> None:
        """Copy the slots that the snapshot has not emitted. Call it before they are changed."""
        slots = slots[(slots >= self._position) & (slots < len(self._remaining))]
        slots = distinct(slots[self._remaining[slots] != 0])
        if len(slots):
            self._kept.append(self._table.memory.kept(self._table.taken(slots)))
            self._remaining[slots] = 0

    def keep_lists(self) -> None:
        """Hold on to the lists as they are; called before what is behind them may be written over."""
        self.lists = copy.copy(self.lists)

    def __next__(self) -> Words:
        """Return up to ``snapshot_bytes`` of words in column order, so that columns need no copy."""
        count = max(1, self._table.snapshot_bytes // (8 * self._table.layout.row_words))
        while self._position < len(self._remaining):
            span = slice(self._position, min(self._position + count, len(self._remaining)))
            self._position = span.stop
            if self._remaining[span].any():
                return self._table.taken_columns(self._remaining, span, self._words)
        if not self._kept:
            self.close()
            raise StopIteration
        rows, remaining = self._kept[-1][:count], self._kept[-1][count:]
        self._kept[-1:] = [remaining] if len(remaining) else []
        return rows

    def close(self) -> None:
        """Give out no more rows; the table stops reporting its changes."""
        self._remaining, self._kept = np.empty(0, np.uint8), []
        self._position = 0
        self._table.thawed_by(self)

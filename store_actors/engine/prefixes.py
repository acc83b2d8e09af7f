"""A search for rows whose leading key columns equal one of many prefixes."""

from __future__ import annotations

import numpy as np

from store_actors.engine import index_kernels, row_kernels
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.larger_index import new_index
from store_actors.engine.memory import HEAP
from store_actors.engine.table import GroupTable

_ALL_BITS = np.uint64((1 << 64) - 1)


class PrefixMatch:
    """A match of rows with prefixes: one pass over the rows, for any number of prefixes.

    Parameters
    ----------
    prefixes
        Rows of its layout of which the first `columns` key columns count.
    """

    def __init__(self, table: GroupTable, prefixes: Words, columns: int) -> None:
        layout = table.layout
        first = layout.flag_words + layout.null_words
        width = sum(slot.words for slot in layout.keys[:columns])
        # The first columns have their nulls in word 0, those beyond them in words of their own.
        nulls = layout.null_bits(layout.keys[:columns])
        self._mask, self.words = nulls.pop(0), [0, *nulls, *range(first, first + width)]
        self._bits = np.array([self._mask, *nulls.values(), *[_ALL_BITS] * width], np.uint64)
        width += len(nulls)
        self._secret = table.secret
        masked = np.ascontiguousarray(prefixes[:, self.words] & self._bits)
        self._index = new_index(HEAP, len(masked))
        self._stored = np.empty((len(masked) + 1, 1 + width), np.uint64)
        nothing_free, counters, slots = (
            np.empty(0, np.int64),
            np.zeros(2, np.int64),
            np.empty(len(masked), np.int64),
        )
        row_kernels.put(
            self._index, self._stored, masked, self._mask, 1, width, self._secret, 0, nothing_free, counters, len(masked), slots
        )  # fmt: skip
        #: The last one of equal prefixes.
        self._prefix_at = np.zeros(len(masked) + 1, np.int64)
        self._prefix_at[slots] = np.arange(len(masked))

    def places(self, rows: Words) -> Slots:
        """Return the index of each row's prefix, -1 for none.

        Parameters
        ----------
        rows
            Only their :attr:`words`.
        """
        out = np.empty(len(rows), np.int64)
        rows = rows & self._bits
        keys = np.ascontiguousarray(rows[:, 1:])
        index_kernels.lookup(
            self._index, self._stored, keys, np.ascontiguousarray(rows[:, 0]), self._mask, 1, self._secret, out
        )
        return np.where(out >= 0, self._prefix_at[out], -1)

"""Rows that share a key: a chain of slots for each key, beside a table whose rows have keys of their own.

The rows of a join side, the sessions of a user, the entries of a list: many rows belong to one key. Each is a row of a
:class:`~store_actors.engine.table.GroupTable` whose last key column numbers it, so it is versioned, undone and written
like any other; the chains find all rows with equal leading key columns. An index of its own (as the table's, see
``index_kernels.py``) leads to the head of each chain; ``_next`` and ``_previous`` lead on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from coordinator.model.schema import ROW_COLUMN, StateSchema
from store_actors.engine import multimap_kernels as chain_kernels
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.memory import HEAP, Memory, blocks, index_room, larger_index, new_index, steps
from store_actors.engine.table import GroupTable, Touched
from store_actors.engine.versions import VersionedTable


class MultimapTable(GroupTable):
    """A table whose rows are also found by their leading key columns.

    Parameters
    ----------
    schema
        Its last key is :data:`ROW_COLUMN`, int64.
    """

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP, *, capacity: int = 1 << 8) -> None:
        assert schema.keys[-1].name == ROW_COLUMN, "the rows of a chained table are numbered by their last key"
        super().__init__(schema, seed, memory, capacity=capacity)
        layout = self.layout
        self._chain_words = layout.key_words - 1
        self._chain_mask = layout.chain_mask
        self._heads: Words = new_index(memory, capacity)
        self._chains = 0
        self._next: Slots = memory.zeros(capacity, np.int64)
        self._previous: Slots = memory.zeros(capacity, np.int64)

    @property
    def nbytes(self) -> int:
        """Memory of the table and its chains, in bytes."""
        return super().nbytes + self._heads.nbytes + 16 * len(self.used_rows())

    # -- looking --------------------------------------------------------------------------------------------------

    def chain_keys(self, batch: pa.RecordBatch) -> tuple[Words, Words]:
        """Return the words and null bits of the leading key columns of a batch, for :meth:`match`."""
        return self.chain_keys_of(self.rows_of(batch, self.layout.keys[:-1]))

    def match(self, keys: Words, nulls: Words) -> tuple[Slots, Slots]:
        """Return all pairs of a given key and a row that has it.

        Parameters
        ----------
        keys, nulls
            As :meth:`chain_keys` gives them. A null equals a null.

        Returns
        -------
        tuple
            For each pair the place of the key, in ascending order, and the slot of the row.
        """
        pairs = list(self.match_blocks(keys, nulls, max(1 << 16, 2 * len(keys))))
        if not pairs:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([rows for rows, _ in pairs]), np.concatenate([slots for _, slots in pairs])

    def chain_keys_of(self, rows: Words) -> tuple[Words, Words]:
        """Return :meth:`chain_keys` of rows given as words."""
        first = self.layout.flag_words
        return np.ascontiguousarray(rows[:, first : first + self._chain_words]), rows[:, 0] & self._chain_mask

    def match_blocks(self, keys: Words, nulls: Words, pairs: int = 1 << 20) -> Iterator[tuple[Slots, Slots]]:
        """Yield :meth:`match` in blocks of at most `pairs` pairs, or all those of one key if they are more.

        The table must not change meanwhile, except in words that are not keys.
        """
        room, done = pairs, 0
        while done < len(keys):
            out_rows, out_slots, begin = np.empty(room, np.int64), np.empty(room, np.int64), done
            done, filled = chain_kernels.match(
                self._heads, self.rows, keys, nulls, self._next, self.layout.flag_words, self._chain_words,
                self._chain_mask, self.secret, begin, out_rows, out_slots,
            )  # fmt: skip
            room = room if done > begin else 2 * room
            if filled:
                yield out_rows[:filled], out_slots[:filled]

    # -- changing -------------------------------------------------------------------------------------------------

    def put(self, rows: Words) -> Slots:
        """Store whole rows as :meth:`GroupTable.put` does, and link them."""
        slots_before = self.find(rows)
        slots = super().put(rows)
        self._enter(slots[slots_before < 0])
        return slots

    def upsert(self, rows: Words, stamp: int) -> Touched:
        """Write whole rows as :meth:`GroupTable.upsert` does, and link new ones."""
        touched = super().upsert(rows, stamp)
        self._enter(touched.created)
        return touched

    def remove_rows(self, rows: Words) -> Slots:
        """Remove rows as :meth:`GroupTable.remove_rows` does, and unlink them."""
        slots = super().remove_rows(rows)
        self._leave(slots)
        return slots

    def evict(self, limit: int) -> Slots:
        """Evict rows as :meth:`GroupTable.evict` does, and unlink them."""
        slots = super().evict(limit)
        self._leave(slots)
        return slots

    def reindex(self) -> None:
        """Rebuild the index as :meth:`GroupTable.reindex` does, and all chains."""
        super().reindex()
        self._heads[:] = 0
        self._chains = 0
        self._enter(self.live())

    def _enter(self, slots: Slots) -> None:
        if len(self._next) < len(self.rows):
            used = len(self._next)
            self._next = self.memory.larger(self._next, used, len(self.rows))
            self._previous = self.memory.larger(self._previous, used, len(self.rows))
        done = 0
        while done < len(slots):
            end = done + self.memory.step(len(slots) - done)
            done, added = chain_kernels.link(
                self._heads, self.rows, slots[:end], done, self._next, self._previous, self.layout.flag_words,
                self._chain_words, self._chain_mask, self.secret, index_room(self._heads) - self._chains,
            )  # fmt: skip
            self._chains += added
            if done < end:
                self._heads = larger_index(self.memory, self._heads, self._chains + 1)

    def largest_number(self) -> int:
        """Return the largest number of a row; -1 without any."""
        used, word = self.used_rows(), self.layout.keys[-1].word
        numbers = (chain_kernels.largest_number(used[block], word) for block in blocks(self.memory, used))
        return max(numbers, default=-1)

    def _leave(self, slots: Slots) -> None:
        for piece in steps(self.memory, len(slots)):
            self._chains -= chain_kernels.unlink(
                self._heads, self.rows, slots[piece], self._next, self._previous, self.layout.flag_words,
                self._chain_words, self._chain_mask, self.secret,
            )  # fmt: skip


def numbered_keys(table: GroupTable, rows: Words) -> tuple[Slots, Slots]:
    """Return the number of each row's key, the last column left out, from 0 as they come; and the first row of each key.

    Parameters
    ----------
    table
        Its last key is :data:`ROW_COLUMN`.
    rows
        Words of it.
    """
    return _numbered(table, rows, table.layout.key_words - 1, table.layout.chain_mask)


def first_of_keys(table: GroupTable, rows: Words) -> Slots:
    """Return the first row of each key."""
    return _numbered(table, rows, table.layout.key_words, table.layout.key_mask)[1]


def _numbered(table: GroupTable, rows: Words, key_words: int, mask: np.uint64) -> tuple[Slots, Slots]:
    size = len(rows)
    ids, firsts = np.empty(size, np.int64), np.empty(size, np.int64)
    count = chain_kernels.number_keys(
        rows, table.layout.flag_words, key_words, mask, table.secret, new_index(HEAP, size), ids, firsts
    )
    return ids, firsts[:count]


class MultiTable(VersionedTable):
    """A :class:`VersionedTable` of rows of which many share a key.

    Parameters
    ----------
    schema
        Its last key is :data:`ROW_COLUMN`, int64, filled by :meth:`numbers`.
    """

    table: MultimapTable

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        super().__init__(schema, seed, memory, MultimapTable)
        self._next_number: int | None = None

    def numbers(self, count: int) -> Slots:
        """Return the row numbers that no row has."""
        if self._next_number is None:
            self._next_number = self.table.largest_number() + 1
        begin = self._next_number
        self._next_number += count
        return np.arange(begin, begin + count)

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a delta or a snapshot as :meth:`VersionedTable.load` does."""
        super().load(delta, version, watermark_ms)
        self._next_number = None

"""Letting go of strings and lists that no row has any more: what is left is put into new pools, and the rows into its places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from store_actors.engine import list_kernels
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.layout import ListSlot
from store_actors.engine.lists import ListPool
from store_actors.engine.memory import blocks
from store_actors.engine.pieces import cut
from store_actors.engine.strings import StringPool
from store_actors.engine.table import GroupTable

__all__ = ["compact_together"]

#: Bytes of a string in a pool besides its own.
_STRING_BYTES = 24
#: Bytes of strings that are copied at once.
_COPIED_BYTES = 1 << 24
#: Strings that are looked at at once: what is needed for that does not grow with the state.
_BLOCK = 1 << 18

#: Lists of one field: what it is, where they are, and how long.
_Lists = tuple[ListSlot, Slots, Slots]


def compact_together(tables: Sequence[tuple[GroupTable, Sequence[Words]]]) -> None:
    """Drop strings and lists that no live row of tables that share one pool of strings holds; ids and extents change in place.

    Parameters
    ----------
    tables
        Each with further rows of its layout (whole ones, or only flag and key words) that stay in use.
    """
    old = tables[0][0].pool
    held = [(table, *_lists(table, [table.used_rows(), *others])) for table, others in tables]
    string_lists = [(table.lists, one) for table, lists, _ in held for one in lists if one[0].is_text]
    is_used = old.memory.zeros(max(old.count, 1), np.uint8)
    for rows, word, chosen in _all_texts(tables):
        is_used[rows[chosen, word].view(np.int64)] = 1
    for pool, (field, offsets, lengths) in string_lists:
        list_kernels.mark(pool.arena, offsets, lengths, field.width, is_used)
    renumbers = _is_worthwhile(old, is_used)
    if renumbers:
        new, new_ids = _subset(old, is_used)
        for rows, word, chosen in _all_texts(tables):
            rows[chosen, word] = new_ids[rows[chosen, word].view(np.int64)]
        for pool, (field, offsets, lengths) in string_lists:
            list_kernels.renumber(pool.arena, offsets, lengths, field.width, new_ids)
        for table, _ in tables:
            table.pool = new
            table.reindex()
    for table, lists, are_moved in held:
        for one in lists:
            if are_moved or renumbers:
                table.lists.index(*one)


def _is_worthwhile(pool: StringPool, is_used: Bytes) -> bool:
    """Whether dropping the unused strings frees a quarter at least: all others are copied for it."""
    kept = sum(int(lengths.sum()) + _STRING_BYTES * len(ids) for ids, lengths in _chosen(pool, is_used))
    return 4 * kept <= 3 * (pool.used + _STRING_BYTES * pool.count)


def _chosen(pool: StringPool, is_used: Bytes) -> Iterator[tuple[Slots, Slots]]:
    """Yield ids of the used strings and their lengths, a block at a time."""
    for begin in range(0, pool.count, _BLOCK):
        ids = begin + np.flatnonzero(is_used[begin : min(begin + _BLOCK, pool.count)])
        yield ids, pool.offsets[ids + 1] - pool.offsets[ids]


def _all_texts(tables: Sequence[tuple[GroupTable, Sequence[Words]]]) -> Iterator[tuple[Words, int, Slots]]:
    """Blocks of rows of all tables, with a word of strings and the live rows in which it is not null."""
    for table, others in tables:
        for rows in (table.used_rows(), *others):
            for some in blocks(table.memory, rows):
                for word, chosen in _texts(table, rows[some]):
                    yield rows[some], word, chosen


def _texts(table: GroupTable, rows: Words) -> list[tuple[int, Slots]]:
    """Words of strings that the rows have, each with the live rows in which it is not null."""
    found = []
    for slot in (*table.layout.keys, *table.layout.state):
        if slot.is_text and slot.word < rows.shape[1]:
            flagged = (rows[:, slot.flag_word] & np.uint64(slot.flag)) != 0
            found.append((slot.word, np.flatnonzero((flagged != slot.is_key) & (rows[:, 0] & LIVE != 0))))
    return found


def _lists(table: GroupTable, held: Sequence[Words]) -> tuple[list[_Lists], bool]:
    """The lists that rows hold, and whether they were put into a new pool of the table's: if that frees a quarter."""
    old, found = table.lists, [_HeldLists.of(field, held) for field in table.layout.lists.values()]
    used = sum(list_kernels.room(one.lengths, one.field.width, one.field.kind) for one in found)
    if not found or 4 * used > 3 * old.used:
        return [(one.field, one.extents, one.lengths) for one in found], False
    table.lists = ListPool(table.seed, table.memory)
    moved = []
    for one in found:
        offsets = table.lists.copy(one.field, old.arena, one.extents, one.lengths)
        one.point_to(offsets)
        moved.append((one.field, offsets, one.lengths))
    return moved, True


@dataclass(frozen=True, slots=True)
class _HeldLists:
    """The lists of one field that rows hold.

    Attributes
    ----------
    rows, chosen
        Blocks of rows, and which of each have a list that is not empty.
    extents, lengths
        Where the lists are, each once, and how long.
    place
        Which of them each chosen row has.
    """

    field: ListSlot
    rows: list[Words]
    chosen: list[Slots]
    extents: Slots
    lengths: Slots
    place: Slots

    @classmethod
    def of(cls, field: ListSlot, held: Sequence[Words]) -> _HeldLists:
        rows = [one for one in held if field.word < one.shape[1]]
        chosen = [np.flatnonzero((one[:, 0] & LIVE != 0) & (one[:, field.word + 1] != 0)) for one in rows]
        pairs = list(zip(rows, chosen, strict=True))
        extents, place = np.unique(np.concatenate([one[some, field.word] for one, some in pairs]), return_inverse=True)
        # Versions of one row share an extent: the longest list has what all of them have.
        lengths = np.zeros(len(extents), np.int64)
        np.maximum.at(lengths, place, np.concatenate([one[some, field.word + 1] for one, some in pairs]).view(np.int64))
        return cls(field, rows, chosen, extents.view(np.int64), lengths, place)

    def point_to(self, offsets: Slots) -> None:
        """Write to the rows where their lists are now."""
        begin = 0
        for one, some in zip(self.rows, self.chosen, strict=True):
            one[some, self.field.word] = offsets[self.place[begin : begin + len(some)]].view(np.uint64)
            begin += len(some)


def _subset(pool: StringPool, is_used: Bytes) -> tuple[StringPool, Words]:
    """Return a pool of only the used strings, and the new id of each old one (0 for an unused one)."""
    subset, new_ids = StringPool(pool.seed, pool.memory), pool.memory.zeros(max(pool.count, 1), np.uint64)
    for ids, lengths in _chosen(pool, is_used):
        # What is copied is in memory three times for a moment, so it is copied in pieces.
        for piece in cut(lengths, _COPIED_BYTES):
            some, all_valid = ids[piece], np.ones(piece.stop - piece.start, np.uint8)
            offsets, data = pool.gather(some, all_valid)
            content = data if len(data) else np.zeros(1, np.uint8)
            new_ids[some] = subset.ids(content, offsets, all_valid)
    return subset, new_ids

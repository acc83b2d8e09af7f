"""Compaction: strings and lists that no row refers to are dropped. The others move to new pools, and rows get new ids and extents."""

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

#: Bytes of a string in a pool besides its own.
_STRING_BYTES = 24
#: Bytes of strings that are copied at once.
_COPIED_BYTES = 1 << 24
#: Strings that are looked at at once: what is needed for that does not grow with the state.
_BLOCK = 1 << 18

#: Lists of one field: what it is, where they are, and how long.
_Lists = tuple[ListSlot, Slots, Slots]


def compact_together(tables: Sequence[tuple[GroupTable, Sequence[Words]]]) -> None:
    """Drop strings and lists that no live row refers to, of tables that share one pool of strings; ids and extents change in place."""
    old = tables[0][0].pool
    lists_of_tables = [(table, *_lists(table, [table.used_rows(), *further_rows])) for table, further_rows in tables]
    string_lists = [
        (table.lists, field_lists)
        for table, lists, _ in lists_of_tables
        for field_lists in lists
        if field_lists[0].is_text
    ]
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
    for table, lists, are_moved in lists_of_tables:
        for field_lists in lists:
            if are_moved or renumbers:
                table.lists.index(*field_lists)


def _is_worthwhile(pool: StringPool, is_used: Bytes) -> bool:
    """Return whether compaction frees at least a quarter of the strings; it copies all others."""
    kept = sum(int(lengths.sum()) + _STRING_BYTES * len(ids) for ids, lengths in _chosen(pool, is_used))
    return 4 * kept <= 3 * (pool.used + _STRING_BYTES * pool.count)


def _chosen(pool: StringPool, is_used: Bytes) -> Iterator[tuple[Slots, Slots]]:
    """Yield ids of the used strings and their lengths, a block at a time."""
    for begin in range(0, pool.count, _BLOCK):
        ids = begin + np.flatnonzero(is_used[begin : min(begin + _BLOCK, pool.count)])
        yield ids, pool.offsets[ids + 1] - pool.offsets[ids]


def _all_texts(tables: Sequence[tuple[GroupTable, Sequence[Words]]]) -> Iterator[tuple[Words, int, Slots]]:
    """Yield the blocks of rows of all tables, with a word of strings and the live rows in which it is not null."""
    for table, further_rows in tables:
        for rows in (table.used_rows(), *further_rows):
            for block in blocks(table.memory, rows):
                for word, chosen in _texts(table, rows[block]):
                    yield rows[block], word, chosen


def _texts(table: GroupTable, rows: Words) -> list[tuple[int, Slots]]:
    """Return the words of strings that the rows have, each with the live rows in which it is not null."""
    text_words = []
    for slot in (*table.layout.keys, *table.layout.state):
        if slot.is_text and slot.word < rows.shape[1]:
            flagged = (rows[:, slot.flag_word] & np.uint64(slot.flag)) != 0
            text_words.append((slot.word, np.flatnonzero((flagged != slot.is_key) & (rows[:, 0] & LIVE != 0))))
    return text_words


def _lists(table: GroupTable, row_blocks: Sequence[Words]) -> tuple[list[_Lists], bool]:
    """Return the lists of rows, and whether they moved to a new pool of the table: they do if that frees a quarter."""
    old, list_fields = table.lists, [_FieldLists.of(field, row_blocks) for field in table.layout.lists.values()]
    used = sum(
        list_kernels.room(list_field.lengths, list_field.field.width, list_field.field.kind)
        for list_field in list_fields
    )
    if not list_fields or 4 * used > 3 * old.used:
        return [(list_field.field, list_field.extents, list_field.lengths) for list_field in list_fields], False
    table.lists = ListPool(table.seed, table.memory)
    moved = []
    for list_field in list_fields:
        offsets = table.lists.copy(list_field.field, old.arena, list_field.extents, list_field.lengths)
        list_field.point_to(offsets)
        moved.append((list_field.field, offsets, list_field.lengths))
    return moved, True


@dataclass(frozen=True, slots=True)
class _FieldLists:
    field: ListSlot
    #: ``rows``, ``chosen``: Blocks of rows, and which of each have a list that is not empty.
    rows: list[Words]
    chosen: list[Slots]
    #: ``extents``, ``lengths``: Where the lists are, each once, and how long.
    extents: Slots
    lengths: Slots
    #: The index of each chosen row's list in `extents`.
    list_indices: Slots

    @classmethod
    def of(cls, field: ListSlot, row_blocks: Sequence[Words]) -> _FieldLists:
        rows = [block for block in row_blocks if field.word < block.shape[1]]
        chosen = [np.flatnonzero((block[:, 0] & LIVE != 0) & (block[:, field.word + 1] != 0)) for block in rows]
        pairs = list(zip(rows, chosen, strict=True))
        extents, list_indices = np.unique(
            np.concatenate([block[slots, field.word] for block, slots in pairs]), return_inverse=True
        )
        # Versions of one row share an extent: the longest list has what all of them have.
        lengths = np.zeros(len(extents), np.int64)
        np.maximum.at(
            lengths,
            list_indices,
            np.concatenate([block[slots, field.word + 1] for block, slots in pairs]).view(np.int64),
        )
        return cls(field, rows, chosen, extents.view(np.int64), lengths, list_indices)

    def point_to(self, offsets: Slots) -> None:
        """Write to the rows where their lists are now."""
        begin = 0
        for block, slots in zip(self.rows, self.chosen, strict=True):
            block[slots, self.field.word] = offsets[self.list_indices[begin : begin + len(slots)]].view(np.uint64)
            begin += len(slots)


def _subset(pool: StringPool, is_used: Bytes) -> tuple[StringPool, Words]:
    """Return a pool of only the used strings, and the new id of each old one (0 for an unused one)."""
    subset, new_ids = StringPool(pool.seed, pool.memory), pool.memory.zeros(max(pool.count, 1), np.uint64)
    for ids, lengths in _chosen(pool, is_used):
        # What is copied is in memory three times for a moment, so it is copied in pieces.
        for piece in cut(lengths, _COPIED_BYTES):
            piece_ids, all_valid = ids[piece], np.ones(piece.stop - piece.start, np.uint8)
            offsets, data = pool.gather(piece_ids, all_valid)
            content = data if len(data) else np.zeros(1, np.uint8)
            new_ids[piece_ids] = subset.ids(content, offsets, all_valid)
    return subset, new_ids

"""Compiled loops that insert, overwrite (with or without undo) and read whole rows; ``index_kernels.py`` has the layout of their words.

A loop that writes stops when the index or the rows are out of room, and goes on where it stopped once there is more.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, int64, uint8, uint32, uint64

from store_actors.engine.hash_kernels import hash_row
from store_actors.engine.index_kernels import (
    _BLOCK,
    _LOW32,
    _S32,
    _ZERO,
    LIVE,
    _find,
    claim_slot,
    home,
    tag_block,
)
from store_actors.engine.machine_kernels import prefetch

#: Rows that are on their way to the cache.
_AHEAD = 24

u8_1, u64_1, u64_2, i64_1, bool_1 = uint8[::1], uint64[::1], uint64[:, ::1], int64[::1], boolean[::1]


@njit(
    int64(u64_1, u64_2, u64_2, uint64, int64, int64, u64_1, int64, i64_1, i64_1, int64, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def put(index, rows, new_rows, key_mask, first, key_words, secret, start, free, counters, spare_entries, out):
    """Store whole rows ``start..`` (their words already laid out), replacing those of the same key; ``out`` gets their slots.

    Stops when out of room; returns the first row not stored.
    """
    added = np.int64(0)
    for row in range(start, new_rows.shape[0]):
        nulls = new_rows[row, 0] & key_mask
        tag = hash_row(new_rows, row, first, key_words, nulls, secret)
        begin = home(tag, index)
        position = _find(index, rows, new_rows, row, first, first, key_words, nulls, key_mask, tag, begin)
        if position >= 0:
            slot = np.int64(index[position] & _LOW32) - 1
        else:
            slot = claim_slot(rows.shape[0], free, counters, spare_entries - added)
            if slot < 0:
                return row
            index[-1 - position] = (tag << _S32) | np.uint64(slot + 1)
            added += 1
        for word in range(rows.shape[1]):
            rows[slot, word] = new_rows[row, word]
        rows[slot, 0] |= LIVE
        out[row] = slot
    return new_rows.shape[0]


@njit(
    Tuple((int64, int64, int64))(
        u64_1, u64_2, u64_2, u64_2, u64_1, uint64, int64, u64_1, int64, uint32, i64_1, i64_1, int64, i64_1, i64_1, u64_2,
        i64_1, boolean, i64_1,
    ),
    cache=True, nogil=True,
)  # fmt: skip
def upsert(
    index, rows, new_rows, keys, nulls, key_mask, first, secret, start, stamp, free, counters, spare_entries, created,
    undo_slots, undo_rows, progress, only_new, sources,
):  # fmt: skip
    """Write whole rows ``start..`` under `stamp`, keeping what they overwrite (and where) unless that has the same stamp.

    ``progress`` is (created, undone) so far in this call. Stops early when a new key finds no free slot or no room in
    the index. Of rows with the same key the last one stays. With ``only_new`` those are written whose key is not there yet, and of rows
    with the same key the first one; ``sources`` gets the rows that the created ones come from.

    Returns
    -------
    tuple
        (first row not written, created, undone)
    """
    total = keys.shape[0]
    n_created, n_undone = progress[0], progress[1]
    added = np.int64(0)
    tags, positions = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    stamp_word = np.uint64(stamp) << _S32
    block = start
    while block < total:
        end = min(block + _BLOCK, total)
        tag_block(index, rows, keys, nulls, secret, block, end, tags, positions)
        for row in range(block, end):
            tag, begin = tags[row - block], positions[row - block]
            position = _find(index, rows, keys, row, first, 0, keys.shape[1], nulls[row], key_mask, tag, begin)
            if position >= 0:
                if only_new:
                    continue
                slot = np.int64(index[position] & _LOW32) - 1
                if rows[slot, 0] >> _S32 != np.uint64(stamp):
                    undo_slots[n_undone] = slot
                    for word in range(rows.shape[1]):
                        undo_rows[n_undone, word] = rows[slot, word]
                    n_undone += 1
            else:
                slot = claim_slot(rows.shape[0], free, counters, spare_entries - added)
                if slot < 0:
                    return row, n_created, n_undone
                index[-1 - position] = (tag << _S32) | np.uint64(slot + 1)
                added += 1
                created[n_created] = slot
                if only_new:
                    sources[n_created] = row
                n_created += 1
            for word in range(1, rows.shape[1]):
                rows[slot, word] = new_rows[row, word]
            rows[slot, 0] = (new_rows[row, 0] & _LOW32) | LIVE | stamp_word
        block = end
    return total, n_created, n_undone


@njit(int64(u64_2, u8_1, int64, int64, i64_1, u64_2, int64), cache=True, nogil=True)
def take_columns(rows, chosen, begin, end, words, out, count):
    """Copy some words of the rows from `begin` up to `end` that are chosen, a line of ``out`` for each word, from `count` on.

    Returns how many there are in ``out`` then.
    """
    for slot in range(begin, end):
        if chosen[slot]:
            for column in range(words.shape[0]):
                word = words[column]
                out[word, count] = rows[slot, word]
            count += 1
    return count


@njit(void(u64_2, i64_1, int64), cache=True, nogil=True, inline="always")
def _prefetch_ahead(rows, slots, number):
    """Prefetch the row that is looked at some rows after that of a number."""
    at = max(slots[min(number + _AHEAD, slots.shape[0] - 1)], 0) * rows.shape[1]
    prefetch(rows, at)
    prefetch(rows, at + rows.shape[1] - 1)


@njit(void(u64_2, i64_1, int64, int64, u64_2), cache=True, nogil=True)
def gather(rows, slots, begin, end, out):
    """Copy the rows at the slots ``begin..end``, a line of ``out`` for each word; zeros for slot -1."""
    for number in range(begin, end):
        _prefetch_ahead(rows, slots, number)
        slot, is_row = max(slots[number], 0), slots[number] >= 0
        for word in range(rows.shape[1]):
            value = rows[slot, word]
            out[word, number] = value if is_row else _ZERO


@njit(void(u64_2, i64_1, u64_2, uint64, bool_1), cache=True, nogil=True)
def differing(rows, slots, before, mask, out):
    """Find which of the rows at some slots are other ones than before; of word 0 only the bits of `mask` count. Slot -1: no row."""
    for number in range(slots.shape[0]):
        _prefetch_ahead(rows, slots, number)
        slot = max(slots[number], 0)
        differs = (rows[slot, 0] ^ before[number, 0]) & mask
        for word in range(1, rows.shape[1]):
            differs |= rows[slot, word] ^ before[number, word]
        out[number] = differs != _ZERO and slots[number] >= 0

"""Compiled loops of chains (``chains.py``): rows that share their leading key words, linked from slot to slot."""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, int64, uint64

from store_actors.kernels import _LOW32, _S32, _ZERO, LIVE, _delete_at, index_shift, mix

__all__ = ["largest_number", "link", "match", "unlink"]

_SEED = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)

u64_1, u64_2, i64_1 = uint64[::1], uint64[:, ::1], int64[::1]


@njit(uint64(u64_2, int64, int64, int64, uint64), cache=True, nogil=True)
def _tag_at(words, row, first, key_words, nulls):
    hashed = _SEED ^ nulls
    for word in range(key_words):
        hashed = mix(hashed ^ words[row, first + word]) + _SEED
    return mix(hashed) >> _S32


@njit(boolean(u64_2, int64, u64_2, int64, int64, int64, int64, uint64, uint64), cache=True, nogil=True, inline="always")
def _same(rows, slot, words, row, first, words_first, key_words, nulls, key_mask):
    if rows[slot, 0] & key_mask != nulls:
        return False
    for word in range(key_words):
        if rows[slot, first + word] != words[row, words_first + word]:
            return False
    return True


@njit(int64(u64_1, u64_2, u64_2, int64, int64, int64, int64, uint64, uint64, uint64), cache=True, nogil=True)
def _head(index, rows, words, row, first, words_first, key_words, nulls, key_mask, tag):
    """Place in the index of a key's chain, or -1 - the empty place where it belongs."""
    mask = np.uint64(index.shape[0] - 1)
    place = tag >> index_shift(index.shape[0])
    while True:
        entry = index[place]
        if entry == _ZERO:
            return -1 - np.int64(place)
        if entry >> _S32 == tag and _same(
            rows, np.int64(entry & _LOW32) - 1, words, row, first, words_first, key_words, nulls, key_mask
        ):
            return np.int64(place)
        place = (place + _ONE) & mask


@njit(
    Tuple((int64, int64))(u64_1, u64_2, i64_1, int64, i64_1, i64_1, int64, int64, uint64, int64), cache=True, nogil=True
)
def link(index, rows, slots, start, following, previous, first, key_words, key_mask, room):
    """Put rows at the heads of their chains; stops when a new chain finds no room. Returns (rows done, new chains)."""
    added = 0
    for place_in_batch in range(start, slots.shape[0]):
        slot = slots[place_in_batch]
        nulls = rows[slot, 0] & key_mask
        tag = _tag_at(rows, slot, first, key_words, nulls)
        place = _head(index, rows, rows, slot, first, first, key_words, nulls, key_mask, tag)
        previous[slot] = -1
        if place >= 0:
            head = np.int64(index[place] & _LOW32) - 1
            following[slot] = head
            previous[head] = slot
            index[place] = (tag << _S32) | np.uint64(slot + 1)
        else:
            if added >= room:
                return place_in_batch, added
            following[slot] = -1
            index[-1 - place] = (tag << _S32) | np.uint64(slot + 1)
            added += 1
    return slots.shape[0], added


@njit(int64(u64_1, u64_2, i64_1, i64_1, i64_1, int64, int64, uint64), cache=True, nogil=True)
def unlink(index, rows, slots, following, previous, first, key_words, key_mask):
    """Take rows, whose words are intact, out of their chains; returns how many chains ended."""
    ended = 0
    for slot in slots:
        after, before = following[slot], previous[slot]
        if after >= 0:
            previous[after] = before
        if before >= 0:
            following[before] = after
            continue
        nulls = rows[slot, 0] & key_mask
        tag = _tag_at(rows, slot, first, key_words, nulls)
        mask = np.uint64(index.shape[0] - 1)
        place = tag >> index_shift(index.shape[0])
        while np.int64(index[place] & _LOW32) - 1 != slot:
            place = (place + _ONE) & mask
        if after >= 0:
            index[place] = (tag << _S32) | np.uint64(after + 1)
        else:
            _delete_at(index, np.int64(place))
            ended += 1
    return ended


@njit(
    Tuple((int64, int64))(u64_1, u64_2, u64_2, u64_1, i64_1, int64, int64, uint64, int64, i64_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def match(index, rows, keys, nulls, following, first, key_words, key_mask, start, out_rows, out_slots):
    """Pairs (row of `keys`, slot) of equal keys; stops when a row's chain does not fit. Returns (rows done, pairs)."""
    filled = 0
    for row in range(start, keys.shape[0]):
        tag = _tag_at(keys, row, 0, key_words, nulls[row])
        place = _head(index, rows, keys, row, first, 0, key_words, nulls[row], key_mask, tag)
        if place < 0:
            continue
        before = filled
        slot = np.int64(index[place] & _LOW32) - 1
        while slot >= 0:
            if filled == out_rows.shape[0]:
                return row, before
            out_rows[filled] = row
            out_slots[filled] = slot
            filled += 1
            slot = following[slot]
    return keys.shape[0], filled


@njit(void(u64_2, int64, i64_1), cache=True, nogil=True)
def largest_number(rows, word, largest):
    """Largest number of a live row."""
    for slot in range(rows.shape[0]):
        if rows[slot, 0] & LIVE != _ZERO and np.int64(rows[slot, word]) > largest[0]:
            largest[0] = np.int64(rows[slot, word])

"""Compiled loops of the multimap's chains (``multimap.py``): rows that share their leading key words, linked from slot to slot."""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, int64, uint64

from store_actors.engine.hash_kernels import hash_row
from store_actors.engine.index_kernels import (
    _LOW32,
    _S32,
    _ZERO,
    LIVE,
    _delete_at,
    _find,
    home,
    next_position,
    prefetch_rows,
)
from store_actors.engine.machine_kernels import prefetch

_BLOCK = 256

u64_1, u64_2, i64_1 = uint64[::1], uint64[:, ::1], int64[::1]


@njit(void(u64_1, u64_2, i64_1, int64, u64_1, u64_1), cache=True, nogil=True, inline="always")
def _prefetch_heads(index, rows, links, count, tags, positions):
    """Prefetch rows as :func:`prefetch_rows` does, and what `links` has of them."""
    prefetch_rows(index, rows, count, tags, positions)
    for number in range(count):
        entry = index[positions[number]]
        if entry != _ZERO:
            prefetch(links, np.int64(entry & _LOW32) - 1)


@njit(
    Tuple((int64, int64))(u64_1, u64_2, i64_1, int64, i64_1, i64_1, int64, int64, uint64, u64_1, int64),
    cache=True, nogil=True,
)  # fmt: skip
def link(index, rows, slots, start, following, previous, first, key_words, key_mask, secret, room):
    """Put rows at the heads of their chains; stops when the index takes no new chain. Returns (rows done, new chains)."""
    added = 0
    tags, positions = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    for block in range(start, slots.shape[0], _BLOCK):
        end = min(block + _BLOCK, slots.shape[0])
        for number in range(block, end):
            slot = slots[number]
            tag = hash_row(rows, slot, first, key_words, rows[slot, 0] & key_mask, secret)
            tags[number - block] = tag
            prefetch(index, np.int64(home(tag, index)))
        _prefetch_heads(index, rows, previous, end - block, tags, positions)
        for number in range(block, end):
            slot = slots[number]
            nulls, tag = rows[slot, 0] & key_mask, tags[number - block]
            begin = positions[number - block]
            position = _find(index, rows, rows, slot, first, first, key_words, nulls, key_mask, tag, begin)
            previous[slot] = -1
            if position >= 0:
                head = np.int64(index[position] & _LOW32) - 1
                following[slot] = head
                previous[head] = slot
                index[position] = (tag << _S32) | np.uint64(slot + 1)
            else:
                if added >= room:
                    return number, added
                following[slot] = -1
                index[-1 - position] = (tag << _S32) | np.uint64(slot + 1)
                added += 1
    return slots.shape[0], added


@njit(int64(u64_1, u64_2, i64_1, i64_1, i64_1, int64, int64, uint64, u64_1), cache=True, nogil=True)
def unlink(index, rows, slots, following, previous, first, key_words, key_mask, secret):
    """Take rows, whose words are intact, out of their chains; returns how many chains ended."""
    ended = 0
    tags = np.empty(_BLOCK, np.uint64)
    for block in range(0, slots.shape[0], _BLOCK):
        end = min(block + _BLOCK, slots.shape[0])
        for number in range(block, end):
            slot = slots[number]
            tag = hash_row(rows, slot, first, key_words, rows[slot, 0] & key_mask, secret)
            tags[number - block] = tag
            prefetch(index, np.int64(home(tag, index)))
        for number in range(block, end):
            slot, tag = slots[number], tags[number - block]
            after, before = following[slot], previous[slot]
            if after >= 0:
                previous[after] = before
            if before >= 0:
                following[before] = after
                continue
            position = home(tag, index)
            while np.int64(index[position] & _LOW32) - 1 != slot:
                position = next_position(position, index)
            if after >= 0:
                index[position] = (tag << _S32) | np.uint64(after + 1)
            else:
                _delete_at(index, position)
                ended += 1
    return ended


@njit(
    Tuple((int64, int64))(u64_1, u64_2, u64_2, u64_1, i64_1, int64, int64, uint64, u64_1, int64, i64_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def match(index, rows, keys, nulls, following, first, key_words, key_mask, secret, start, out_rows, out_slots):
    """Write the pairs (row of `keys`, slot) of equal keys; stop when a row's chain does not fit. Return (rows done, pairs)."""
    filled = 0
    tags, positions = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    for block in range(start, keys.shape[0], _BLOCK):
        end = min(block + _BLOCK, keys.shape[0])
        for row in range(block, end):
            tag = hash_row(keys, row, 0, key_words, nulls[row], secret)
            tags[row - block] = tag
            prefetch(index, np.int64(home(tag, index)))
        _prefetch_heads(index, rows, following, end - block, tags, positions)
        for row in range(block, end):
            tag, begin = tags[row - block], positions[row - block]
            position = _find(index, rows, keys, row, first, 0, key_words, nulls[row], key_mask, tag, begin)
            if position < 0:
                continue
            before = filled
            slot = np.int64(index[position] & _LOW32) - 1
            while slot >= 0:
                if filled == out_rows.shape[0]:
                    return row, before
                out_rows[filled] = row
                out_slots[filled] = slot
                filled += 1
                slot = following[slot]
    return keys.shape[0], filled


@njit(int64(u64_2, int64), cache=True, nogil=True)
def largest_number(rows, word):
    """Return the largest number of a live row; -1 without any."""
    largest = np.int64(-1)
    for slot in range(rows.shape[0]):
        if rows[slot, 0] & LIVE != _ZERO:
            largest = max(largest, np.int64(rows[slot, word]))
    return largest


@njit(int64(u64_2, int64, int64, uint64, u64_1, u64_1, i64_1, i64_1), cache=True, nogil=True)
def number_keys(words, first, key_words, key_mask, secret, index, ids, firsts):
    """Number the distinct keys of rows from 0, as they come, with an empty ``index`` that has room for all.

    ``ids`` gets the number of each row's key, ``firsts`` the first row of each key. Returns how many keys there are.
    """
    count = 0
    for row in range(words.shape[0]):
        nulls = words[row, 0] & key_mask
        tag = hash_row(words, row, first, key_words, nulls, secret)
        begin = home(tag, index)
        position = _find(index, words, words, row, first, first, key_words, nulls, key_mask, tag, begin)
        if position >= 0:
            ids[row] = ids[np.int64(index[position] & _LOW32) - 1]
        else:
            index[-1 - position] = (tag << _S32) | np.uint64(row + 1)
            ids[row] = count
            firsts[count] = row
            count += 1
    return count


@njit(void(u64_2, i64_1, boolean, i64_1), cache=True, nogil=True)
def first_of_each(order, ids, last_wins, out):
    """Find the row of each id with the smallest order words; of equal ones the first, or the last. ``out`` starts as -1."""
    for row in range(ids.shape[0]):
        best = out[ids[row]]
        if best < 0:
            out[ids[row]] = row
            continue
        word = 0
        while word < order.shape[1] and order[row, word] == order[best, word]:
            word += 1
        if word == order.shape[1]:
            if last_wins:
                out[ids[row]] = row
        elif order[row, word] < order[best, word]:
            out[ids[row]] = row


@njit(boolean(u64_2, i64_1, int64, int64), cache=True, nogil=True, inline="always")
def _comes_before(order, arrival, row, other_row):
    for word in range(order.shape[1]):
        if order[row, word] != order[other_row, word]:
            return order[row, word] < order[other_row, word]
    return arrival[row] < arrival[other_row]


@njit(void(u64_2, i64_1, i64_1, i64_1, i64_1, i64_1), cache=True, nogil=True)
def first_n_of_each(order, arrival, ids, rows, starts, best):
    """Put those of ``rows`` with the smallest order words, then arrival, in place: ``best[starts[i] : starts[i + 1]]`` is id ``i``'s.

    No id has more entries in ``best`` than rows.
    """
    sizes = np.zeros(starts.shape[0] - 1, np.int64)
    for row in rows:
        begin, size = starts[ids[row]], sizes[ids[row]]
        room = starts[ids[row] + 1] - begin
        if size == room:
            if not _comes_before(order, arrival, row, best[begin + size - 1]):
                continue
            size -= 1  # the last one falls out
        low, high = np.int64(0), size
        while low < high:
            middle = (low + high) // 2
            if _comes_before(order, arrival, row, best[begin + middle]):
                high = middle
            else:
                low = middle + 1
        for position in range(begin + size, begin + low, -1):
            best[position] = best[position - 1]
        best[begin + low] = row
        sizes[ids[row]] = size + 1

"""Compiled loops of lists that grow (``lists.py``): elements in one arena of words, an extent a list.

A row has two words of a list: where its extent begins, and how many elements it has. An extent has room for a power of two
of elements, at least two; when it is full the list moves to one twice as large. So an element costs constant time, and an earlier
version of the row, with the former two words, still finds its elements: what is behind them it does not look at.

The extent of a set with room for more than ``_SMALL`` elements ends with an index of 32-bit places, twice as many as elements, that
hold an element's number plus one (0 is empty). Numbers that the list does not have (any more) are left over from a version that was
undone.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, int64, uint8, uint32, uint64

from store_actors.engine.hash_kernels import hash_element
from store_actors.engine.index_kernels import _ONE, _ZERO

#: Kinds of lists: any elements; distinct elements; distinct floats, compared as in Spark: -0.0 equals 0.0, and no NaN equals another.
LIST, SET, FLOAT_SET = 0, 1, 2
#: Elements that are looked through one by one.
_SMALL = 8

_INFINITY = np.uint64(0xFFE0000000000000)  # its bits, with the sign shifted out

u64_1, u64_2, i64_1, u8_2, u32_1 = uint64[::1], uint64[:, ::1], int64[::1], uint8[:, ::1], uint32[::1]


@njit(int64(int64), cache=True, nogil=True)
def _capacity(length):
    if length == 0:
        return 0
    capacity = 2
    while capacity < length:
        capacity *= 2
    return capacity


@njit(int64(int64, int64, int64), cache=True, nogil=True)
def _extent(capacity, width, kind):
    """Return the words of an extent with space for `capacity` elements."""
    return capacity * width + (capacity if kind != LIST and capacity > _SMALL else 0)


@njit(boolean(uint64), cache=True, nogil=True, inline="always")
def _is_nan(word):
    return (word << _ONE) > _INFINITY


@njit(boolean(u64_1, int64, uint64, uint64, int64, int64), cache=True, nogil=True, inline="always")
def _same(arena, at, low, high, width, kind):
    if arena[at] != low:
        return kind == FLOAT_SET and arena[at] << _ONE == _ZERO and low << _ONE == _ZERO
    return width == 1 or arena[at + 1] == high


@njit(int64(uint64, uint64, int64, int64, u64_1), cache=True, nogil=True)
def _hash(low, high, width, kind, secret):
    if kind == FLOAT_SET and low << _ONE == _ZERO:
        low = _ZERO
    return np.int64(hash_element(low, high, width, secret))


@njit(boolean(u64_1, u32_1, int64, int64, uint64, uint64, int64, int64, u64_1), cache=True, nogil=True)
def _has(arena, buckets, offset, length, low, high, width, kind, secret):
    if kind == FLOAT_SET and _is_nan(low):
        return False
    capacity = _capacity(length)
    if capacity <= _SMALL:
        for number in range(length):
            if _same(arena, offset + number * width, low, high, width, kind):
                return True
        return False
    index, mask = 2 * (offset + capacity * width), 2 * capacity - 1
    bucket = _hash(low, high, width, kind, secret) & mask
    for _ in range(2 * capacity):
        entry = np.int64(buckets[index + bucket])
        if entry == 0:
            return False
        if entry <= length and _same(arena, offset + (entry - 1) * width, low, high, width, kind):
            return True
        bucket = (bucket + 1) & mask
    return False


@njit(boolean(u64_1, u32_1, int64, int64, int64, int64, int64, u64_1), cache=True, nogil=True)
def _enter(arena, buckets, offset, capacity, number, width, kind, secret):
    """Note an element of a set, which has those before it, in the index; False if every place is taken."""
    at = offset + number * width
    low = arena[at]
    if kind == FLOAT_SET and _is_nan(low):
        return True  # none is ever looked for
    index, mask = 2 * (offset + capacity * width), 2 * capacity - 1
    bucket = _hash(low, arena[at + width - 1], width, kind, secret) & mask
    for _ in range(2 * capacity):
        entry = np.int64(buckets[index + bucket])
        if entry == 0 or entry > number:
            buckets[index + bucket] = np.uint32(number + 1)
            return True
        bucket = (bucket + 1) & mask
    return False


@njit(void(u64_1, u32_1, int64, int64, int64, int64, int64, u64_1), cache=True, nogil=True)
def _index(arena, buckets, offset, capacity, length, width, kind, secret):
    begin = offset + capacity * width
    for word in range(begin, begin + capacity):
        arena[word] = _ZERO
    for number in range(length):
        _enter(arena, buckets, offset, capacity, number, width, kind, secret)


@njit(int64(u64_1, u32_1, int64, u64_2, int64, int64, uint64, uint64, int64, int64, u64_1), cache=True, nogil=True)
def _add(arena, buckets, used, rows, slot, word, low, high, width, kind, secret):
    """Add an element to the list at ``rows[slot, word]``; returns the words in use, or -1 where there is no room."""
    offset, length = np.int64(rows[slot, word]), np.int64(rows[slot, word + 1])
    if kind != LIST and _has(arena, buckets, offset, length, low, high, width, kind, secret):
        return used
    capacity = _capacity(length)
    if length == capacity:
        capacity = max(2, 2 * length)
        needed = _extent(capacity, width, kind)
        if used + needed > arena.shape[0]:
            return -1
        for step in range(length * width):
            arena[used + step] = arena[offset + step]
        offset = used
        used += needed
        rows[slot, word] = np.uint64(offset)
        if kind != LIST and capacity > _SMALL:
            _index(arena, buckets, offset, capacity, length, width, kind, secret)
    arena[offset + length * width] = low
    if width == 2:
        arena[offset + length * width + 1] = high
    rows[slot, word + 1] = np.uint64(length + 1)
    if kind != LIST and capacity > _SMALL and not _enter(arena, buckets, offset, capacity, length, width, kind, secret):
        _index(arena, buckets, offset, capacity, length + 1, width, kind, secret)
    return used


@njit(
    Tuple((int64, int64))(u64_1, int64, u64_1, u64_2, i64_1, int64, u64_2, u8_2, int64, int64, int64, int64),
    cache=True, nogil=True,
)  # fmt: skip
def append(arena, used, secret, rows, slots, word, values, valid, column, width, kind, start):
    """Add the values ``start..`` of a column to the lists at ``rows[slots, word]``; nulls are left out.

    Stops when the arena is full; returns (first value not added, words in use).
    """
    buckets = arena.view(np.uint32)
    for row in range(start, slots.shape[0]):
        if valid[column, row] == 0:
            continue
        low, high = values[column, row], values[column + width - 1, row]
        after = _add(arena, buckets, used, rows, slots[row], word, low, high, width, kind, secret)
        if after < 0:
            return row, used
        used = after
    return slots.shape[0], used


@njit(
    Tuple((int64, int64, int64))(
        u64_1, int64, u64_1, u64_2, i64_1, int64, u64_1, u64_2, int64, int64, int64, int64, int64
    ),
    cache=True, nogil=True,
)  # fmt: skip
def merge(arena, used, secret, rows, slots, word, source, values, column, width, kind, start, element):
    """Add lists of another arena (``source``), given by two columns of ``values`` (begin, length), to those at ``rows[slots, word]``.

    Begins with the given element of row ``start``. Stops when the arena is full; returns (row, element, words in use).
    """
    buckets = arena.view(np.uint32)
    for row in range(start, slots.shape[0]):
        begin, length = np.int64(values[column, row]), np.int64(values[column + 1, row])
        while element < length:
            at = begin + element * width
            low, high = source[at], source[at + width - 1]
            after = _add(arena, buckets, used, rows, slots[row], word, low, high, width, kind, secret)
            if after < 0:
                return row, element, used
            used = after
            element += 1
        element = 0
    return slots.shape[0], 0, used


@njit(int64(i64_1, int64, int64), cache=True, nogil=True)
def room(lengths, width, kind):
    """Return the words that new extents of lists take."""
    total = 0
    for list_number in range(lengths.shape[0]):
        total += _extent(_capacity(lengths[list_number]), width, kind)
    return total


@njit(int64(u64_1, int64, u64_1, i64_1, i64_1, int64, int64, i64_1), cache=True, nogil=True)
def store(arena, used, source, begins, lengths, width, kind, out):
    """Copy lists, whose elements begin at ``source[begins]``, into extents of their own, without an index; ``out`` gets these.

    Returns the words in use.
    """
    for list_number in range(lengths.shape[0]):
        out[list_number] = used if lengths[list_number] > 0 else 0
        for word in range(lengths[list_number] * width):
            arena[used + word] = source[begins[list_number] + word]
        used += _extent(_capacity(lengths[list_number]), width, kind)
    return used


@njit(void(u64_1, i64_1, i64_1, int64, int64, u64_1), cache=True, nogil=True)
def make_indexes(arena, offsets, lengths, width, kind, secret):
    """Make the indexes of sets."""
    buckets = arena.view(np.uint32)
    for list_number in range(lengths.shape[0]):
        capacity = _capacity(lengths[list_number])
        if capacity > _SMALL:
            _index(arena, buckets, offsets[list_number], capacity, lengths[list_number], width, kind, secret)


@njit(void(u64_1, i64_1, i64_1, u64_2), cache=True, nogil=True)
def gather(arena, offsets, lengths, out):
    """Copy the elements of lists out, one after another; ``out`` has a row for each word of an element."""
    width, filled = out.shape[0], 0
    for list_number in range(lengths.shape[0]):
        for number in range(lengths[list_number]):
            for word in range(width):
                out[word, filled] = arena[offsets[list_number] + number * width + word]
            filled += 1


@njit(void(u64_1, i64_1, i64_1, int64, i64_1, i64_1), cache=True, nogil=True)
def measure(arena, offsets, lengths, width, ends, out):
    """Add the bytes of the strings that elements of lists begin with to ``out``; ``ends`` are the offsets of the pool of strings."""
    for list_number in range(lengths.shape[0]):
        for number in range(lengths[list_number]):
            at = offsets[list_number] + number * width
            out[list_number] += ends[np.int64(arena[at]) + 1] - ends[np.int64(arena[at])]


@njit(void(u64_1, i64_1, i64_1, int64, uint8[::1]), cache=True, nogil=True)
def mark(arena, offsets, lengths, width, is_marked):
    """Note which strings the elements of lists are, by their first words."""
    for list_number in range(lengths.shape[0]):
        for number in range(lengths[list_number]):
            is_marked[np.int64(arena[offsets[list_number] + number * width])] = 1


@njit(void(u64_1, i64_1, i64_1, int64, u64_1), cache=True, nogil=True)
def renumber(arena, offsets, lengths, width, new_ids):
    """Give the strings that the elements of lists are their new numbers."""
    for list_number in range(lengths.shape[0]):
        for number in range(lengths[list_number]):
            at = offsets[list_number] + number * width
            arena[at] = new_ids[np.int64(arena[at])]

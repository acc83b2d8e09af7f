"""Compiled loops of values that are counted: lists (``list_kernels.py``) whose elements are a value and how often it came.

Lists are only appended to, so that an earlier version of a row keeps what it had: a value may stand in a list several times, and its
count is the sum of these. A full list is rewritten with each value once, if that gives it a quarter of its room back, so it
has at most a small multiple of its distinct values, and an element costs constant time.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, float64, int64, uint8, uint64

from store_actors.engine.index_kernels import _ZERO
from store_actors.engine.list_kernels import _capacity

#: Lists that are full are looked through for repeated values from this length on.
_COMBINED_FROM = 8

u64_1, u64_2, i64_1, u8_1, f64_1, f64_2 = (
    uint64[::1],
    uint64[:, ::1],
    int64[::1],
    uint8[::1],
    float64[::1],
    float64[:, ::1],
)


@njit(int64(u64_1, int64, int64, int64, u64_1), cache=True, nogil=True)
def _combine(arena, offset, length, width, out):
    """Write the distinct values of a list, with their counts, to ``out``; returns how many."""
    # Sorted rather than hashed: no chosen values make it slow.
    low = np.empty(length, np.uint64)
    for number in range(length):
        low[number] = arena[offset + number * width + width - 2]
    order = np.argsort(low, kind="mergesort")
    if width == 3:
        for number in range(length):
            low[number] = arena[offset + order[number] * width]
        order = order[np.argsort(low, kind="mergesort")]
    distinct = 0
    for number in range(length):
        at, mine = offset + order[number] * width, (distinct - 1) * width
        if distinct > 0 and out[mine] == arena[at] and (width == 2 or out[mine + 1] == arena[at + 1]):
            out[mine + width - 1] += arena[at + width - 1]
            continue
        for word in range(width):
            out[distinct * width + word] = arena[at + word]
        distinct += 1
    return distinct


@njit(int64(u64_1, int64, u64_2, int64, int64, u64_1, int64, int64), cache=True, nogil=True)
def _add(arena, used, rows, slot, word, source, at, width):
    """Add the element at ``source[at]`` to the list at ``rows[slot, word]``; returns the words in use, or -1 without room."""
    offset, length = np.int64(rows[slot, word]), np.int64(rows[slot, word + 1])
    if length == _capacity(length):
        if used + max(2, 2 * length) * width > arena.shape[0]:
            return -1
        kept = length
        scratch = np.empty(max(1, length * width), np.uint64)
        if length >= _COMBINED_FROM:
            kept = _combine(arena, offset, length, width, scratch)
        if kept * 4 <= length * 3:
            for step in range(kept * width):
                arena[used + step] = scratch[step]
        else:
            kept = length
            for step in range(length * width):
                arena[used + step] = arena[offset + step]
        length = kept
        offset = used
        used += _capacity(length + 1) * width
        rows[slot, word] = np.uint64(offset)
    for step in range(width):
        arena[offset + length * width + step] = source[at + step]
    rows[slot, word + 1] = np.uint64(length + 1)
    return used


@njit(
    Tuple((int64, int64, int64))(u64_1, int64, u64_2, i64_1, int64, u64_1, u64_2, int64, int64, int64, int64),
    cache=True, nogil=True,
)  # fmt: skip
def merge_counted(arena, used, rows, slots, word, source, values, column, width, start, element):
    """Add lists of another arena (``source``), given by two columns of ``values`` (begin, length), to those at ``rows[slots, word]``.

    Begins with the given element of row ``start``. Stops when the arena is full; returns (row, element, words in use).
    """
    for row in range(start, slots.shape[0]):
        begin, length = np.int64(values[column, row]), np.int64(values[column + 1, row])
        while element < length:
            after = _add(arena, used, rows, slots[row], word, source, begin + element * width, width)
            if after < 0:
                return row, element, used
            used = after
            element += 1
        element = 0
    return slots.shape[0], 0, used


@njit(void(i64_1, f64_1, i64_1, f64_1, int64, f64_2, u8_1), cache=True, nogil=True)
def choose(ends, values, counts, percentages, rule, out, valid):
    """Compute percentiles of lists of counted values, whose elements end at ``ends``; an empty list has none (``valid``).

    ``rule`` is 0 for the value at a share of the way from the first to the last, between two of them if need be, and 1 for the first
    value that a share of all is not larger than (a value, always). A negative one is of values from the largest down, less one.
    """
    descending = rule < 0
    between = rule == 0 or rule == -1
    begin = 0
    for list_number in range(ends.shape[0]):
        end = ends[list_number]
        keys = values[begin:end]
        order = np.argsort(keys, kind="mergesort")
        if descending:
            order = order[::-1].copy()
        total = 0
        for element in range(begin, end):
            total += counts[element]
        valid[list_number] = total > 0
        for number in range(percentages.shape[0] if total > 0 else 0):
            if between:
                position = np.float64(total - 1) * percentages[number]
                lower, upper = np.int64(np.floor(position)), np.int64(np.ceil(position))
            else:
                position = 0.0
                lower = max(np.int64(np.ceil(percentages[number] * np.float64(total))), 1) - 1
                upper = lower
            low = high = 0.0
            cumulative = 0
            for rank in range(order.shape[0]):
                before = cumulative
                cumulative += counts[begin + order[rank]]
                if before <= lower < cumulative:
                    low = keys[order[rank]]
                if before <= upper < cumulative:
                    high = keys[order[rank]]
                    break
            if lower == upper or low == high:
                out[list_number, number] = low
            else:
                out[list_number, number] = (np.float64(upper) - position) * low + (position - np.float64(lower)) * high
        begin = end


@njit(void(i64_1, u64_1, i64_1, i64_1), cache=True, nogil=True)
def most_frequent(ends, codes, counts, out):
    """Find the number of the first element that has the most frequent value of each list of counted values; -1 of an empty list."""
    begin = 0
    for list_number in range(ends.shape[0]):
        end = ends[list_number]
        listed = np.empty(2 * (end - begin), np.uint64)
        for number in range(end - begin):
            listed[2 * number] = codes[begin + number]
            listed[2 * number + 1] = np.uint64(counts[begin + number])
        distinct = np.empty(2 * (end - begin), np.uint64)
        code = most = _ZERO
        for entry in range(_combine(listed, 0, end - begin, 2, distinct)):
            if distinct[2 * entry + 1] > most:
                code, most = distinct[2 * entry], distinct[2 * entry + 1]
        out[list_number] = -1
        for number in range(begin, end if most > _ZERO else begin):
            if codes[number] == code:
                out[list_number] = number
                break
        begin = end

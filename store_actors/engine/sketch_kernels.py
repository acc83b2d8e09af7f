"""Compiled steps of sketches: count-min tables, histograms of a number of bins."""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import float64, int64, uint64

from store_actors.engine.op_code_kernels import OpCode

_S32 = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)
#: Hashes of integers are taken modulo a prime, which is one less than a power of two.
_PRIME = np.int64((1 << 31) - 1)

u64_2, i64_2, f64_1, f64_2 = uint64[:, ::1], int64[:, ::1], float64[::1], float64[:, ::1]


@njit(void(int64, i64_2, int64, int64, uint64, int64, int64), cache=True, nogil=True)
def _count(code, rows_i, slot, word, value, words, depth):
    """Count an item in every line of a table, as Spark's CountMinSketchImpl finds its places."""
    width = (words - 1 - depth) // depth
    rows_i[slot, word] += 1
    # As 32-bit integers, which wrap.
    first, second = np.int32(np.uint32(value >> _S32)), np.int32(np.uint32(value & _LOW32))
    for line in range(depth):
        if code == OpCode.COUNT_LONG:
            hashed = np.int64(np.uint64(rows_i[slot, word + 1 + line]) * value)
            hashed += hashed >> 32
            column = (hashed & _PRIME) % width
        else:  # COUNT_HASHES
            mixed = np.int64(first) + np.int64(line) * np.int64(second)
            narrow = np.int64(np.int32(np.uint32(np.uint64(mixed) & _LOW32)))
            column = abs(narrow) % width  # the sign of Java's remainder is that of its left side
        rows_i[slot, word + 1 + depth + line * width + column] += 1


@njit(void(f64_1, int64, int64), cache=True, nogil=True)
def _trim(bins, used, most):
    """Merge the two nearest bins, the first of those that are equally near, until there are at most `most`."""
    while used > most:
        nearest = 0
        for number in range(1, used - 1):
            if bins[2 * number + 2] - bins[2 * number] < bins[2 * nearest + 2] - bins[2 * nearest]:
                nearest = number
        at = 2 * nearest
        height = bins[at + 1] + bins[at + 3]
        bins[at] = bins[at] * (bins[at + 1] / height) + bins[at + 2] / height * bins[at + 3]
        bins[at + 1] = height
        for word in range(at + 2, 2 * used - 2):
            bins[word] = bins[word + 2]
        used -= 1


@njit(void(i64_2, f64_2, int64, int64, float64, int64), cache=True, nogil=True)
def _add_to_bins(rows_i, rows_f, slot, word, value, most):
    used, begin = rows_i[slot, word], word + 1
    low, high, middle = 0, used, 0
    while low < high:
        middle = (low + high) // 2
        center = rows_f[slot, begin + 2 * middle]
        if center > value:
            high = middle
        elif center < value:
            middle += 1
            low = middle
        else:
            break
    if middle < used and rows_f[slot, begin + 2 * middle] == value:
        rows_f[slot, begin + 2 * middle + 1] += 1.0
        return
    for at in range(begin + 2 * used - 1, begin + 2 * middle - 1, -1):
        rows_f[slot, at + 2] = rows_f[slot, at]
    rows_f[slot, begin + 2 * middle] = value
    rows_f[slot, begin + 2 * middle + 1] = 1.0
    used += 1
    if used > most:
        _trim(rows_f[slot, begin : begin + 2 * used], used, most)
        used = most
    rows_i[slot, word] = used


@njit(void(i64_2, f64_2, int64, int64, u64_2, f64_2, int64, int64, int64), cache=True, nogil=True)
def _merge_bins(rows_i, rows_f, slot, word, values, values_f, a, row, most):
    used, other_used, begin = rows_i[slot, word], np.int64(values[a, row]), word + 1
    merged = np.empty(2 * (used + other_used), np.float64)
    left = right = total = 0
    while left < used or right < other_used:
        if right == other_used or (left < used and rows_f[slot, begin + 2 * left] <= values_f[a + 1 + 2 * right, row]):
            center, height = rows_f[slot, begin + 2 * left], rows_f[slot, begin + 2 * left + 1]
            left += 1
        else:
            center, height = values_f[a + 1 + 2 * right, row], values_f[a + 2 + 2 * right, row]
            right += 1
        if total > 0 and merged[2 * total - 2] == center:
            merged[2 * total - 1] += height
        else:
            merged[2 * total], merged[2 * total + 1] = center, height
            total += 1
    _trim(merged, total, most)
    rows_i[slot, word] = min(total, most)
    for at in range(2 * rows_i[slot, word]):
        rows_f[slot, begin + at] = merged[at]


@njit(
    void(int64, u64_2, i64_2, f64_2, int64, int64, u64_2, f64_2, int64, int64, int64),
    cache=True, nogil=True,
)  # fmt: skip
def sketch_step(code, rows, rows_i, rows_f, slot, word, values, values_f, a, row, extra):
    """Move a sketch by a row; ``extra`` is its number of words, and above 32 bits its option."""
    words, further = extra & np.int64(0xFFFFFFFF), extra >> 32
    if code == OpCode.COUNT_LONG or code == OpCode.COUNT_HASHES:
        _count(code, rows_i, slot, word, values[a, row], words, further)
    elif code == OpCode.MERGE_COUNTS:  # the factors between the total and the table stay
        rows[slot, word] += values[a, row]
        for number in range(1 + further, words):
            rows[slot, word + number] += values[a + number, row]
    elif code == OpCode.ADD_TO_BINS:
        value = values_f[a, row] if further else np.float64(np.int64(values[a, row]))
        _add_to_bins(rows_i, rows_f, slot, word, value, (words - 1) // 2 - 1)
    elif code == OpCode.MERGE_BINS:
        _merge_bins(rows_i, rows_f, slot, word, values, values_f, a, row, (words - 1) // 2 - 1)
    else:
        raise ValueError("no sketch has a step of this code")

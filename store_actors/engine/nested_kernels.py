"""Compiled comparison of arrays and structs by their bytes (``nested.py``), in Spark's order.

Structs compare field by field, arrays element by element and then by length; a null is smaller than any value, NaN larger than any
number and equal to itself, -0.0 is 0.0. Maps have no order.

What the bytes mean is told by lines of a table of constants, one for each part of the type from the outside to the inside: how many
parts it has with itself, and in the last three bits what it is (0 integer, 1 float, 2 string, 3 list, 4 struct); and a number: bytes of
a value of one size, or fields of a struct. ``nested.parts_of`` makes them.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import float64, int64, uint8

__all__ = ["compare_nested"]

i64_1, i64_2, u8_1 = int64[::1], int64[:, ::1], uint8[::1]


@njit(int64(u8_1, int64, int64), cache=True, nogil=True)
def _integer(arena, at, size):
    """A signed integer of so many bytes, the lowest first."""
    value = np.int64(0)
    for byte in range(size):
        value |= np.int64(arena[at + byte]) << np.int64(8 * byte)
    spare = np.int64(64 - 8 * size)
    return (value << spare) >> spare


@njit(int64(float64, float64), cache=True, nogil=True)
def _compare_floats(one, other):
    if one == other or (np.isnan(one) and np.isnan(other)):
        return 0
    return -1 if one < other or np.isnan(other) else 1


@njit(int64(u8_1, int64, int64, int64), cache=True, nogil=True)
def _compare_integers(arena, a, b, size):
    """Signed integers of up to 16 bytes, the lowest first."""
    for word in range((size - 1) // 8, -1, -1):
        width = min(size, 8)
        x, y = _integer(arena, a + 8 * word, width), _integer(arena, b + 8 * word, width)
        if x != y:
            is_highest = word == (size - 1) // 8
            return -1 if (x < y if is_highest else np.uint64(x) < np.uint64(y)) else 1
    return 0


@njit(int64(u8_1, int64, int64, int64, int64, int64), cache=True, nogil=True)
def _compare_values(arena, kind, a, b, length, other_length):
    """Values of atomic types: integers, floats (both of `length` bytes) or strings."""
    if kind == 0:  # INTEGER
        return _compare_integers(arena, a, b, length)
    if kind == 1:  # FLOAT
        if length == 4:
            return _compare_floats(
                np.float64(np.int32(_integer(arena, a, 4)).view(np.float32)),
                np.float64(np.int32(_integer(arena, b, 4)).view(np.float32)),
            )
        return _compare_floats(
            np.int64(_integer(arena, a, 8)).view(np.float64), np.int64(_integer(arena, b, 8)).view(np.float64)
        )
    for byte in range(min(length, other_length)):
        if arena[a + byte] != arena[b + byte]:
            return -1 if arena[a + byte] < arena[b + byte] else 1
    return np.sign(length - other_length)


@njit(void(u8_1, int64, i64_2, int64, i64_1, i64_1), cache=True, nogil=True)
def _locate(arena, at, parts, begin, counts, places):
    """Where the sections of each part of a value begin, and how many elements these have."""
    counts[0] = 1
    for part in range(counts.shape[0]):
        kind, number = parts[begin + part, 0] & 7, parts[begin + part, 1]
        count = counts[part]
        places[part] = at
        at += count
        if kind == 4:  # STRUCT
            child = part + 1
            for _ in range(number):
                counts[child] = count
                child += parts[begin + child, 0] >> 3
        elif kind >= 2:  # TEXT, LIST
            total = 0
            for element in range(count):
                total += _integer(arena, at + 4 * element, 4)
            at += 4 * count
            if kind == 2:
                at += total
            else:
                counts[part + 1] = total
        else:
            at += count * number


@njit(
    int64(u8_1, i64_2, int64, int64, int64, i64_1, i64_1, i64_1, i64_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _compare(arena, parts, begin, part, element, counts, places, other_counts, other_places, passed):
    """An element of a part of two values, all parts of which are equal before it.

    So elements stand at the same places in both, and ``passed`` tells for both how much of a part's strings, or elements, was seen.
    """
    a, b = places[part], other_places[part]
    if arena[a + element] != arena[b + element]:
        return -1 if arena[a + element] == 0 else 1
    if arena[a + element] == 0:
        return 0
    kind, number = parts[begin + part, 0] & 7, parts[begin + part, 1]
    a, b = a + counts[part], b + other_counts[part]
    if kind == 4:  # STRUCT
        child = part + 1
        for _ in range(number):
            found = _compare(arena, parts, begin, child, element, counts, places, other_counts, other_places, passed)
            if found != 0:
                return found
            child += parts[begin + child, 0] >> 3
        return 0
    if kind < 2:
        return _compare_values(arena, kind, a + element * number, b + element * number, number, number)
    length, other_length = _integer(arena, a + 4 * element, 4), _integer(arena, b + 4 * element, 4)
    before = passed[part]
    passed[part] += length
    if kind == 2:  # TEXT
        a, b = a + 4 * counts[part] + before, b + 4 * other_counts[part] + before
        return _compare_values(arena, kind, a, b, length, other_length)
    for step in range(min(length, other_length)):
        found = _compare(
            arena, parts, begin, part + 1, before + step, counts, places, other_counts, other_places, passed
        )
        if found != 0:
            return found
    return np.sign(length - other_length)


@njit(int64(u8_1, i64_1, int64, int64, i64_2, int64), cache=True, nogil=True)
def compare_nested(arena, offsets, left, right, parts, begin):
    """Negative, 0 or positive, as the value `left` is smaller than `right`, equal or larger; what they are, ``parts[begin:]`` tells."""
    if left == right:
        return 0
    size = parts[begin, 0] >> 3
    places = np.zeros((5, size), np.int64)
    _locate(arena, offsets[left], parts, begin, places[0], places[1])
    _locate(arena, offsets[right], parts, begin, places[2], places[3])
    return _compare(arena, parts, begin, 0, 0, places[0], places[1], places[2], places[3], places[4])

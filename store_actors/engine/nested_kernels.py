"""Compiled comparison of arrays and structs by their bytes (``words.py``), in Spark's order.

Structs compare field by field, arrays element by element and then by length; a null is smaller than any value, NaN larger than any
number and equal to itself, -0.0 is 0.0. Maps have no order.

A table of constants describes the bytes. It has a line for each part of the type, from the outside to the inside. The first number
of a line has the kind of the part (:class:`PartKind`) in its last three bits, and above them the number of parts in it, itself
included. The second number is the size of a value in bytes, or the number of fields of a struct. ``words.parts_of`` makes the lines.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit, void
from numba.types import float64, int64, uint8

i64_1, i64_2, u8_1 = int64[::1], int64[:, ::1], uint8[::1]


class PartKind(IntEnum):
    """Kinds of parts, each compared by its name here. One that is not known raises ValueError when a value is compared."""

    INTEGER = 0
    FLOAT = 1
    TEXT = 2
    LIST = 3
    STRUCT = 4


@njit(int64(u8_1, int64, int64), cache=True, nogil=True)
def _integer(arena, at, size):
    """Return the signed integer in `size` bytes, the lowest first."""
    value = np.int64(0)
    for byte in range(size):
        value |= np.int64(arena[at + byte]) << np.int64(8 * byte)
    spare = np.int64(64 - 8 * size)
    return (value << spare) >> spare


@njit(int64(float64, float64), cache=True, nogil=True)
def _compare_floats(x, y):
    if x == y or (np.isnan(x) and np.isnan(y)):
        return 0
    return -1 if x < y or np.isnan(y) else 1


@njit(int64(u8_1, int64, int64, int64), cache=True, nogil=True)
def _compare_integers(arena, a, b, size):
    """Compare signed integers of up to 16 bytes, the lowest first."""
    for word in range((size - 1) // 8, -1, -1):
        width = min(size, 8)
        x, y = _integer(arena, a + 8 * word, width), _integer(arena, b + 8 * word, width)
        if x != y:
            is_highest = word == (size - 1) // 8
            return -1 if (x < y if is_highest else np.uint64(x) < np.uint64(y)) else 1
    return 0


@njit(int64(u8_1, int64, int64, int64, int64, int64), cache=True, nogil=True)
def _compare_values(arena, kind, a, b, length, other_length):
    """Compare values of an atomic type: integers, floats (both of `length` bytes) or strings."""
    if kind == PartKind.INTEGER:
        return _compare_integers(arena, a, b, length)
    if kind == PartKind.FLOAT:
        if length == 4:
            return _compare_floats(
                np.float64(np.int32(_integer(arena, a, 4)).view(np.float32)),
                np.float64(np.int32(_integer(arena, b, 4)).view(np.float32)),
            )
        return _compare_floats(
            np.int64(_integer(arena, a, 8)).view(np.float64), np.int64(_integer(arena, b, 8)).view(np.float64)
        )
    if kind != PartKind.TEXT:
        raise ValueError("no atomic value has this kind")
    for byte in range(min(length, other_length)):
        if arena[a + byte] != arena[b + byte]:
            return -1 if arena[a + byte] < arena[b + byte] else 1
    return np.sign(length - other_length)


@njit(void(u8_1, int64, i64_2, int64, i64_1, i64_1), cache=True, nogil=True)
def _locate(arena, at, parts, begin, counts, section_begins):
    """Write where the sections of each part of a value begin, and the number of their elements."""
    counts[0] = 1
    for part in range(counts.shape[0]):
        kind, number = parts[begin + part, 0] & 7, parts[begin + part, 1]
        count = counts[part]
        section_begins[part] = at
        at += count
        if kind == PartKind.STRUCT:
            child = part + 1
            for _ in range(number):
                counts[child] = count
                child += parts[begin + child, 0] >> 3
        elif kind == PartKind.TEXT or kind == PartKind.LIST:
            total = 0
            for element in range(count):
                total += _integer(arena, at + 4 * element, 4)
            at += 4 * count
            if kind == PartKind.TEXT:
                at += total
            else:
                counts[part + 1] = total
        elif kind == PartKind.INTEGER or kind == PartKind.FLOAT:
            at += count * number
        else:
            raise ValueError("no part of a type has this kind")


@njit(
    int64(u8_1, i64_2, int64, int64, int64, i64_1, i64_1, i64_1, i64_1, i64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _compare(arena, parts, begin, part, element, counts, section_begins, other_counts, other_section_begins, passed):
    """Compare one element of a part of two values that are equal in all that comes before it.

    The element has the same index in both values. ``passed`` counts, for each part, the bytes of strings or the elements of lists that
    were compared; it is the same in both values.
    """
    a, b = section_begins[part], other_section_begins[part]
    if arena[a + element] != arena[b + element]:
        return -1 if arena[a + element] == 0 else 1
    if arena[a + element] == 0:
        return 0
    kind, number = parts[begin + part, 0] & 7, parts[begin + part, 1]
    a, b = a + counts[part], b + other_counts[part]
    if kind == PartKind.STRUCT:
        child = part + 1
        for _ in range(number):
            order = _compare(
                arena, parts, begin, child, element, counts, section_begins, other_counts, other_section_begins, passed
            )
            if order != 0:
                return order
            child += parts[begin + child, 0] >> 3
        return 0
    if kind == PartKind.INTEGER or kind == PartKind.FLOAT:
        return _compare_values(arena, kind, a + element * number, b + element * number, number, number)
    length, other_length = _integer(arena, a + 4 * element, 4), _integer(arena, b + 4 * element, 4)
    before = passed[part]
    passed[part] += length
    if kind == PartKind.TEXT:
        a, b = a + 4 * counts[part] + before, b + 4 * other_counts[part] + before
        return _compare_values(arena, kind, a, b, length, other_length)
    if kind != PartKind.LIST:
        raise ValueError("no part of a type has this kind")
    for step in range(min(length, other_length)):
        order = _compare(
            arena,
            parts,
            begin,
            part + 1,
            before + step,
            counts,
            section_begins,
            other_counts,
            other_section_begins,
            passed,
        )
        if order != 0:
            return order
    return np.sign(length - other_length)


@njit(int64(u8_1, i64_1, int64, int64, i64_2, int64), cache=True, nogil=True)
def compare_nested(arena, offsets, left, right, parts, begin):
    """Return a negative number, 0 or a positive one, as the value `left` is smaller than `right`, equal or larger.

    ``parts[begin:]`` describes their type. A part of an unknown kind raises ValueError.
    """
    if left == right:
        return 0
    size = parts[begin, 0] >> 3
    sections = np.zeros((5, size), np.int64)
    _locate(arena, offsets[left], parts, begin, sections[0], sections[1])
    _locate(arena, offsets[right], parts, begin, sections[2], sections[3])
    return _compare(arena, parts, begin, 0, 0, sections[0], sections[1], sections[2], sections[3], sections[4])

"""Compiled loops over rows in Spark's binary format that have strings: see :mod:`store_actors.engine.unsafe_rows`."""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import boolean, int64, uint8, uint64

from store_actors.engine.machine_kernels import copy_bytes, load_word, store_word

_WORD = 8
_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
u8_1, u64_1, u64_2, i64_1 = uint8[::1], uint64[::1], uint64[:, ::1], int64[::1]


@njit(int64(u8_1, int64, i64_1), cache=True, nogil=True)
def find_rows(block, least, out):
    """Find where rows begin that each follow their size, which is at least ``least``; return how many, or -1 if a size is none."""
    position = count = 0
    while position < block.shape[0]:
        if position + _WORD > block.shape[0] or count == out.shape[0]:
            return -1
        size = np.int64(load_word(block, position))
        position += _WORD
        if size < least or size > block.shape[0] - position:
            return -1
        out[count] = position
        count += 1
        position += size
    return count


@njit(void(u8_1, i64_1, u64_2), cache=True, nogil=True)
def read_words(block, begins, out):
    """Read the first words of rows."""
    for row in range(begins.shape[0]):
        for word in range(out.shape[1]):
            out[row, word] = load_word(block, begins[row] + word * _WORD)


@njit(boolean(u8_1, i64_1, u64_1, i64_1, u8_1), cache=True, nogil=True)
def copy_texts(block, begins, words, ends, out):
    """Copy the strings of a column to where ``ends`` (n + 1) says; return whether all are inside the block.

    ``words`` has the distance of each string from the begin of its row in its upper half, and the length in its lower half.
    """
    for row in range(begins.shape[0]):
        begin, length = begins[row] + np.int64(words[row] >> _S32), np.int64(words[row] & _LOW32)
        if begin + length > block.shape[0]:
            return False
        copy_bytes(block, begin, length, out, ends[row])
    return True


@njit(void(u64_2, i64_1, i64_1, u8_1), cache=True, nogil=True)
def write_words(words, begins, sizes, out):
    """Write the size of each row before its begin, and its first words there."""
    for row in range(words.shape[0]):
        store_word(out, begins[row] - _WORD, np.uint64(sizes[row]))
        for word in range(words.shape[1]):
            store_word(out, begins[row] + word * _WORD, words[row, word])


@njit(void(u8_1, i64_1, u64_1, i64_1, u8_1), cache=True, nogil=True)
def put_texts(data, ends, words, begins, out):
    """Copy the strings of a column to where ``words`` (as of :func:`copy_texts`) say in their rows."""
    for row in range(begins.shape[0]):
        copy_bytes(data, ends[row], np.int64(words[row] & _LOW32), out, begins[row] + np.int64(words[row] >> _S32))

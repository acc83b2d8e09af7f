"""Compiled loops of the pool of strings: give strings their ids, measure them, copy them out."""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, int64, uint8, uint64

from store_actors.engine.hash_kernels import hash_string
from store_actors.engine.index_kernels import find_tag, home, next_position
from store_actors.engine.machine_kernels import copy_bytes, prefetch, same_bytes

_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_ZERO = np.uint64(0)
#: Strings whose cache lines are loaded at once.
_BLOCK = 128
u64_1, i64_1, u8_1 = uint64[::1], int64[::1], uint8[::1]


@njit(void(u8_1, i64_1, int64, int64, u64_1, u64_1, u8_1, i64_1, u64_1, u64_1), cache=True, nogil=True)
def _tag_block(data, ends, first, last, secret, index, arena, offsets, tags, buckets):
    """Put the tags of the strings ``first..last`` into ``tags``, where look-ups begin into ``buckets``, and prefetch the rest."""
    for row in range(first, last):
        tag = hash_string(data, ends[row], ends[row + 1], secret)
        tags[row - first] = tag
        prefetch(index, np.int64(home(tag, index)))
    for row in range(first, last):
        bucket = find_tag(index, tags[row - first])
        buckets[row - first] = bucket
        entry = index[bucket]
        if entry != _ZERO:
            prefetch(offsets, np.int64(entry & _LOW32) - 1)
    for row in range(first, last):
        entry = index[buckets[row - first]]
        if entry != _ZERO:
            candidate = np.int64(entry & _LOW32) - 1
            begin, end = offsets[candidate], offsets[candidate + 1]
            prefetch(arena, begin)
            prefetch(arena, max(begin, end - 1))


@njit(
    Tuple((int64, uint64))(u8_1, int64, int64, uint64, uint64, u64_1, u8_1, i64_1),
    cache=True, nogil=True, inline="always",
)  # fmt: skip
def _look_up(data, begin, end, tag, bucket, index, arena, offsets):
    """Look for the string ``data[begin:end]``, which has a tag, in the index from a place on.

    Returns
    -------
    tuple
        (its id, or -1; place in the index where it is, or where it belongs)
    """
    while index[bucket] != _ZERO:
        if index[bucket] >> _S32 == tag:
            candidate = np.int64(index[bucket] & _LOW32) - 1
            stored, length = offsets[candidate], offsets[candidate + 1] - offsets[candidate]
            if length == end - begin and same_bytes(arena, stored, data, begin, length):
                return candidate, bucket
        bucket = next_position(bucket, index)
    return np.int64(-1), bucket


@njit(
    Tuple((int64, int64, int64))(
        u8_1, i64_1, u8_1, int64, u64_1, u64_1, u8_1, i64_1, int64, int64, int64, boolean, u64_1
    ),
    cache=True, nogil=True,
)  # fmt: skip
def intern(data, ends, valid, start, secret, index, arena, offsets, count, used, index_room, takes_in, out):
    """Give each string its id: that of an equal string already in the arena, or the next one; if not ``takes_in``, one of no string.

    ``ends`` are the n + 1 offsets into ``data``. Stops early when the arena, the offsets or the index are full.

    Returns
    -------
    tuple
        (first row not done, strings in the arena, bytes in the arena)
    """
    room = index_room
    tags, buckets = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    for block in range(start, valid.shape[0], _BLOCK):
        stop = min(block + _BLOCK, valid.shape[0])
        _tag_block(data, ends, block, stop, secret, index, arena, offsets, tags, buckets)
        for row in range(block, stop):
            if valid[row] == 0:
                out[row] = _ZERO
                continue
            begin, end, tag = ends[row], ends[row + 1], tags[row - block]
            string_id, bucket = _look_up(data, begin, end, tag, buckets[row - block], index, arena, offsets)
            if string_id < 0 and takes_in:
                if room <= 0 or count + 1 >= offsets.shape[0] or used + (end - begin) > arena.shape[0]:
                    return row, count, used
                copy_bytes(data, begin, end - begin, arena, used)
                used += end - begin
                index[bucket] = (tag << _S32) | np.uint64(count + 1)
                string_id = count
                count += 1
                offsets[count] = used
                room -= 1
            out[row] = np.uint64(string_id)
    return valid.shape[0], count, used


@njit(void(i64_1, i64_1, u8_1, i64_1), cache=True, nogil=True)
def measure(offsets, ids, valid, out):
    """Add the bytes of strings to ``out``."""
    for row in range(ids.shape[0]):
        if valid[row] != 0:
            out[row] += offsets[ids[row] + 1] - offsets[ids[row]]


@njit(void(u8_1, i64_1, i64_1, u8_1, i64_1, u8_1), cache=True, nogil=True)
def gather(arena, offsets, ids, valid, ends, out):
    """Copy strings out to where ``ends`` (n + 1) says."""
    for block in range(0, ids.shape[0], _BLOCK):
        stop = min(block + _BLOCK, ids.shape[0])
        for row in range(block, stop):
            if valid[row] != 0:
                prefetch(offsets, ids[row])
        for row in range(block, stop):
            if valid[row] != 0:
                prefetch(arena, offsets[ids[row]])
                prefetch(arena, max(offsets[ids[row]], offsets[ids[row] + 1] - 1))
        for row in range(block, stop):
            if valid[row] != 0:
                begin = offsets[ids[row]]
                copy_bytes(arena, begin, offsets[ids[row] + 1] - begin, out, ends[row])

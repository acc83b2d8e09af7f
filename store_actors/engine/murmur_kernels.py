"""Compiled loops of Spark's ``hash``: Murmur3 x86_32 as Spark's ``Murmur3_x86_32`` has it, which takes in a tail byte by byte.

Each loop carries the hashes of rows on by a column: row ``i`` takes in the values ``begins[i] .. ends[i]`` that are not null, in order.
A plain column has one value a row, an array as many as it has elements.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Array, int32, int64, uint8, uint32, uint64

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_M1, _M2, _ADDED, _FIVE = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0xE6546B64), np.uint32(5)
_S13, _S15, _S16, _S17, _S19 = np.uint32(13), np.uint32(15), np.uint32(16), np.uint32(17), np.uint32(19)
_S32 = np.uint64(32)

u32_1 = uint32[::1]
#: Arrow's buffers are read-only.
i32_1, i64_1, u64_1, u8_1 = (Array(kind, 1, "C", readonly=True) for kind in (int32, int64, uint64, uint8))


@njit(uint32(uint32, uint32), cache=True, nogil=True, inline="always")
def _mixed(state, word):
    word = np.uint32(word * _C1)
    word = np.uint32(np.uint32(word << _S15) | (word >> _S17))
    state = np.uint32(state ^ np.uint32(word * _C2))
    state = np.uint32(np.uint32(state << _S13) | (state >> _S19))
    return np.uint32(np.uint32(state * _FIVE) + _ADDED)


@njit(uint32(uint32, uint32), cache=True, nogil=True, inline="always")
def _finished(state, length):
    state = np.uint32(state ^ length)
    state = np.uint32(np.uint32(state ^ (state >> _S16)) * _M1)
    state = np.uint32(np.uint32(state ^ (state >> _S13)) * _M2)
    return np.uint32(state ^ (state >> _S16))


@njit(void(u32_1, i64_1, i64_1, i32_1, u8_1), cache=True, nogil=True)
def hash_ints(hashes, begins, ends, values, valid):
    """Hash 32-bit values."""
    for row in range(len(hashes)):
        state = hashes[row]
        for at in range(begins[row], ends[row]):
            if valid[at]:
                state = _finished(_mixed(state, np.uint32(values[at])), np.uint32(4))
        hashes[row] = state


@njit(void(u32_1, i64_1, i64_1, u64_1, u8_1), cache=True, nogil=True)
def hash_longs(hashes, begins, ends, values, valid):
    """Hash 64-bit values."""
    for row in range(len(hashes)):
        state = hashes[row]
        for at in range(begins[row], ends[row]):
            if valid[at]:
                state = _mixed(_mixed(state, np.uint32(values[at])), np.uint32(values[at] >> _S32))
                state = _finished(state, np.uint32(8))
        hashes[row] = state


@njit(void(u32_1, i64_1, i64_1, i64_1, u8_1, u8_1), cache=True, nogil=True)
def hash_bytes(hashes, begins, ends, offsets, data, valid):
    """Hash strings and binaries: bytes ``offsets[at] .. offsets[at + 1]`` of ``data``."""
    for row in range(len(hashes)):
        state = hashes[row]
        for at in range(begins[row], ends[row]):
            if not valid[at]:
                continue
            begin, length = offsets[at], offsets[at + 1] - offsets[at]
            aligned = length - length % 4
            for byte in range(begin, begin + aligned, 4):
                word = np.uint32(data[byte]) | np.uint32(np.uint32(data[byte + 1]) << np.uint32(8))
                word |= np.uint32(np.uint32(data[byte + 2]) << np.uint32(16))
                word |= np.uint32(np.uint32(data[byte + 3]) << np.uint32(24))
                state = _mixed(state, np.uint32(word))
            for byte in range(begin + aligned, begin + length):
                # As Java's bytes, which have a sign.
                state = _mixed(state, np.uint32(np.int32(np.int8(data[byte]))))
            state = _finished(state, np.uint32(length))
        hashes[row] = state


@njit(void(u32_1, i64_1, i64_1, u8_1, u8_1), cache=True, nogil=True)
def hash_wide(hashes, begins, ends, data, valid):
    """Hash integers of 128 bits, little-endian in 16 bytes of ``data`` each.

    The hashed bytes are those of Java's ``BigInteger.toByteArray``: big-endian, no more than needed.
    """
    for row in range(len(hashes)):
        state = hashes[row]
        for at in range(begins[row], ends[row]):
            if not valid[at]:
                continue
            base, length = 16 * at, 16
            sign = np.uint8(255) if data[base + 15] & 128 else np.uint8(0)
            while length > 1 and data[base + length - 1] == sign and (data[base + length - 2] ^ sign) & 128 == 0:
                length -= 1
            aligned = length - length % 4
            top = base + length - 1
            for byte in range(0, aligned, 4):
                word = np.uint32(data[top - byte]) | np.uint32(np.uint32(data[top - byte - 1]) << np.uint32(8))
                word |= np.uint32(np.uint32(data[top - byte - 2]) << np.uint32(16))
                word |= np.uint32(np.uint32(data[top - byte - 3]) << np.uint32(24))
                state = _mixed(state, np.uint32(word))
            for byte in range(aligned, length):
                state = _mixed(state, np.uint32(np.int32(np.int8(data[top - byte]))))
            state = _finished(state, np.uint32(length))
        hashes[row] = state

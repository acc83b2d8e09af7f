"""Hashing under a secret: who does not know it cannot choose keys, strings or elements that meet in an index.

A producer of rows chooses the keys of a state. Under a public hash it can choose many with one hash, and each then costs a walk
past all others. The functions here are drawn by the secret from families in which *any* two different values meet with a known, small
chance, so no choice of values helps:

- Rows of words: pair-multiply-shift (Thorup, "High Speed Hashing for Integers and Strings"): the two halves of each word are added to
  two secret words and multiplied, one multiplication a word; the upper half of the sum is the hash. Two rows meet with 2**-32.
- Strings: a polynomial of their 7-byte pieces at a secret point, modulo the prime 2**61 - 1, then as one word. Two strings of `n` bytes
  meet with 2**-32 + n * 2**-63.

A last step, known and reversible, scatters hashes that follow each other (those of ascending ids may), which linear probing needs.

Nothing that is stored or sent depends on the secret, so each process may have another one.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numba import njit
from numba.types import int64, uint8, uint64

from store_actors.engine.arrays import Words
from store_actors.engine.machine_kernels import load_word, upper_product

#: Secret words of :func:`hash_element` and of :func:`hash_string`.
ELEMENT_SECRETS = 5
STRING_SECRETS = 4

_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_PRIME = np.uint64(2**61 - 1)
_S61 = np.uint64(61)
_S3 = np.uint64(3)
_ZERO = np.uint64(0)
#: Bytes of a string that make one coefficient: less than the prime.
_PIECE = 7
_PIECE_MASK = np.uint64(2**56 - 1)
_WORD = 8

u64_1, u64_2, u8_1 = uint64[::1], uint64[:, ::1], uint8[::1]


def secret_words(seed: int, use: str, count: int) -> Words:
    """Return `count` secret words, which cannot be told from random ones without the seed.

    Parameters
    ----------
    seed
        128 bits.
    use
        Their purpose: each use gets other words.
    """
    drawn = hashlib.shake_256(use.encode() + b"\0" + seed.to_bytes(16, "little")).digest(8 * count)
    return np.frombuffer(drawn, np.uint64).copy()


def row_secrets(key_words: int) -> int:
    """Return the number of secret words of :func:`hash_row` for rows with `key_words` key words."""
    return 2 + 2 * key_words


@njit(uint64(uint64), cache=True, nogil=True, inline="always")
def _scattered(value):
    # MurmurHash3's 32-bit finaliser: each hash goes to another one, so no two meet that did not before.
    value ^= value >> np.uint64(16)
    value = (value * np.uint64(0x85EBCA6B)) & _LOW32
    value ^= value >> np.uint64(13)
    value = (value * np.uint64(0xC2B2AE35)) & _LOW32
    return value ^ (value >> np.uint64(16))


@njit(uint64(u64_2, int64, int64, int64, uint64, u64_1), cache=True, nogil=True, inline="always")
def hash_row(words, row, first, count, nulls, secret):
    """Return the 32-bit hash of the words ``first .. first + count`` of a row, and of up to 32 null bits."""
    total = secret[0] + secret[1] * nulls
    for number in range(count):
        word = words[row, first + number]
        total += (secret[2 + 2 * number] + (word & _LOW32)) * (secret[3 + 2 * number] + (word >> _S32))
    return _scattered(total >> _S32)


@njit(uint64(uint64, uint64, int64, u64_1), cache=True, nogil=True, inline="always")
def hash_element(low, high, width, secret):
    """Return the 32-bit hash of one word, or (``width`` 2) of two."""
    total = secret[0] + (secret[1] + (low & _LOW32)) * (secret[2] + (low >> _S32))
    if width == 2:
        total += (secret[3] + (high & _LOW32)) * (secret[4] + (high >> _S32))
    return _scattered(total >> _S32)


@njit(uint64(u8_1, int64, int64, u64_1), cache=True, nogil=True)
def hash_string(data, begin, end, secret):
    """Return the 32-bit hash of the bytes ``begin .. end``."""
    point = secret[0] & _PRIME
    # The length comes first: of two strings that differ in zeros at their ends only, the pieces are the same.
    total = np.uint64(end - begin)
    position = begin
    while position < end:
        stop = min(position + _PIECE, end)
        if position + _WORD <= end:
            piece = load_word(data, position) & _PIECE_MASK
        else:
            piece, shift = _ZERO, _ZERO
            for at in range(position, stop):
                piece |= np.uint64(data[at]) << shift
                shift += np.uint64(8)
        position = stop
        factor = total + piece
        upper, lower = upper_product(factor, point), factor * point
        # 2**61 is 1 modulo the prime.
        total = (lower & _PRIME) + ((upper << _S3) | (lower >> _S61))
        total = (total & _PRIME) + (total >> _S61)
    while total >= _PRIME:
        total -= _PRIME
    mixed = secret[1] + (secret[2] + (total & _LOW32)) * (secret[3] + (total >> _S32))
    return _scattered(mixed >> _S32)

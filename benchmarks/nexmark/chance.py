"""Randomness by counter: what an event draws depends on the seed, the draw and the event's number, and on nothing before it.

The words are those of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): an
increment by an odd constant for each number, and a mixing function. Only integer arithmetic and correctly rounded float
operations are used, so every machine and every version of NumPy makes the same data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_INCREMENT: Final = 0x9E3779B97F4A7C15
_MIXERS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT: Final = 31
_MASK: Final = 2**64 - 1
_LETTERS: Final = 26
_DIGITS: Final = 10
_POOL_LETTERS: Final = 2**20
_TABLE_BITS: Final = 11
_TABLES: Final = 3
#: Bits of a word that :func:`log_uniform` uses.
LOG_UNIFORM_BITS: Final = _TABLE_BITS * _TABLES


def _mix(value: int) -> int:
    for shift, factor in _MIXERS:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> _LAST_SHIFT)


def draw(seed: int, field: int, numbers: Ints) -> Words:
    """Return a random word for each event number. Draws of another `field` are independent."""
    start = _mix(_mix(seed & _MASK) + field & _MASK)
    words: Words = numbers.astype(np.uint64)
    words *= np.uint64(_INCREMENT)
    words += np.uint64(start)
    spare = np.empty_like(words)
    for shift, factor in _MIXERS:
        np.right_shift(words, np.uint64(shift), out=spare)
        words ^= spare
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(_LAST_SHIFT), out=spare)
    words ^= spare
    return words


def below(words: Words, bound: int | Ints) -> Ints:
    """Return uniform integers in [0, bound), 0 < bound < 2**32, from the upper halves of words; the lower halves stay free to use."""
    high = words >> np.uint64(32)
    high *= bound.astype(np.uint64) if isinstance(bound, np.ndarray) else np.uint64(bound)
    high >>= np.uint64(32)
    return high.view(np.int64)


@cache
def _power_tables(largest: float) -> tuple[npt.NDArray[np.float64], ...]:
    """Return tables of `largest` to the power of each group of `_TABLE_BITS` binary digits after the point, highest digits first."""
    tables, root = [], largest
    for _ in range(_TABLES):
        table = np.ones(1)
        # The first root belongs to the group's highest digit, which is the outermost of the index.
        for _ in range(_TABLE_BITS):
            root = math.sqrt(root)
            table = (table[:, None] * np.array([1.0, root])).ravel()
        tables.append(table)
    return tuple(tables)


def log_uniform(words: Words, largest: float) -> npt.NDArray[np.float64]:
    """Return `largest` to the power of a uniform number in [0, 1), by roots and products instead of a machine's `pow`."""
    digits = (words >> np.uint64(64 - LOG_UNIFORM_BITS)).view(np.int64)
    result = np.ones(len(words))
    for index, table in enumerate(_power_tables(largest)):
        shift = _TABLE_BITS * (_TABLES - 1 - index)
        result *= table.take((digits >> shift) & (2**_TABLE_BITS - 1))
    return result


def pick(choices: Sequence[str] | pa.Array, indices: Ints) -> pa.Array:
    strings = choices if isinstance(choices, pa.Array) else pa.array(choices, pa.string())
    return strings.take(pa.array(indices))


def _characters(random_bytes: npt.NDArray[np.uint8], alphabet: int, first: str) -> npt.NDArray[np.uint8]:
    scaled = (random_bytes.astype(np.uint16) * np.uint16(alphabet)) >> np.uint16(8)
    return scaled.astype(np.uint8) + np.uint8(ord(first))


def pattern_text(seed: int, field: int, numbers: Ints, pattern: str) -> pa.Array:
    """Return a text for each number: in the ASCII `pattern`, each ``*`` becomes a random letter and each ``#`` a random digit."""
    letters = [index for index, sign in enumerate(pattern) if sign == "*"]
    digits = [index for index, sign in enumerate(pattern) if sign == "#"]
    each = -(-(len(letters) + len(digits)) // 8)
    counters = (numbers[:, None] * each + np.arange(each)).ravel()
    random_bytes = draw(seed, field, counters).astype("<u8", copy=False).view(np.uint8).reshape(len(numbers), each * 8)
    text = np.tile(np.frombuffer(pattern.encode("ascii"), np.uint8), (len(numbers), 1))
    text[:, letters] = _characters(random_bytes[:, : len(letters)], _LETTERS, "a")
    text[:, digits] = _characters(random_bytes[:, len(letters) : len(letters) + len(digits)], _DIGITS, "0")
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(len(pattern))
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(text))


@cache
def _pool(seed: int, field: int) -> npt.NDArray[np.uint8]:
    """Return random letters to cut texts from: more than a compressor of Parquet pages looks back over."""
    words = draw(seed, field, np.arange(_POOL_LETTERS // 8)).astype("<u8", copy=False)
    return _characters(words.view(np.uint8), _LETTERS, "a")


def sliced_text(seed: int, field: int, numbers: Ints, shortest: int, longest: int) -> pa.Array:
    """Return texts of `shortest` to `longest` random letters, cut from a pool of about a million."""
    words = draw(seed, field, numbers)
    starts = below(words, _POOL_LETTERS - longest)
    low = words & np.uint64(2**32 - 1)
    lengths = shortest + ((low * np.uint64(longest - shortest + 1)) >> np.uint64(32)).view(np.int64)
    offsets = np.zeros(len(numbers) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    places = np.repeat(starts.astype(np.int32) - offsets[:-1], lengths)
    places += np.arange(offsets[-1], dtype=np.int32)
    text = _pool(seed, field).take(places)
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(text))

"""The allocator of a state's large arrays: the owner of the state chooses it, the engine only calls it.

Arrays that are as large as the state (rows, indexes, strings, lists, calendars, what versions overwrote) are made and grow here. By
default they are NumPy's; a store actor with a memory limit gives arrays that lie in files (:mod:`store_actors.spilling`). What a batch
needs for itself is not part of the state, and is NumPy's anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from store_actors.engine.arrays import Words
from store_actors.engine.index_kernels import grow_index
from store_actors.engine.pieces import PIECE_BYTES

#: Bytes of an array that are as much as one place of a step, when they are looked at one after the other.
_PIECE_OF_A_STEP = 1 << 16
_CACHE_LINE = 64
Item = TypeVar("Item", bound=np.generic)
Shape = int | tuple[int, ...]
#: How full an index may be: beyond that linear probing gets slow.
_FULL = 0.85
#: An index doubles below this size. Then it grows by a quarter: it is 0.77 full on average, and each entry was moved four times.
_LARGE = 1 << 16


class Memory:
    """The allocator of arrays; this one takes them from the process, as NumPy does. If it raises, existing arrays stay as they are."""

    #: Bytes of Arrow data that are read or made at once, in all columns together.
    piece_bytes = PIECE_BYTES
    #: Bytes of words, and then of Arrow data, in a piece of a snapshot.
    snapshot_bytes = 1 << 25
    #: Whether it pays to put what is looked at in order first: arrays may be in files, a page of 4 KiB at a time.
    is_slow_at_random = False

    def zeros(self, shape: Shape, dtype: type[Item]) -> npt.NDArray[Item]:
        """Return an array of zeros, in C order."""
        # NumPy's arrays begin anywhere: rows of a cache line, or of half of one, would lie in two.
        size = prod((shape,) if isinstance(shape, int) else shape) * np.dtype(dtype).itemsize
        memory = np.zeros(size + _CACHE_LINE, np.uint8)
        begin = -memory.ctypes.data % _CACHE_LINE
        return memory[begin : begin + size].view(dtype).reshape(shape)

    def larger(self, array: npt.NDArray[Item], used: int, length: int) -> npt.NDArray[Item]:
        """Return an array of `length` lines whose first `used` are those of an array from here; the others are anything.

        The old array may share its memory with the new one: its used lines can be read as long as anybody has it.
        """
        # What is spare is not touched, so that it takes no memory yet.
        larger = self.zeros((length, *array.shape[1:]), array.dtype.type)
        larger[:used] = array[:used]
        return larger

    def copied(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        """Return a copy that shares nothing."""
        return array.copy()

    def step(self, count: int) -> int:
        """Return how many of `count` random accesses to its arrays are allowed before the next call; at least one."""
        return count

    def check(self, more: int) -> None:
        """Refuse, by an error, to go on where a batch needs `more` bytes for itself, and there are fewer."""

    def kept(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        """Return an array that is seldom looked at from now on, or a copy in its place; it need not be from here."""
        return array


def steps(memory: Memory, size: int) -> Iterator[slice]:
    """Yield all of `size` places, in pieces of :meth:`Memory.step`."""
    begin = 0
    while begin < size:
        end = begin + memory.step(size - begin)
        yield slice(begin, end)
        begin = end


def blocks(memory: Memory, rows: npt.NDArray[Item]) -> Iterator[slice]:
    """Yield all lines of an array, in pieces of about :attr:`Memory.piece_bytes`, one after the other."""
    size = max(1, memory.piece_bytes // max(1, rows.strides[0]))
    for begin in range(0, len(rows), size):
        memory.step(max(1, memory.piece_bytes // _PIECE_OF_A_STEP))
        yield slice(begin, min(begin + size, len(rows)))


HEAP = Memory()


def index_room(index: Words) -> int:
    """Return the number of keys that an index takes."""
    return int(len(index) * _FULL)


def new_index(memory: Memory, keys: int) -> Words:
    """Return an empty index for `keys` keys."""
    return memory.zeros(int(keys / _FULL) + 2, np.uint64)


def larger_index(memory: Memory, index: Words, keys: int) -> Words:
    """Return an index for more keys than a full one takes, for `keys` at least, with all of its entries."""
    room = index_room(index)
    larger = new_index(memory, max(keys, room + (room if len(index) < _LARGE else room // 4)))
    # In order on both sides: home positions are in the order of tags.
    for block in blocks(memory, index):
        grow_index(index[block], larger)
    return larger

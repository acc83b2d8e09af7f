"""The allocator of a state's large arrays: the owner of the state chooses it, the engine only calls it.

Arrays that are as large as the state (rows, indexes, strings, lists, calendars, what versions overwrote) are made and grow here. By
default they are NumPy's; a store actor with a memory limit gives arrays that lie in files (:mod:`store_actors.spilling`). What a batch
needs for itself is not part of the state, and is NumPy's anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from store_actors.engine.pieces import PIECE_BYTES

#: Bytes of an array that are as much as one place of a step, when they are looked at one after the other.
_PIECE_OF_A_STEP = 1 << 16
_CACHE_LINE = 64
Item = TypeVar("Item", bound=np.generic)
Shape = int | tuple[int, ...]


class Memory(Protocol):
    """The allocator of arrays. If it raises, the existing arrays stay as they are.

    Attributes
    ----------
    piece_bytes
        Bytes of Arrow data that are read or made at once, in all columns together.
    snapshot_bytes
        Bytes of words, and then of Arrow data, in a piece of a snapshot.
    is_slow_at_random
        Whether it pays to put what is looked at in order first: arrays may be in files, a page of 4 KiB at a time.
    """

    piece_bytes: int
    snapshot_bytes: int
    is_slow_at_random: bool

    def zeros(self, shape: Shape, dtype: type[Item]) -> npt.NDArray[Item]:
        """Return an array of zeros, in C order."""

    def larger(self, array: npt.NDArray[Item], used: int, length: int) -> npt.NDArray[Item]:
        """Return an array of `length` lines whose first `used` are those of an array from here; the others are anything.

        The old array may share its memory with the new one: its used lines can be read as long as anybody has it.
        """

    def copied(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        """Return a copy that shares nothing."""

    def step(self, count: int) -> int:
        """Return how many of `count` random accesses to its arrays are allowed before the next call; at least one."""

    def check(self, more: int) -> None:
        """Refuse, by an error, to go on where a batch needs `more` bytes for itself, and there are fewer."""

    def kept(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        """Return an array that is seldom looked at from now on, or a copy in its place; it need not be from here."""


class _Heap:
    """Memory of the process, as NumPy takes it."""

    piece_bytes = PIECE_BYTES
    snapshot_bytes = 1 << 25
    is_slow_at_random = False

    def zeros(self, shape: Shape, dtype: type[Item]) -> npt.NDArray[Item]:
        # NumPy's arrays begin anywhere: rows of a cache line, or of half of one, would lie in two.
        size = prod((shape,) if isinstance(shape, int) else shape) * np.dtype(dtype).itemsize
        memory = np.zeros(size + _CACHE_LINE, np.uint8)
        begin = -memory.ctypes.data % _CACHE_LINE
        return memory[begin : begin + size].view(dtype).reshape(shape)

    def larger(self, array: npt.NDArray[Item], used: int, length: int) -> npt.NDArray[Item]:
        # What is spare is not touched, so that it takes no memory yet.
        larger = self.zeros((length, *array.shape[1:]), array.dtype.type)
        larger[:used] = array[:used]
        return larger

    def copied(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        return array.copy()

    def step(self, count: int) -> int:
        return count

    def check(self, more: int) -> None:
        pass

    def kept(self, array: npt.NDArray[Item]) -> npt.NDArray[Item]:
        return array


def steps(memory: Memory, size: int) -> Iterator[slice]:
    """Yield all of `size` places, in pieces of :meth:`Memory.step`."""
    begin = 0
    while begin < size:
        end = begin + memory.step(size - begin)
        yield slice(begin, end)
        begin = end


def blocks(memory: Memory, rows: npt.NDArray[Item], count: int | None = None) -> Iterator[slice]:
    """Yield all lines of an array (or the first `count`), in pieces of about :attr:`Memory.piece_bytes`, one after the other."""
    count = len(rows) if count is None else count
    size = max(1, memory.piece_bytes // max(1, rows.strides[0]))
    for begin in range(0, count, size):
        memory.step(max(1, memory.piece_bytes // _PIECE_OF_A_STEP))
        yield slice(begin, min(begin + size, count))


HEAP: Memory = _Heap()

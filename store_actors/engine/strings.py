"""Strings and binaries as 64-bit ids: each distinct value is stored once, so keys and states stay fixed-width words."""

from __future__ import annotations

import copy

import numpy as np

from store_actors.engine import string_kernels
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.hash_kernels import STRING_SECRETS, secret_words
from store_actors.engine.memory import HEAP, Memory, index_room, larger_index, new_index, steps

#: From this size on, in bytes, an arena grows by half: at most a third of it is spare.
_LARGE = 1 << 26


class StringPool:
    """Every distinct string or binary value of one table, addressed by id.

    Ids are dense and stay valid for the life of the pool; values are never removed one by one.
    """

    def __init__(self, seed: int = 0, memory: Memory = HEAP) -> None:
        self.seed = seed
        self.memory = memory
        self._secret: Words = secret_words(seed, "strings", STRING_SECRETS)
        self.arena: Bytes = memory.zeros(1 << 12, np.uint8)
        #: ``offsets[i] : offsets[i + 1]`` are the bytes of value ``i``.
        self.offsets: Slots = memory.zeros(1 << 8, np.int64)
        self._index: Words = new_index(memory, 1 << 8)
        self.count = 0
        #: Bytes of all values.
        self.used = 0
        #: Bytes of the longest value that it ever had.
        self.longest = 0
        #: Whether values that it does not have are taken in.
        self._takes_in = True

    @property
    def nbytes(self) -> int:
        """Memory of the pool, in bytes. Room to grow is not used yet, and takes none."""
        return self.used + 8 * self.count + self._index.nbytes

    def ids(self, data: Bytes, ends: Slots, valid: Bytes) -> Words:
        """Return the ids of n values given as Arrow data and n + 1 offsets; 0 where ``valid`` is 0."""
        out = np.empty(len(valid), np.uint64)
        row, before = 0, self.count
        while row < len(valid):
            room = index_room(self._index) - self.count
            end = row + self.memory.step(len(valid) - row)
            row, self.count, self.used = string_kernels.intern(
                data, ends, valid[:end], row, self._secret, self._index, self.arena, self.offsets, self.count, self.used, room,
                self._takes_in, out,
            )  # fmt: skip
            if row < end:
                self._grow(int(ends[row + 1] - ends[row]))
        if self.count > before:
            self.longest = max(self.longest, int(np.diff(self.offsets[before : self.count + 1]).max()))
        return out

    def looking(self) -> StringPool:
        """Return the pool as it is now, for lookups only: a value that it does not have gets an id that no value has."""
        lookup_pool = copy.copy(self)
        lookup_pool._takes_in = False
        return lookup_pool

    def _grow(self, needed: int) -> None:
        if self.count >= index_room(self._index):
            self._index = larger_index(self.memory, self._index, self.count + 1)
        if self.count + 2 >= len(self.offsets):
            spare = _spare(self.offsets.nbytes) // 8
            self.offsets = self.memory.larger(self.offsets, self.count + 1, len(self.offsets) + spare)
        if self.used + needed > len(self.arena):
            size = max(len(self.arena) + _spare(len(self.arena)), self.used + needed)
            self.arena = self.memory.larger(self.arena, self.used, size)

    def reserve(self, count: int, size: int) -> None:
        """Make room for `count` values of together `size` bytes."""
        if count + 2 > len(self.offsets):
            self.offsets = self.memory.larger(self.offsets, self.count + 1, count + 2)
        if size > len(self.arena):
            self.arena = self.memory.larger(self.arena, self.used, size)
        if count > index_room(self._index):
            self._index = larger_index(self.memory, self._index, count)

    def measure(self, ids: Slots, valid: Bytes, out: Slots) -> None:
        """Add the bytes of the values with these ids to `out`; nothing where ``valid`` is 0."""
        for piece in steps(self.memory, len(ids)):
            string_kernels.measure(self.offsets, ids[piece], valid[piece], out[piece])

    def gather(self, ids: Slots, valid: Bytes) -> tuple[Slots, Bytes]:
        """Return the offsets (n + 1, in 64 bits) and data of the values with these ids; nothing where ``valid`` is 0."""
        ends = self.ends(ids, valid)
        return ends, self.copied(ids, valid, ends)

    def ends(self, ids: Slots, valid: Bytes) -> Slots:
        """Return the offsets of :meth:`gather`."""
        ends = np.zeros(len(ids) + 1, np.int64)
        self.measure(ids, valid, ends[1:])
        return np.cumsum(ends, out=ends)

    def copied(self, ids: Slots, valid: Bytes, ends: Slots) -> Bytes:
        """Return the data of :meth:`gather`."""
        out = np.empty(int(ends[-1]), np.uint8)
        for piece in steps(self.memory, len(ids)):
            string_kernels.gather(self.arena, self.offsets, ids[piece], valid[piece], ends[piece], out)
        return out


def _spare(size: int) -> int:
    return size if size < _LARGE else size // 2

"""Strings and binaries as 64-bit ids: each distinct value is stored once, so keys and states stay fixed-width words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.types import Tuple, int32, int64, uint8, uint64

from coordinator.errors import InvalidRequestError
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.hash_kernels import STRING_SECRETS, hash_string, secret_words
from store_actors.engine.kernels import grow_index, index_shift

__all__ = ["StringPool"]

_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
#: Arrow counts the bytes of a column in 32 bits.
_MOST_BYTES = 2**31 - 1
u64_1 = uint64[::1]
i64_1 = int64[::1]
u8_1 = uint8[::1]
i32_1 = int32[::1]


@njit(
    Tuple((int64, int64, int64))(u8_1, i64_1, u8_1, int64, u64_1, u64_1, u8_1, i64_1, int64, int64, int64, u64_1),
    cache=True, nogil=True,
)  # fmt: skip
def _intern(data, ends, valid, start, secret, index, arena, offsets, count, used, index_room, out):
    """Give each string its id: that of an equal string already in the arena, or the next one.

    ``ends`` are the n + 1 offsets into ``data``. Stops early when the arena, the offsets or the index are full.

    Returns
    -------
    tuple
        (first row not done, strings in the arena, bytes in the arena)
    """
    shift = index_shift(index.shape[0])
    mask = np.uint64(index.shape[0] - 1)
    room = index_room
    for row in range(start, valid.shape[0]):
        if valid[row] == 0:
            out[row] = _ZERO
            continue
        begin, end = ends[row], ends[row + 1]
        tag = hash_string(data, begin, end, secret)
        place = tag >> shift
        found = np.int64(-1)
        while index[place] != _ZERO:
            if index[place] >> _S32 == tag:
                candidate = np.int64(index[place] & _LOW32) - 1
                length = offsets[candidate + 1] - offsets[candidate]
                if length == end - begin:
                    same = True
                    for step in range(length):
                        if arena[offsets[candidate] + step] != data[begin + step]:
                            same = False
                            break
                    if same:
                        found = candidate
                        break
            place = (place + _ONE) & mask
        if found < 0:
            if room <= 0 or count + 1 >= offsets.shape[0] or used + (end - begin) > arena.shape[0]:
                return row, count, used
            for position in range(begin, end):
                arena[used] = data[position]
                used += 1
            index[place] = (tag << _S32) | np.uint64(count + 1)
            found = count
            count += 1
            offsets[count] = used
            room -= 1
        out[row] = np.uint64(found)
    return valid.shape[0], count, used


@njit(int64(u8_1, i64_1, i64_1, u8_1, i32_1, u8_1), cache=True, nogil=True)
def _gather(arena, offsets, ids, valid, ends, out):
    """Copy strings out as Arrow offsets and data; with an empty ``out`` only measures. Returns the bytes needed."""
    position = np.int64(0)
    write = out.shape[0] > 0
    for row in range(ids.shape[0]):
        if valid[row] != 0:
            begin, end = offsets[ids[row]], offsets[ids[row] + 1]
            if write:
                for source in range(begin, end):
                    out[position + source - begin] = arena[source]
            position += end - begin
        if write:
            ends[row + 1] = np.int32(position)
    return position


class StringPool:
    """Every distinct string or binary value of one table, addressed by id.

    Ids are dense and stay valid for the life of the pool; values are never removed one by one.

    Parameters
    ----------
    seed
        As :class:`~store_actors.engine.table.GroupTable`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._secret: Words = secret_words(seed, "strings", STRING_SECRETS)
        self.arena = np.zeros(1 << 12, np.uint8)
        #: ``offsets[i] : offsets[i + 1]`` are the bytes of value ``i``.
        self.offsets = np.zeros(1 << 8, np.int64)
        self._index = np.zeros(1 << 9, np.uint64)
        self.count = 0
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.arena.nbytes + self.offsets.nbytes + self._index.nbytes

    def ids(self, data: Bytes, ends: Slots, valid: Bytes) -> Words:
        """Ids of n values given as Arrow data and n + 1 offsets; 0 where ``valid`` is 0."""
        out = np.empty(len(valid), np.uint64)
        row = 0
        while True:
            room = len(self._index) // 2 - self.count
            row, self.count, self._used = _intern(
                data, ends, valid, row, self._secret, self._index, self.arena, self.offsets, self.count, self._used, room, out
            )  # fmt: skip
            if row == len(valid):
                return out
            self._grow(int(ends[row + 1] - ends[row]))

    def _grow(self, needed: int) -> None:
        if self.count * 2 >= len(self._index):
            index = np.zeros(len(self._index) * 2, np.uint64)
            grow_index(self._index, index)
            self._index = index
        if self.count + 2 >= len(self.offsets):
            self.offsets = np.concatenate([self.offsets, np.zeros(len(self.offsets), np.int64)])
        if self._used + needed > len(self.arena):
            self.arena = np.concatenate([self.arena, np.zeros(max(len(self.arena), needed), np.uint8)])

    def gather(self, ids: Slots, valid: Bytes) -> tuple[npt.NDArray[np.int32], Bytes]:
        """Arrow offsets (n + 1) and data of the values with these ids; nothing where ``valid`` is 0.

        Raises
        ------
        InvalidRequestError
            They are more bytes than Arrow can count. A value is held once here but written as often as it occurs.
        """
        ends = np.zeros(len(ids) + 1, np.int32)
        size = _gather(self.arena, self.offsets, ids, valid, ends, np.empty(0, np.uint8))
        if size > _MOST_BYTES:
            raise InvalidRequestError(
                "a column of a shard has more than 2 GiB of strings, which no file of it can hold; nothing was written; give the "
                "state more shards, under another name",
                bytes=size,
            )
        out = np.empty(size, np.uint8)
        _gather(self.arena, self.offsets, ids, valid, ends, out)
        return ends, out

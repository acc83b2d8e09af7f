"""Sizes of hash indexes, and their growth, in any memory."""

from __future__ import annotations

import numpy as np

from store_actors.engine.arrays import Words
from store_actors.engine.index_kernels import grow_index
from store_actors.engine.memory import Memory, blocks

#: How full an index may be: beyond that linear probing gets slow.
_FULL = 0.85
#: An index doubles below this size. Then it grows by a quarter: it is 0.77 full on average, and each entry was moved four times.
_LARGE = 1 << 16


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

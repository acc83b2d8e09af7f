"""Growth of a hash index, in any memory."""

from __future__ import annotations

import numpy as np

from store_actors.engine.arrays import Words
from store_actors.engine.index_kernels import grow_index
from store_actors.engine.memory import Memory, blocks

__all__ = ["larger_index"]


def larger_index(memory: Memory, index: Words, size: int) -> Words:
    """Return an index of `size` buckets, a power of two, with all entries of a smaller one."""
    larger = memory.zeros(size, np.uint64)
    # In order on both sides: the home of an entry is its tag's top bits.
    for block in blocks(memory, index):
        grow_index(index[block], larger)
    return larger

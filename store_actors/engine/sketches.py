"""HLL sketches between values, lists of coupons and the bytes of Apache DataSketches (version 1 of its HLL, registers of a byte)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store_actors.engine import hll_kernels
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.layout import Sketch
from store_actors.engine.strings import StringPool
from store_actors.engine.words import check_countable


def opened(sketch: Sketch, words: Words, valid: Bytes, pool: StringPool) -> tuple[Words, Slots, Slots]:
    """Return the values of a column, or the sketches that they are, as lists: all elements, where each begins, and its length.

    Parameters
    ----------
    words, valid
        Integers, or ids in the pool, and which of them are not null.
    """
    lengths = np.empty(len(words), np.int64)
    if sketch.is_union:
        sizes = (pool.arena, pool.offsets, words, valid)
        elements = np.empty(1, np.uint64)
        elements = np.empty(max(1, hll_kernels.open_sketches(*sizes, 0, elements, lengths)), np.uint64)
        hll_kernels.open_sketches(*sizes, 1, elements, lengths)
        return elements, np.cumsum(lengths) - lengths, lengths
    coupons = np.empty(len(words), np.uint64)
    if sketch.is_text:
        hll_kernels.coupons_of_texts(pool.arena, pool.offsets, words, coupons)
    else:
        hll_kernels.coupons_of_longs(words, coupons)
    marks = np.full(len(words), sketch.lg_k, np.uint64)
    elements = np.column_stack([marks, coupons]).reshape(-1)
    lengths[:] = np.where((valid != 0) & (coupons != 0), 2, 0)
    return elements, np.arange(len(words), dtype=np.int64) * 2, lengths


def sketch_bytes(lists: pa.ListArray, lg_k: int) -> pa.Array:
    """Return the bytes of the sketches that lists are; one without elements is an empty one of this precision."""
    lengths = np.array(pc.list_value_length(lists), np.int64)
    # Their 32 bits, which Arrow has a sign for.
    elements = np.array(lists.flatten(), np.int64).view(np.uint64)
    out, ends = np.empty(len(elements) + len(lists) + 1, np.uint64), np.empty(len(lists), np.int64)
    hll_kernels.marked(elements, np.cumsum(lengths), lg_k, out, ends)
    sizes = np.zeros(len(lists), np.int64)
    hll_kernels.write_sketches(out, ends, 0, sizes, np.empty(1, np.uint8))
    check_countable(int(sizes.sum()), "bytes of sketches")
    content = np.zeros(max(1, int(sizes.sum())), np.uint8)
    hll_kernels.write_sketches(out, ends, 1, sizes, content)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(lists), [None, pa.py_buffer(offsets), pa.py_buffer(content)])

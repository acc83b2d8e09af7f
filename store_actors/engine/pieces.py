"""Cutting rows into pieces: Arrow counts the bytes of a column of strings, and the elements of one of lists, in 32 bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from store_actors.engine.arrays import Slots

#: Bytes of a piece in all its columns, by default: half of what Arrow, and Spark's JVM, take at once.
PIECE_BYTES = 1 << 30


def cut(sizes: Slots, limit: int) -> Iterator[slice]:
    """Yield the successive rows of together at most `limit` bytes, or single rows that are larger; one empty piece of no rows."""
    if not len(sizes):
        yield slice(0, 0)
    ends, begin, done = np.cumsum(sizes), 0, 0
    while begin < len(sizes):
        end = max(begin + 1, int(np.searchsorted(ends, done + limit, side="right")))
        yield slice(begin, end)
        begin, done = end, int(ends[end - 1])


def batches(rows: pa.Table, limit: int = PIECE_BYTES) -> list[pa.RecordBatch]:
    """Return all rows in few batches, each of about `limit` bytes at most unless it is so large already; none of no rows."""
    if rows.nbytes <= limit:
        pieces = rows.to_batches()
        # One chunk is not copied.
        return pieces if len(pieces) == 1 else rows.combine_chunks().to_batches()  # type: ignore[no-any-return]
    joined: list[pa.RecordBatch] = []
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in rows.to_batches():
        if pending and size + batch.nbytes > limit:
            joined.append(pa.concat_batches(pending))
            pending, size = [], 0
        pending.append(batch)
        size += batch.nbytes
    return [*joined, pa.concat_batches(pending)] if pending else joined

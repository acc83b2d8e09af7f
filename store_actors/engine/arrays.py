"""Types of the engine's arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

#: Rows, keys and values as 64-bit words (``words.py``).
Words = npt.NDArray[np.uint64]
#: Places of rows in a table, and other whole numbers.
Slots = npt.NDArray[np.int64]
#: Bytes of strings; or, for compiled loops, 1 and 0.
Bytes = npt.NDArray[np.uint8]
#: Which of some rows.
Mask = npt.NDArray[np.bool_]


def as_type(data_type: pa.DataType, column: pa.Array) -> pa.Array:
    """Return a column in a type that holds all its values."""
    # Arrow takes even a cast to the same type for a promise that fields of a struct are never null. Below a null struct they are null.
    return column if column.type == data_type else column.cast(data_type)


def in_schema(schema: pa.Schema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of a schema, by their names, in types that hold all their values."""
    return pa.RecordBatch.from_arrays([as_type(item.type, batch.column(item.name)) for item in schema], schema=schema)


def of_words(kind: pa.FixedSizeBinaryType, words: npt.NDArray[np.generic]) -> pa.Array:
    """Return states of several 64-bit words, which follow one another in `words`."""
    return pa.Array.from_buffers(
        kind, words.nbytes // kind.byte_width, [None, pa.py_buffer(np.ascontiguousarray(words))]
    )


def whole_numbers(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the numbers cut off to whole ones of 64 bits, as Java does it: NaN is 0, and what is beyond them the last one."""
    # Where Java stops at the last number numpy wraps.
    large, is_number = numbers >= 2.0**63, ~np.isnan(numbers)
    cut = np.where(is_number & ~large, np.maximum(numbers, -(2.0**63)), 0.0).astype(np.int64)
    return np.where(large, np.iinfo(np.int64).max, cut)

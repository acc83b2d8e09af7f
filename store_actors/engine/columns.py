"""Arrow columns in other types."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa


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

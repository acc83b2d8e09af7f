"""Arrow columns in other types.

Values of types that a keyed store has no columns for are binaries: each an Arrow IPC record batch of one row, without its schema.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


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


def packed(array: pa.Array) -> pa.Array:
    """Return the values as binaries; null stays null."""
    schema = pa.schema([pa.field("", array.type)])
    valid = pc.is_valid(array).to_pylist()
    binaries = [
        pa.record_batch([array.slice(row, 1)], schema=schema).serialize().to_pybytes() if is_valid else None
        for row, is_valid in enumerate(valid)
    ]
    return pa.array(binaries, pa.binary())


def unpacked(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values of a type again, of what :func:`packed` made of them."""
    schema, null = pa.schema([pa.field("", kind)]), pa.nulls(1, kind)
    values = [
        pa.ipc.read_record_batch(value.as_buffer(), schema).column(0) if value.is_valid else null for value in array
    ]
    return pa.concat_arrays([pa.array([], kind), *values])

"""Values of types that a keyed store has no columns for, as binaries: each an Arrow IPC record batch of one row, without its schema."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


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

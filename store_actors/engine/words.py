"""Arrow columns to 64-bit words and back.

===================  ===========================================================================
Arrow type           words
===================  ===========================================================================
bool, int8..int64,   the value, sign-extended to int64
date32, timestamp,   (timestamps in microseconds since the epoch, for any zone; durations
duration             in microseconds)
float32, float64     the bits of the float64
decimal128           low word, high word of the unscaled 128-bit two's complement integer
fixed_size_binary    its bytes, eight a word (states of many words)
string, binary       id in the table's :class:`~store_actors.engine.strings.StringPool` (large_*: produced, never read)
list, map, struct    that of their bytes (``nested.py``); lists that grow with their group have words of their own (``lists.py``)
===================  ===========================================================================
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.layout import words_of
from store_actors.engine.nested import encode_nested, is_text
from store_actors.engine.strings import StringPool

#: Arrow counts the bytes of a column of strings, and the elements of one of lists, in 32 bits.
_MOST = 2**31 - 1


def check_countable(count: int, unit: str) -> None:
    """Refuse a count that no Arrow array of Spark's types can have: rows are cut before, so it is of a single row.

    Raises
    ------
    InvalidRequestError
        There are too many.
    """
    if count > _MOST:
        raise InvalidRequestError(
            f"one row of a shard has more than 2**31 - 1 {unit} in one column, which neither Spark's rows nor their Arrow types can "
            "hold; nothing was written; gather less in one group, or use finer keys under another name",
            count=count,
        )


def validity(array: pa.Array) -> Bytes:
    """Return 1 where there is a value, 0 where it is null; uint8 of length n."""
    if array.null_count == 0:
        return np.ones(len(array), np.uint8)
    # A copy: the compiled signatures take no read-only arrays, which Arrow's are.
    return np.array(pc.is_valid(array).cast(pa.uint8()).to_numpy(zero_copy_only=False))


def encode_column(array: pa.Array, pool: StringPool, valid: Bytes, out: list[Words]) -> None:
    """Append the column's words (uint64 arrays of length n; nulls are 0) to ``out``."""
    data_type = array.type
    if is_text(data_type):
        out.append(_encode_strings(array, pool, valid))
        return
    if pa.types.is_nested(data_type):
        out.append(pool.ids(*encode_nested(array), valid))
        return
    width = words_of(data_type)
    if width > 1 or pa.types.is_fixed_size_binary(data_type):
        if len(array) == 0:
            out.extend(np.empty((width, 0), np.uint64))
            return
        words = np.frombuffer(array.buffers()[1], np.uint64).reshape(-1, width)[
            array.offset : array.offset + len(array)
        ]
        out.extend((words * valid.astype(np.uint64)[:, np.newaxis]).T)
        return
    if pa.types.is_floating(data_type):
        array = array.cast(pa.float64())
    elif pa.types.is_date32(data_type):
        array = array.cast(pa.int32()).cast(pa.int64())
    else:
        array = array.cast(pa.int64())
    if array.null_count:
        array = array.fill_null(0)
    out.append(array.to_numpy(zero_copy_only=False).view(np.uint64))


def text_buffers(array: pa.Array) -> tuple[Bytes, Slots]:
    """Return the bytes of the strings or binaries of an array that is not empty, and n + 1 offsets into them."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    begin, end = int(ends[0]), int(ends[-1])
    # A copy on purpose: Arrow's buffers are read-only, which the compiled signatures do not take.
    content = (
        np.zeros(1, np.uint8) if data is None or end == begin else np.array(np.frombuffer(data, np.uint8)[begin:end])
    )
    return content, ends - begin


def _encode_strings(array: pa.Array, pool: StringPool, valid: Bytes) -> Words:
    return pool.ids(*text_buffers(array), valid) if len(array) else np.empty(0, np.uint64)


def decode_column(data_type: pa.DataType, words: tuple[Slots, ...], valid: Bytes, pool: StringPool) -> pa.Array:
    """Return the Arrow array of n values from their words; null where ``valid`` is 0.

    Raises
    ------
    InvalidRequestError
        More than 2 GiB of strings, which ``string`` and ``binary`` cannot count. Cut the rows before (``pieces.py``), or ask for
        ``large_string`` or ``large_binary``.
    """
    size = len(valid)
    nulls = size - int(np.count_nonzero(valid))
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
    if is_text(data_type) or pa.types.is_large_string(data_type) or pa.types.is_large_binary(data_type):
        ends = pool.ends(words[0], valid)
        if is_text(data_type):
            check_countable(int(ends[-1]), "bytes of strings")
        content = pool.copied(words[0], valid, ends)
        if is_text(data_type):
            ends = ends.astype(np.int32)
        return pa.Array.from_buffers(data_type, size, [bitmap, pa.py_buffer(ends), pa.py_buffer(content)], nulls)
    if words_of(data_type) > 1 or pa.types.is_fixed_size_binary(data_type):
        values: npt.NDArray[np.generic] = np.column_stack(words)
    elif pa.types.is_boolean(data_type):
        values = np.packbits(words[0] != 0, bitorder="little")
    elif pa.types.is_floating(data_type):
        values = words[0].view(np.float64).astype(data_type.to_pandas_dtype(), copy=False)
    elif pa.types.is_date32(data_type):
        values = words[0].astype(np.int32)
    elif pa.types.is_integer(data_type):
        values = words[0].astype(data_type.to_pandas_dtype(), copy=False)
    else:  # timestamp, duration: int64 microseconds
        values = words[0]
    return pa.Array.from_buffers(data_type, size, [bitmap, pa.py_buffer(np.ascontiguousarray(values))], nulls)

"""Arrow columns to 64-bit words and back; of nested values to bytes and back.

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
list, map, struct    that of their bytes (below); lists that grow with their group have words of their own (``lists.py``)
===================  ===========================================================================

Arrays, maps and structs are bytes, which a pool of strings holds: equal values are equal bytes.

The bytes of a value are made of sections, one after the other, in the order of the type's parts from the outside to the inside:
which elements are there (a byte each), then their values, of strings their lengths (int32) and their bytes, of arrays and maps their
lengths and then the sections of all their elements, of structs the sections of each field. How much of a section belongs to a value
follows from the sections before it. So whole columns are written and read section by section, never value by value.

Nulls have the bytes of zeros. Floats are equal if all their bits are: the caller normalises NaN and zero in keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import int64, njit, uint8, void

from coordinator.model.errors import InvalidRequestError
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.machine_kernels import copy_bytes
from store_actors.engine.nested_kernels import PartKind
from store_actors.engine.strings import StringPool

#: Arrow counts the bytes of a column of strings, and the elements of one of lists, in 32 bits.
_MOST = 2**31 - 1
_WORD = pa.int64()
Lengths: TypeAlias = npt.NDArray[np.int32]

u8_1 = uint8[::1]
i64_1 = int64[::1]


def words_of(data_type: pa.DataType) -> int:
    """64-bit words that a value of the type takes: two for decimals and lists (extent and length), one for most others."""
    if pa.types.is_fixed_size_binary(data_type):
        return int(data_type.byte_width) // 8
    return 2 if pa.types.is_decimal(data_type) or pa.types.is_list(data_type) else 1


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
    elif data_type != _WORD:
        array = array.cast(_WORD)
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


def is_text(data_type: pa.DataType) -> bool:
    """Return whether values are strings or bytes: in rows, ids in a pool."""
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


@njit(void(u8_1, i64_1, i64_1, u8_1, i64_1), cache=True, nogil=True)
def _copy(source, begins, sizes, target, target_begins):  # type: ignore[no-untyped-def]
    """Copy ``sizes[i]`` bytes from ``source[begins[i]]`` to ``target[target_begins[i]]``."""
    for row in range(sizes.shape[0]):
        copy_bytes(source, begins[row], sizes[row], target, target_begins[row])


def _begins(sizes: Slots) -> Slots:
    return np.cumsum(sizes) - sizes


def _per_row(sizes: Slots | Lengths, counts: Slots) -> Slots:
    """Return the sums of the sizes of each row's elements, of which there are `counts`."""
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    ends = np.cumsum(counts)
    summed: Slots = total[ends] - total[ends - counts]
    return summed


# -- to bytes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Section:
    """Bytes of all rows, one after the other, and how many each row has."""

    data: Bytes
    sizes: Slots


def encode_nested(array: pa.Array) -> tuple[Bytes, Slots]:
    """Return the bytes of all values of an array, and the n + 1 offsets of each value's."""
    sections: list[_Section] = []
    _write(array, np.ones(len(array), np.int64), sections)
    target_begins = np.zeros(len(array) + 1, np.int64)
    for section in sections:
        target_begins[1:] += section.sizes
    ends = np.cumsum(target_begins)
    data, target_begins = np.zeros(max(1, int(ends[-1])), np.uint8), ends[:-1].copy()
    for section in sections:
        if len(section.data):
            _copy(section.data, _begins(section.sizes), section.sizes, data, target_begins)
        target_begins += section.sizes
    return data, ends


def _write(array: pa.Array, counts: Slots, out: list[_Section]) -> None:
    """Add the sections of elements, of which each row has `counts`."""
    data_type = array.type
    out.append(_Section(validity(array), counts))
    if pa.types.is_struct(data_type):
        for field in array.flatten():  # in which the fields of nulls are null
            _write(field, counts, out)
    elif pa.types.is_map(data_type):
        _write_elements(array.cast(_entries_type(data_type)), counts, out)
    elif pa.types.is_list(data_type):
        _write_elements(array, counts, out)
    elif is_text(data_type):
        _write_strings(array, counts, out)
    else:
        values = _fixed(array)
        out.append(_Section(values, counts * (len(values) // max(1, len(array)))))


def _write_elements(array: pa.ListArray, counts: Slots, out: list[_Section]) -> None:
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    out.append(_Section(_bytes_of(lengths), counts * 4))
    _write(array.flatten(), _per_row(lengths.to_numpy(zero_copy_only=False), counts), out)


def _write_strings(array: pa.Array, counts: Slots, out: list[_Section]) -> None:
    if array.null_count:
        array = array.fill_null("" if pa.types.is_string(array.type) else b"")
    offsets = _offsets(array)
    lengths = np.diff(offsets)
    out.append(_Section(lengths.view(np.uint8), counts * 4))
    buffer = array.buffers()[2]
    # A copy on purpose: the compiled signature takes no read-only arrays, which Arrow's are.
    data = (
        np.empty(0, np.uint8) if buffer is None else np.array(np.frombuffer(buffer, np.uint8)[offsets[0] : offsets[-1]])
    )
    out.append(_Section(data, _per_row(lengths, counts)))


def _offsets(array: pa.Array) -> Lengths:
    if len(array) == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]


def _fixed(array: pa.Array) -> Bytes:
    """Return the values of one size, nulls as zeros."""
    data_type = array.type
    if pa.types.is_decimal(data_type):
        if len(array) == 0:
            return np.empty(0, np.uint8)
        pairs = np.frombuffer(array.buffers()[1], np.uint64).reshape(-1, 2)[array.offset : array.offset + len(array)]
        valid = validity(array)
        return np.ascontiguousarray(pairs * valid.astype(np.uint64)[:, np.newaxis]).reshape(-1).view(np.uint8)
    if pa.types.is_boolean(data_type):
        array = array.cast(pa.uint8())
    elif pa.types.is_date32(data_type):
        array = array.cast(pa.int32())
    elif pa.types.is_temporal(data_type):
        array = array.cast(pa.int64())
    return _bytes_of(array.fill_null(0) if array.null_count else array)


def _bytes_of(array: pa.Array) -> Bytes:
    return np.array(array.to_numpy(zero_copy_only=False)).view(np.uint8)


def _entries_type(data_type: pa.MapType) -> pa.ListType:
    entries = pa.struct([data_type.key_field, data_type.item_field])
    return pa.list_(pa.field("entries", entries, nullable=False))


def parts_of(data_type: pa.DataType) -> list[tuple[int, int]]:
    """Return the lines by which ``nested_kernels.compare_nested`` compares values of a type; maps have no order."""
    children: list[tuple[int, int]] = []
    if pa.types.is_struct(data_type):
        kind, number = PartKind.STRUCT, data_type.num_fields
        for field_index in range(number):
            children += parts_of(data_type.field(field_index).type)
    elif pa.types.is_list(data_type):
        kind, number, children = PartKind.LIST, 0, parts_of(data_type.value_type)
    elif is_text(data_type):
        kind, number = PartKind.TEXT, 0
    else:
        kind = PartKind.FLOAT if pa.types.is_floating(data_type) else PartKind.INTEGER
        number = 1 if pa.types.is_boolean(data_type) else data_type.bit_width // 8
    return [((1 + len(children)) << 3 | int(kind), number), *children]


def nested_keys(array: pa.Array) -> pa.Array:
    """Return the bytes of each value: equal bytes for equal values, null for null."""
    data, ends = encode_nested(array)
    nulls = pa.py_buffer(np.packbits(validity(array), bitorder="little"))
    return pa.Array.from_buffers(pa.large_binary(), len(array), [nulls, pa.py_buffer(ends), pa.py_buffer(data)])


# -- from bytes ---------------------------------------------------------------------------------------------------------


def decode_nested(packed: pa.BinaryArray, data_type: pa.DataType) -> pa.Array:
    """Return the values that have these bytes; null where the bytes are null."""
    present = packed.drop_null() if packed.null_count else packed
    values = _Bytes(present).values(data_type, np.ones(len(present), np.int64))
    if not packed.null_count:
        return values
    valid = pc.is_valid(packed).to_numpy(zero_copy_only=False)
    return values.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


class _Bytes:
    """Reads section after section of many rows."""

    def __init__(self, packed: pa.BinaryArray) -> None:
        offsets, buffer = _offsets(packed), packed.buffers()[2]
        self._data: Bytes = np.zeros(1, np.uint8) if buffer is None else np.array(np.frombuffer(buffer, np.uint8))
        #: Where each row's next section begins.
        self._begins: Slots = offsets[:-1].astype(np.int64)

    def _section(self, sizes: Slots) -> Bytes:
        out = np.empty(int(sizes.sum()), np.uint8)
        _copy(self._data, self._begins, sizes, out, _begins(sizes))
        self._begins = self._begins + sizes
        return out

    def values(self, data_type: pa.DataType, counts: Slots) -> pa.Array:
        """Return the elements, of which each row has `counts`."""
        valid = self._section(counts)
        size = len(valid)
        nulls = size - int(np.count_nonzero(valid))
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        if pa.types.is_struct(data_type):
            fields = [
                self.values(data_type.field(field_index).type, counts) for field_index in range(data_type.num_fields)
            ]
            return pa.Array.from_buffers(data_type, size, [bitmap], nulls, children=fields)
        if pa.types.is_map(data_type) or pa.types.is_list(data_type):
            lengths = self._section(counts * 4).view(np.int32)
            element = _entries_type(data_type).value_type if pa.types.is_map(data_type) else data_type.value_type
            elements = self.values(element, _per_row(lengths, counts))
            return pa.Array.from_buffers(data_type, size, [bitmap, _ends(lengths)], nulls, children=[elements])
        if is_text(data_type):
            lengths = self._section(counts * 4).view(np.int32)
            data = self._section(_per_row(lengths, counts))
            return pa.Array.from_buffers(data_type, size, [bitmap, _ends(lengths), pa.py_buffer(data)], nulls)
        if pa.types.is_boolean(data_type):
            return pa.Array.from_buffers(
                data_type, size, [bitmap, pa.py_buffer(np.packbits(self._section(counts), bitorder="little"))], nulls
            )
        data = self._section(counts * (data_type.bit_width // 8))
        return pa.Array.from_buffers(data_type, size, [bitmap, pa.py_buffer(data)], nulls)


def _ends(lengths: Lengths) -> pa.Buffer:
    return pa.py_buffer(np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]))

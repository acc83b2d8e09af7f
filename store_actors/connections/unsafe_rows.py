"""Rows in Spark's own binary format (UnsafeRow), from and to Arrow: what tasks of Spark's have in memory is sent as it is.

A row is a bit for each null field, in whole words, and then a word for each field: its value, or of strings and binaries the distance
of their bytes from the begin of the row and their length, 32 bits each. Those bytes follow the words, each string padded to whole
words. Source: ``org.apache.spark.sql.catalyst.expressions.UnsafeRow``.

Rows come in blocks, each after its number of bytes (32 bits, the highest byte first); a block of no bytes is the last. Where a column
has strings, each row follows its size, which takes a word. ``HandOver.scala`` is the other side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from store_actors.engine import unsafe_row_kernels as kernels
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.pieces import cut
from store_actors.engine.words import is_text, text_buffers, validity

_LENGTH = struct.Struct(">i")
_LOW32, _S32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_WORD_BITS = 64
#: Largest precision of decimals that a word holds.
_LONG_DIGITS = 18
_WORDS = (
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32(),
)  # fmt: skip
#: Bytes of a block that is written, at most, unless one row is larger.
_BLOCK_BYTES = 1 << 20
#: Rows of words alone that are not more than a block.
_FEW_ROWS = 64
#: Bytes of a row at most: of the largest array of Java's, without what a block has besides.
_MOST_BYTES = 2**31 - 64


def are_supported(schema: pa.Schema) -> bool:
    """Return whether rows can be written: of numbers, booleans, dates, times, decimals of up to 18 digits, strings and binaries."""
    return all(is_text(field.type) or _is_word(field.type) for field in schema)


def _is_word(kind: pa.DataType) -> bool:
    if pa.types.is_decimal128(kind):
        return int(kind.precision) <= _LONG_DIGITS
    is_timestamp = pa.types.is_timestamp(kind) and kind.unit == "us"
    return is_timestamp or kind in _WORDS


def read_blocks(source: BinaryIO, schema: pa.Schema, further: int) -> Iterator[pa.RecordBatch]:
    """Yield a record batch of each block that a task sends.

    Parameters
    ----------
    schema
        The first columns of the rows.
    further
        Number of columns after those, which are left out; they are not strings.

    Raises
    ------
    EOFError, ValueError
        The blocks do not end, or are not of such rows.
    """
    while length := _LENGTH.unpack(_read(source, _LENGTH.size))[0]:
        yield decoded(_read(source, length), schema, further)


def _read(source: BinaryIO, size: int) -> bytes:
    if size < 0:
        raise ValueError(f"malformed row block: a block of {size} bytes")
    data = source.read(size)
    if len(data) < size:
        raise EOFError("the task ended in the middle of its rows")
    return data


def decoded(content: bytes, schema: pa.Schema, further: int) -> pa.RecordBatch:
    """Return the rows of a block without its length; see :func:`read_blocks`."""
    block = np.frombuffer(content, np.uint8)
    flag_words = -(-(len(schema) + further) // _WORD_BITS)
    row_words = flag_words + len(schema) + further
    begins: Slots | None = None
    if any(is_text(field.type) for field in schema):
        # A copy: the compiled signatures take no read-only arrays.
        block = block.copy()
        found = np.empty(len(block) // (8 * row_words) + 1, np.int64)
        count = kernels.find_rows(block, 8 * row_words, found)
        if count < 0:
            raise ValueError("malformed row block: a row has a size that it cannot have")
        begins = found[:count]
        words = np.empty((count, row_words), np.uint64)
        kernels.read_words(block, begins, words)
    else:
        words = block.view(np.uint64).reshape(-1, row_words)
    flags = words[:, :flag_words]
    has_nulls = np.bitwise_or.reduce(flags, axis=0)
    columns = []
    for number, field in enumerate(schema):
        word, bit = divmod(number, _WORD_BITS)
        bitmap = None
        if int(has_nulls[word]) >> bit & 1:
            bitmap = pa.py_buffer(
                np.packbits((flags[:, word] >> np.uint64(bit)) & np.uint64(1) == 0, bitorder="little")
            )
        place = flag_words + number
        if is_text(field.type):
            buffers = _texts(block, begins, np.ascontiguousarray(words[:, place]))
        else:
            buffers = [pa.py_buffer(_values(words, place, field.type))]
        columns.append(pa.Array.from_buffers(field.type, len(words), [bitmap, *buffers]))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _values(words: Words, place: int, kind: pa.DataType) -> npt.NDArray[np.generic]:
    """Return the values of a column of words as Arrow has them in memory."""
    if pa.types.is_boolean(kind):
        return np.packbits(words[:, place].astype(np.bool_), bitorder="little")
    if pa.types.is_decimal128(kind):
        low = words[:, place].view(np.int64)
        return np.column_stack([low, low >> 63])
    # The lowest bytes of the word.
    parts = _WORD_BITS // kind.bit_width
    return np.ascontiguousarray(words.view(f"u{kind.bit_width // 8}")[:, place * parts])


def _texts(block: Bytes, begins: Slots | None, words: Words) -> list[pa.Buffer]:
    assert begins is not None, "rows with strings follow their sizes"
    ends = np.zeros(len(words) + 1, np.int64)
    np.cumsum(words & _LOW32, out=ends[1:])
    if ends[-1] > len(block):
        raise ValueError("malformed row block: their strings are longer than all of them")
    content = np.empty(int(ends[-1]), np.uint8)
    if not kernels.copy_texts(block, begins, words, ends, content):
        raise ValueError("malformed row block: a string is not inside them")
    return [pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(content)]


def write_blocks(batch: pa.RecordBatch, sink: BinaryIO) -> None:
    """Write rows whose columns :func:`are_supported`; blocks of other batches may follow, and then :func:`write_end`.

    Raises
    ------
    ValueError
        There are no columns, so that a block would have no bytes; or a row has 2 GiB.
    """
    for _, block in blocks(batch):
        sink.write(_LENGTH.pack(block.nbytes))
        sink.write(block.data)


def blocks(batch: pa.RecordBatch) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
    """Yield blocks of rows, each with the number of its rows; errors as of :func:`write_blocks`."""
    if not batch.num_columns:
        raise ValueError("rows without columns cannot be written: nothing would say how many there are")
    if not batch.num_rows:
        return
    if batch.num_rows <= _FEW_ROWS and not any(is_text(field.type) for field in batch.schema):
        yield batch.num_rows, _encoded(batch)
        return
    for rows in cut(sizes := _row_bytes(batch), _BLOCK_BYTES):
        if (size := int(sizes[rows].sum())) > _MOST_BYTES:
            raise ValueError(
                f"a row of {size} bytes cannot be written: Spark has none of more than {_MOST_BYTES}; what was committed is safe; "
                "make the values shorter, or emit them in several rows"
            )
        count = rows.stop - rows.start
        yield count, _encoded(batch.slice(rows.start, count))


def write_end(sink: BinaryIO) -> None:
    """Write what follows the last block."""
    sink.write(_LENGTH.pack(0))


def _row_bytes(batch: pa.RecordBatch) -> Slots:
    """Return the bytes of each row of a batch that is not empty, at most."""
    words = -(-batch.num_columns // _WORD_BITS) + batch.num_columns
    # Each row of texts follows its size.
    words += any(is_text(field.type) for field in batch.schema)
    sizes = np.full(batch.num_rows, 8 * words, np.int64)
    for column in batch.columns:
        if is_text(column.type):
            ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
            sizes += -(-np.diff(ends).astype(np.int64) // 8) * 8
    return sizes


def _encoded(batch: pa.RecordBatch) -> npt.NDArray[np.generic]:
    size = batch.num_rows
    flag_words = -(-batch.num_columns // _WORD_BITS)
    words = np.zeros((size, flag_words + batch.num_columns), np.uint64)
    # Where the bytes of the next string belong, from the begin of each row.
    tails = np.full(size, 8 * words.shape[1], np.int64)
    texts: list[tuple[int, Bytes, Slots]] = []
    for number, column in enumerate(batch.columns):
        place, (word, bit) = flag_words + number, divmod(number, _WORD_BITS)
        if is_text(column.type):
            data, ends = text_buffers(column)
            lengths = np.diff(ends) * validity(column)
            words[:, place] = tails.astype(np.uint64) << _S32 | lengths.astype(np.uint64)
            tails += -(-lengths // 8) * 8
            texts.append((place, data, ends))
        else:
            _put_values(column, words, place)
        if column.null_count:
            valid = validity(column)
            words[valid == 0, place] = 0
            words[:, word] |= (valid == 0).astype(np.uint64) << np.uint64(bit)
    return _with_texts(words, tails, texts) if texts else words


def _put_values(column: pa.Array, words: Words, place: int) -> None:
    kind = column.type
    if pa.types.is_boolean(kind):
        words[:, place] = column.cast(pa.uint8()).fill_null(0).to_numpy(zero_copy_only=False)
        return
    values = column.buffers()[1]
    if pa.types.is_decimal128(kind):
        words[:, place] = np.frombuffer(values, np.uint64)[2 * column.offset :: 2][: len(column)]
        return
    parts, unsigned = _WORD_BITS // kind.bit_width, f"u{kind.bit_width // 8}"
    words.view(unsigned)[:, place * parts] = np.frombuffer(values, unsigned)[
        column.offset : column.offset + len(column)
    ]


def _with_texts(words: Words, sizes: Slots, texts: Sequence[tuple[int, Bytes, Slots]]) -> Bytes:
    """Return rows that each follow their size, with their strings."""
    ends = np.cumsum(sizes + 8)
    begins = ends - sizes
    out = np.zeros(int(ends[-1]), np.uint8)
    kernels.write_words(words, begins, sizes, out)
    for place, data, text_ends in texts:
        kernels.put_texts(data, text_ends, np.ascontiguousarray(words[:, place]), begins, out)
    return out

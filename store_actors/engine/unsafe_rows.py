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
from dataclasses import dataclass
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
MOST_BLOCK_BYTES = 1 << 20
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
    columns = UnsafeBlock(content, schema, further).columns
    return pa.RecordBatch.from_arrays([column.array() for column in columns], schema=schema)


class UnsafeBlock:
    """The rows of a block without its length, whose columns are read one by one; parameters and errors as of :func:`read_blocks`."""

    def __init__(self, content: bytes, schema: pa.Schema, further: int) -> None:
        self.content, self.begins = np.frombuffer(content, np.uint8), np.empty(0, np.int64)
        flag_words = -(-(len(schema) + further) // _WORD_BITS)
        row_words = flag_words + len(schema) + further
        if any(is_text(field.type) for field in schema):
            # A copy: the compiled signatures take no read-only arrays.
            #: ``content``, ``begins``: The bytes, and where each row begins in them, if some columns are of strings.
            self.content = self.content.copy()
            found = np.empty(len(content) // (8 * row_words) + 1, np.int64)
            count = kernels.find_rows(self.content, 8 * row_words, found)
            if count < 0:
                raise ValueError("malformed row block: a row has a size that it cannot have")
            self.begins = found[:count]
            #: Of each row the flags of nulls, and a word for each column (n, words).
            self.words: Words = np.empty((count, row_words), np.uint64)
            kernels.read_words(self.content, self.begins, self.words)
        else:
            self.words = self.content.view(np.uint64).reshape(-1, row_words)
        has_nulls = np.bitwise_or.reduce(self.words[:, :flag_words], axis=0).tolist()
        self.columns: list[BlockColumn] = [
            BlockColumn(self, field.type, number, flag_words + number, has_nulls[number // _WORD_BITS])
            for number, field in enumerate(schema)
        ]
        self._names: list[str] = schema.names

    @property
    def num_rows(self) -> int:
        return len(self.words)

    def column(self, name: str) -> BlockColumn:
        """Return the column with a name."""
        return self.columns[self._names.index(name)]


@dataclass(frozen=True, slots=True)
class BlockColumn:
    """A column of a block."""

    block: UnsafeBlock
    type: pa.DataType
    number: int
    #: Its word in each row.
    place: int
    #: The bits of 64 columns, of which it is one, that have a null in some row.
    flags: int

    @property
    def null_count(self) -> int:
        """0 if no row is null."""
        return self.flags >> self.number % _WORD_BITS & 1

    def validity(self) -> Bytes:
        """Return 1 where there is a value, 0 where it is null; uint8 of length n."""
        if not self.null_count:
            return np.ones(self.block.num_rows, np.uint8)
        flags = self.block.words[:, self.number // _WORD_BITS] >> np.uint64(self.number % _WORD_BITS)
        valid: Bytes = (flags & np.uint64(1) == 0).view(np.uint8)
        return valid

    def array(self) -> pa.Array:
        """Return the column as Arrow has it."""
        bitmap = pa.py_buffer(np.packbits(self.validity(), bitorder="little")) if self.null_count else None
        if is_text(self.type):
            content, ends = self.texts()
            buffers = [pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(content)]
        else:
            buffers = [pa.py_buffer(self._values())]
        return pa.Array.from_buffers(self.type, self.block.num_rows, [bitmap, *buffers])

    def words(self) -> list[Words]:
        """Return the words of a column that is not of strings, as :mod:`store_actors.engine.words` has them; those of nulls are 0."""
        column = self.block.words[:, self.place]
        if pa.types.is_boolean(self.type):
            return [column.copy()]
        if pa.types.is_decimal128(self.type):
            return [column.copy(), (column.view(np.int64) >> 63).view(np.uint64)]
        is_float = pa.types.is_floating(self.type)
        values = self._low_bytes("f" if is_float else "i")
        return [values.astype(np.float64 if is_float else np.int64).view(np.uint64)]

    def texts(self) -> tuple[Bytes, Slots]:
        """Return the bytes of a column of strings, and n + 1 offsets into them.

        Raises
        ------
        ValueError
            A string is not in the block.
        """
        words = np.ascontiguousarray(self.block.words[:, self.place])
        ends = np.zeros(len(words) + 1, np.int64)
        np.cumsum(words & _LOW32, out=ends[1:])
        if ends[-1] > len(self.block.content):
            raise ValueError("malformed row block: their strings are longer than all of them")
        content = np.empty(max(1, int(ends[-1])), np.uint8)
        if not kernels.copy_texts(self.block.content, self.block.begins, words, ends, content):
            raise ValueError("malformed row block: a string is not inside them")
        return content, ends

    def _values(self) -> npt.NDArray[np.generic]:
        """Return the values of a column of words as Arrow has them in memory."""
        if pa.types.is_boolean(self.type):
            return np.packbits(self.block.words[:, self.place].astype(np.bool_), bitorder="little")
        if pa.types.is_decimal128(self.type):
            return np.column_stack(self.words())
        return np.ascontiguousarray(self._low_bytes("u"))

    def _low_bytes(self, kind: str) -> npt.NDArray[np.generic]:
        size = self.type.bit_width // 8
        values: npt.NDArray[np.generic] = self.block.words.view(f"{kind}{size}")[:, self.place * (8 // size)]
        return values


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
    sizes = _row_bytes(batch)
    pieces = [slice(0, batch.num_rows)] if sizes.sum() <= MOST_BLOCK_BYTES else cut(sizes, MOST_BLOCK_BYTES)
    for rows in pieces:
        if (size := int(sizes[rows].sum())) > _MOST_BYTES:
            raise ValueError(
                f"a row of {size} bytes cannot be written: Spark has none of more than {_MOST_BYTES}; what was committed is safe; "
                "make the values shorter, or emit them in several rows"
            )
        count = rows.stop - rows.start
        piece = batch.slice(rows.start, count)
        yield count, block_of([_sent_column(column) for column in piece.columns], count)


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


@dataclass(frozen=True, slots=True)
class SentColumn:
    """A column to write."""

    #: Integers without sign, of the bits of each value; of strings the n + 1 offsets into `text`.
    values: npt.NDArray[np.generic]
    #: 1 where there is a value; None: everywhere.
    valid: Bytes | None
    text: Bytes | None = None


def _sent_column(column: pa.Array) -> SentColumn:
    kind, valid = column.type, validity(column) if column.null_count else None
    if is_text(kind):
        text, ends = text_buffers(column)
        return SentColumn(ends, valid, text)
    if pa.types.is_boolean(kind):
        return SentColumn(column.cast(pa.uint8()).fill_null(0).to_numpy(zero_copy_only=False), valid)
    rows, buffer = slice(column.offset, column.offset + len(column)), column.buffers()[1]
    if pa.types.is_decimal128(kind):
        return SentColumn(np.frombuffer(buffer, np.uint64)[::2][rows], valid)
    return SentColumn(np.frombuffer(buffer, f"u{kind.bit_width // 8}")[rows], valid)


def sent_words(kind: pa.DataType, words: Words, valid: Bytes | None) -> SentColumn:
    """Return a column of a type that has no strings, of the first of its words as :mod:`store_actors.engine.words` has them."""
    if pa.types.is_float32(kind):
        return SentColumn(words.view(np.float64).astype(np.float32).view(np.uint32), valid)
    if pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        return SentColumn(words, valid)
    return SentColumn(words.astype(f"u{kind.bit_width // 8}", copy=False), valid)


def block_of(columns: Sequence[SentColumn], size: int) -> npt.NDArray[np.generic]:
    """Return rows as a block without its length; together they are less than 2 GiB."""
    flag_words = -(-len(columns) // _WORD_BITS)
    words = np.zeros((size, flag_words + len(columns)), np.uint64)
    # Where the bytes of the next string belong, from the begin of each row.
    tails = np.full(size, 8 * words.shape[1], np.int64)
    texts: list[tuple[int, Bytes, Slots]] = []
    for number, column in enumerate(columns):
        place, (word, bit) = flag_words + number, divmod(number, _WORD_BITS)
        if column.text is not None:
            ends = column.values.view(np.int64)
            lengths = np.diff(ends) if column.valid is None else np.diff(ends) * column.valid
            words[:, place] = tails.astype(np.uint64) << _S32 | lengths.astype(np.uint64)
            tails += -(-lengths // 8) * 8
            texts.append((place, column.text, ends))
        else:
            words.view(column.values.dtype)[:, place * (8 // column.values.itemsize)] = column.values
        if column.valid is not None:
            is_null = column.valid == 0
            words[is_null, place] = 0
            words[:, word] |= is_null.astype(np.uint64) << np.uint64(bit)
    return _with_texts(words, tails, texts) if texts else words


def _with_texts(words: Words, sizes: Slots, texts: Sequence[tuple[int, Bytes, Slots]]) -> Bytes:
    """Return rows that each follow their size, with their strings."""
    ends = np.cumsum(sizes + 8)
    begins = ends - sizes
    out = np.zeros(int(ends[-1]), np.uint8)
    kernels.write_words(words, begins, sizes, out)
    for place, data, text_ends in texts:
        kernels.put_texts(data, text_ends, np.ascontiguousarray(words[:, place]), begins, out)
    return out

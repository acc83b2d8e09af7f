"""Rows of a schema as 64-bit words: made of Arrow batches, and made Arrow tables again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coordinator.model.schema import StateSchema
from coordinator.model.type_names import is_growing, string_to_type
from store_actors.engine.arrays import Bytes, Mask, Slots, Words
from store_actors.engine.expiry_queue import NEVER
from store_actors.engine.layout import Feed, FieldSlot, RowLayout
from store_actors.engine.lists import ListPool, element_words
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.pieces import batches, cut
from store_actors.engine.strings import StringPool
from store_actors.engine.unsafe_rows import BlockColumn, SentColumn, UnsafeBlock, block_of, sent_words
from store_actors.engine.words import decode_column, decode_nested, encode_column, is_text, validity

#: Times the bytes of words that rows take on their way out: as Arrow data, in a file, and as the bytes of that.
_DECODED = 3


@dataclass(slots=True)
class EncodedBatch:
    """A batch as words: ``keys`` (n, key words), ``nulls`` (n,) key-null bits, ``values`` and ``valid`` (columns, n)."""

    feed: Feed
    keys: Words
    nulls: Words
    values: Words
    valid: Bytes
    #: Elements of lists in partial states; ``values`` have the begin and the length of each list.
    elements: Words

    def __len__(self) -> int:
        return len(self.nulls)

    def take(self, rows: Mask | Slots | slice) -> EncodedBatch:
        """Return some of the rows."""
        return EncodedBatch(
            self.feed,
            np.ascontiguousarray(self.keys[rows]),
            self.nulls[rows],
            np.ascontiguousarray(self.values[:, rows]),
            np.ascontiguousarray(self.valid[:, rows]),
            self.elements,
        )

    @classmethod
    def joined(cls, batches: Sequence[EncodedBatch]) -> EncodedBatch:
        """Return all rows of batches of raw inputs, which have no lists."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            batches[0].feed,
            np.concatenate([batch.keys for batch in batches]),
            np.concatenate([batch.nulls for batch in batches]),
            np.concatenate([batch.values for batch in batches], axis=1),
            np.concatenate([batch.valid for batch in batches], axis=1),
            batches[0].elements,
        )


class WordRows:
    """The meaning of words: where each field of a row lies, and the strings and lists that words stand for.

    Parameters
    ----------
    seed
        128 secret bits, where others choose the keys: see :mod:`store_actors.engine.hash_kernels`.
    memory
        Where arrays come from that are as large as the state.
    """

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        self.layout = RowLayout(schema)
        self.seed = seed
        self.memory = memory
        self.pool = StringPool(seed, memory)
        self.lists = ListPool(seed, memory)
        #: Bytes of Arrow data that are read or made at once, in all columns together.
        self.piece_bytes = memory.piece_bytes

    # -- in -------------------------------------------------------------------------------------------------------

    def encode(self, batch: pa.RecordBatch | UnsafeBlock, *, partial: bool = False) -> EncodedBatch:
        """Return the words of a batch with the columns of ``raw_schema``, or of ``row_schema`` if `partial`; others are ignored."""
        layout = self.layout
        feed = layout.partial if partial else layout.raw
        nulls = np.zeros(batch.num_rows, np.uint64)
        further = np.zeros((layout.null_words, batch.num_rows), np.uint64)
        keys: list[Words] = [*further]
        for slot in layout.keys:
            column = batch.column(slot.name)
            valid = self._encode_column(column, keys)
            if column.null_count:
                flags = nulls if slot.flag_word == 0 else further[slot.flag_word - layout.flag_words]
                flags |= (valid == 0).astype(np.uint64) * np.uint64(slot.flag)
                if slot.word == layout.expiry_word:
                    keys[-1] = _never_expiring(keys[-1], valid)
        values: list[Words] = []
        valids: list[Bytes] = []
        elements = [np.empty(0, np.uint64)]
        for field in feed.inputs:
            column = batch.column(field.name)
            if is_growing(field.type):
                valid = validity(column)
                words, begins, lengths = element_words(column, layout.lists[field.name], self.pool)
                values += [(begins + sum(map(len, elements))).view(np.uint64), lengths.view(np.uint64)]
                elements.append(words)
            else:
                kind = string_to_type(field.type)
                if isinstance(column, pa.Array) and pa.types.is_fixed_size_binary(kind):
                    column = column.cast(kind)
                valid = self._encode_column(column, values)
            valids.extend([valid] * (len(values) - len(valids)))
        size = batch.num_rows
        return EncodedBatch(
            feed,
            np.column_stack(keys) if keys else np.empty((size, 0), np.uint64),
            nulls,
            np.stack(values) if values else np.empty((0, size), np.uint64),
            np.stack(valids) if valids else np.empty((0, size), np.uint8),
            np.concatenate(elements),
        )

    def _encode_column(self, column: pa.Array | BlockColumn, out: list[Words]) -> Bytes:
        """Append the words of a column to ``out``; return where it has a value."""
        if not isinstance(column, BlockColumn):
            valid = validity(column)
            encode_column(column, self.pool, valid, out)
            return valid
        valid = column.validity()
        if is_text(column.type):
            out.append(self.pool.ids(*column.texts(), valid))
        else:
            out += column.words()
        return valid

    def encode_table(self, rows: pa.Table) -> EncodedBatch:
        """Return :meth:`encode` of all batches of raw inputs, as one."""
        pieces = batches(rows, self.piece_bytes) or [pa.RecordBatch.from_pylist([], rows.schema)]
        return EncodedBatch.joined([self.encode(batch) for batch in pieces])

    def rows_of(self, batch: pa.RecordBatch, fields: tuple[FieldSlot, ...] | None = None) -> Words:
        """Return the rows as words of a batch in ``row_schema`` (a delta or a snapshot), or of only some of its fields."""
        rows = np.zeros((batch.num_rows, self.layout.row_words), np.uint64)
        flags_of_all = np.zeros(self.layout.row_words, np.uint64)
        for slot in (*self.layout.keys, *self.layout.state) if fields is None else fields:
            column = batch.column(slot.name)
            valid = validity(column)
            words: list[Words] = []
            if slot.is_list:
                elements, begins, lengths = element_words(column, self.layout.lists[slot.name], self.pool)
                extents = self.lists.enter(self.layout.lists[slot.name], elements, begins, lengths)
                words += [extents.view(np.uint64), lengths.view(np.uint64)]
            else:
                encode_column(column, self.pool, valid, words)
            if slot.word == self.layout.expiry_word:
                words[0] = _never_expiring(words[0], valid)
            for number, word in enumerate(words):
                rows[:, slot.word + number] = word
            if column.null_count:
                flagged = valid == 0 if slot.is_key else valid == 1
                rows[:, slot.flag_word] |= flagged.astype(np.uint64) * np.uint64(slot.flag)
            elif not slot.is_key:
                flags_of_all[slot.flag_word] |= np.uint64(slot.flag)
        for flag_word in np.flatnonzero(flags_of_all):
            rows[:, flag_word] |= flags_of_all[flag_word]
        return rows

    def rows_of_table(self, rows: pa.Table, fields: tuple[FieldSlot, ...] | None = None) -> Words:
        """Return :meth:`rows_of` of all batches of a table."""
        pieces = [self.rows_of(batch, fields) for batch in batches(rows, self.piece_bytes)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.empty((0, self.layout.row_words), np.uint64), *pieces])

    def looking(self) -> Self:
        """Return the rows as they are now, for readers that only look up keys: no string is added to the pool."""
        if not self.layout.has_text_keys:
            return self
        lookup_rows = copy.copy(self)
        lookup_rows.pool = self.pool.looking()
        return lookup_rows

    # -- out ------------------------------------------------------------------------------------------------------

    def decode(self, rows: Words) -> pa.Table:
        """Return the Arrow table in ``row_schema`` of rows given as words, in as many chunks as :meth:`cut` makes pieces."""
        fields, schema = (*self.layout.keys, *self.layout.state), self.layout.schema.row_schema()
        self.memory.check(_DECODED * rows.nbytes)
        pieces = [
            pa.Table.from_arrays([self.decode_field(slot, rows[piece]) for slot in fields], schema=schema)
            for piece in self.cut(rows, fields)
        ]
        return pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)

    def unsafe_block(self, rows: Words, fields: Sequence[FieldSlot]) -> npt.NDArray[np.generic]:
        """Return some fields of rows given as words, as a block of Spark's rows: of types that it has, less than 2 GiB."""
        columns = []
        for slot in fields:
            words, valid = self._words_of(slot, rows) if self._has_nulls(slot, rows) else ((rows[:, slot.word],), None)
            if slot.is_text:
                valid_texts = np.ones(len(rows), np.uint8) if valid is None else valid
                ids = np.ascontiguousarray(words[0]).view(np.int64)
                ends, text = self.pool.gather(ids, valid_texts)
                columns.append(SentColumn(ends, valid, text))
            else:
                columns.append(sent_words(slot.type, words[0].view(np.uint64), valid))
        return block_of(columns, len(rows))

    def cut(self, rows: Words, fields: Sequence[FieldSlot], limit: int | None = None) -> Iterable[slice]:
        """Return the pieces of rows given as words, of which these fields are at most `limit` bytes of Arrow data (or a single row)."""
        limit = self.piece_bytes if limit is None else limit
        if len(rows) * self.longest_row(rows, fields) <= limit:
            return (slice(0, len(rows)),)
        return cut(self.row_bytes(rows, fields), limit)

    def longest_row(self, rows: Words, fields: Sequence[FieldSlot]) -> int:
        """Return the bytes that no row has more of in these fields."""
        total = 0
        for slot in fields:
            width = self.pool.longest + 4 if slot.is_text else 8 * slot.words
            if slot.is_list:
                field = self.layout.lists[slot.name]
                longest = int(rows[:, slot.word + 1].max(initial=0))
                width += longest * (8 * field.width + (self.pool.longest if field.is_text else 0))
            total += width
        return total

    def row_bytes(self, rows: Words, fields: Sequence[FieldSlot]) -> Slots:
        """Return the bytes of Arrow data that each row has in these fields, about."""
        sizes = np.zeros(len(rows), np.int64)
        for slot in fields:
            words, valid = self._words_of(slot, rows)
            if slot.is_text:
                sizes += 4
                self.pool.measure(words[0], valid, sizes)
            else:
                sizes += 8 * slot.words
            if slot.is_list:
                self.lists.measure(slot, words[0], words[1], self.pool, sizes)
        return sizes

    def decode_field(self, slot: FieldSlot, rows: Words, data_type: pa.DataType | None = None) -> pa.Array:
        """Return a column of rows given as words: cut them before, or ask for the large form of a `data_type` of strings."""
        if slot.is_plain and not self._has_nulls(slot, rows):
            values = np.ascontiguousarray(rows[:, slot.word])
            return pa.Array.from_buffers(slot.type, len(rows), [None, pa.py_buffer(values)], 0)
        words, valid = self._words_of(slot, rows)
        if slot.is_list:
            return self.lists.decode(slot, words[0], words[1], self.pool)
        decoded = decode_column(slot.type if data_type is None else data_type, words, valid, self.pool)
        return decoded if slot.nested is None else decode_nested(decoded, slot.nested)

    @staticmethod
    def _has_nulls(slot: FieldSlot, rows: Words) -> bool:
        """Return whether a field has no value in some row; in one pass, and without any memory."""
        flags = rows[:, slot.flag_word]
        if slot.is_key:
            return int(np.bitwise_or.reduce(flags)) & slot.flag != 0
        return int(np.bitwise_and.reduce(flags)) & slot.flag == 0

    @staticmethod
    def _words_of(slot: FieldSlot, rows: Words) -> tuple[tuple[Slots, ...], Bytes]:
        """Return the words of a field, and where it has a value."""
        flags = rows[:, slot.flag_word] & np.uint64(slot.flag)
        valid = (flags == 0 if slot.is_key else flags != 0).view(np.uint8)
        words = tuple(
            [np.ascontiguousarray(rows[:, slot.word + number]).view(np.int64) for number in range(slot.words)]
        )
        return words, valid


def _never_expiring(words: Words, valid: Bytes) -> Words:
    """Return the expiry words in which a null is for ever: ``null <= watermark`` is not true in Spark either."""
    return np.where(valid == 0, np.uint64(NEVER), words)

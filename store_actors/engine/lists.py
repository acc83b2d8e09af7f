"""State that grows with its group: the lists of one table, whose elements are words as ``words.py`` makes them.

HLL sketches are such lists, of coupons (``hll_kernels.py``); Apache DataSketches has bytes for them (version 1 of its HLL, registers of
a byte).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from store_actors.engine import count_kernels, hll_kernels, list_kernels
from store_actors.engine.arrays import Bytes, Slots, Words
from store_actors.engine.hash_kernels import ELEMENT_SECRETS, secret_words
from store_actors.engine.layout import FieldSlot, ListSlot, Sketch
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.strings import StringPool
from store_actors.engine.words import check_countable, decode_column, decode_nested, encode_column, is_text, words_of


class ListPool:
    """The elements of all lists of a table; a row has two words of each list: its extent, and its length.

    Lists are only ever appended to, so a row of an earlier version keeps what it had, by its own two words. Extents that no row has
    any more stay until the pool is rebuilt (``compaction.py``).
    """

    def __init__(self, seed: int = 0, memory: Memory = HEAP) -> None:
        self.memory = memory
        self._secret: Words = secret_words(seed, "elements", ELEMENT_SECRETS)
        self.arena: Words = memory.zeros(1 << 6, np.uint64)
        self.used = 0

    @property
    def nbytes(self) -> int:
        """Memory of the lists, in bytes."""
        return self.arena.nbytes

    def append(self, rows: Words, targets: Slots, field: ListSlot, values: Words, valid: Bytes, column: int) -> None:
        """Add a column of values to the lists of ``rows[targets]``, in order; nulls are left out."""
        row = 0
        while True:
            row, self.used = list_kernels.append(
                self.arena, self.used, self._secret, rows, targets, field.word, values, valid, column, field.width,
                field.kind, row,
            )  # fmt: skip
            if row == len(targets):
                return
            self._grow_for(field, int(rows[targets[row], field.word + 1]))

    def append_counted(
        self, rows: Words, targets: Slots, field: ListSlot, values: Words, valid: Bytes, column: int, often: int
    ) -> None:
        """Count a column of values in the lists of ``rows[targets]``: each once, or (``often``) as the column of that number says."""
        width = field.width - 1
        counts = np.ones(len(targets), np.int64) if often < 0 else values[often].view(np.int64)
        present = np.flatnonzero((valid[column] != 0) & (counts > 0) & ((often < 0) | (valid[often] != 0)))
        words = [values[column + number, present] for number in range(width)]
        slots = targets[present]
        # Equal values of a group follow each other, and become one element.
        order = np.lexsort((*words, slots))
        slots, words = slots[order], [word[order] for word in words]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = slots[1:] != slots[:-1]
        for word in words:
            is_first[1:] |= word[1:] != word[:-1]
        firsts = np.flatnonzero(is_first)
        totals = np.add.reduceat(counts[present][order], firsts) if len(firsts) else np.empty(0, np.int64)
        elements = np.column_stack([*(word[firsts] for word in words), totals.view(np.uint64)]).reshape(-1)
        # Each as a list of its own.
        begins = np.arange(len(firsts), dtype=np.uint64) * np.uint64(field.width)
        lists = np.stack([begins, np.ones(len(firsts), np.uint64)])
        self.merge(rows, slots[firsts], field, np.ascontiguousarray(elements), lists, 0)

    def merge(
        self, rows: Words, targets: Slots, field: ListSlot, source: Words | None, values: Words, column: int
    ) -> None:
        """Add whole lists, given by two columns of `values`, to those of ``rows[targets]``; they lie in `source`, or (None) here."""
        row = element = 0
        while True:
            common = (rows, targets, field.word, self.arena if source is None else source, values, column, field.width)
            if field.is_counted:
                row, element, self.used = count_kernels.merge_counted(self.arena, self.used, *common, row, element)
            else:
                row, element, self.used = list_kernels.merge(
                    self.arena, self.used, self._secret, *common, field.kind, row, element
                )
            if row == len(targets):
                return
            self._grow_for(field, int(rows[targets[row], field.word + 1]))

    def merge_sketches(
        self, rows: Words, targets: Slots, field: ListSlot, source: Words | None, begins: Slots, lengths: Slots
    ) -> None:
        """Add the lists of HLL sketches, which begin at ``source[begins]`` (None: in the arena), to those of ``rows[targets]``.

        Raises
        ------
        InvalidRequestError
            Of sketches that must have one precision, in Spark's words. The rows are half changed.
        """
        assert field.sketch is not None, "only sketches are merged so"
        elements = self.arena if source is None else source
        row = element = 0
        while True:
            row, element, used = hll_kernels.merge(
                self.arena, self.used, rows, targets, field.word, self.arena if source is None else source, begins, lengths,
                int(field.sketch.may_differ), row, element,
            )  # fmt: skip
            if used < 0:
                marks = (self.arena[rows[targets[row], field.word]], elements[begins[row] + element])
                ks = " and ".join(str(int(mark) & 31) for mark in marks)
                raise InvalidRequestError(
                    f"[HLL_UNION_DIFFERENT_LG_K] Sketches have different `lgConfigK` values: {ks}. Set the `allowDifferentLgConfigK` "
                    "parameter to true to call `hll_union_agg` with different `lgConfigK` values; the batch was not committed; state "
                    "and checkpoint are as before it"
                )
            self.used = used
            if row == len(targets):
                return
            self._grow_for(field, int(rows[targets[row], field.word + 1]))

    def enter(self, field: ListSlot, source: Words, begins: Slots, lengths: Slots) -> Slots:
        """Take in new lists, whose elements begin at ``source[begins]``; returns their extents."""
        offsets = self.copy(field, source, begins, lengths)
        self.index(field, offsets, lengths)
        return offsets

    def copy(self, field: ListSlot, source: Words, begins: Slots, lengths: Slots) -> Slots:
        """Return :meth:`enter` without what finds the elements of sets, which :meth:`index` makes."""
        self._grow(list_kernels.room(lengths, field.width, field.kind))
        offsets = np.empty(len(lengths), np.int64)
        self.used = list_kernels.store(self.arena, self.used, source, begins, lengths, field.width, field.kind, offsets)
        return offsets

    def index(self, field: ListSlot, offsets: Slots, lengths: Slots) -> None:
        """Make what finds the elements of sets."""
        if field.kind != list_kernels.LIST:
            list_kernels.make_indexes(self.arena, offsets, lengths, field.width, field.kind, self._secret)

    def detach(self) -> None:
        """Leave the arena to those who read it."""
        self.arena = self.memory.copied(self.arena)

    def _grow_for(self, field: ListSlot, length: int) -> None:
        self._grow(2 * (length + 1) * (field.width + 1))

    def reserve(self, words: int) -> None:
        """Make room for `words` words in all."""
        if words > len(self.arena):
            self._grow(words - self.used)

    def _grow(self, more: int) -> None:
        """Make room for `more` words: half more than there is, at least."""
        if self.used + more > len(self.arena):
            size = max(self.used + more, len(self.arena) + len(self.arena) // 2)
            self.arena = self.memory.larger(self.arena, self.used, size)

    def measure(self, slot: FieldSlot, offsets: Slots, lengths: Slots, pool: StringPool, out: Slots) -> None:
        """Add the bytes of lists to `out`."""
        element = slot.type.value_type
        is_counted = pa.types.is_struct(element)
        kind = element.field(0).type if is_counted else element
        width = words_of(kind) + is_counted
        out += lengths * (8 * width)
        if is_text(kind):
            list_kernels.measure(self.arena, offsets, lengths, width, pool.offsets, out)

    def decode(self, slot: FieldSlot, offsets: Slots, lengths: Slots, pool: StringPool) -> pa.Array:
        """Return the Arrow array of lists."""
        ends = np.concatenate([[0], np.cumsum(lengths)])
        check_countable(int(ends[-1]), "elements of lists")
        element = slot.type.value_type
        is_counted = pa.types.is_struct(element)
        kind = element.field(0).type if is_counted else element
        words = np.empty((words_of(kind) + is_counted, int(ends[-1])), np.uint64)
        list_kernels.gather(self.arena, offsets, lengths, words)
        columns = tuple(word.view(np.int64) for word in words[: words_of(kind)])
        values = decode_column(kind, columns, np.ones(words.shape[1], np.uint8), pool)
        view_type = slot.view_type.value_type
        if slot.nested is not None:
            values = decode_nested(values, view_type.field(0).type if is_counted else view_type)
        if is_counted:
            values = pa.StructArray.from_arrays([values, pa.array(words[-1].view(np.int64))], fields=list(view_type))
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, type=slot.view_type)


def element_words(array: pa.ListArray, field: ListSlot, pool: StringPool) -> tuple[Words, Slots, Slots]:
    """Return the words of all elements of an Arrow array of lists; where in them each list begins, and its length."""
    elements = array.flatten()
    words: list[Words] = []
    for column in elements.flatten() if field.is_counted else [elements]:
        encode_column(column, pool, np.ones(len(column), np.uint8), words)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    begins = (np.cumsum(lengths) - lengths) * len(words)
    return np.ascontiguousarray(np.stack(words, axis=1)).reshape(-1), begins, lengths


def opened(sketch: Sketch, words: Words, valid: Bytes, pool: StringPool) -> tuple[Words, Slots, Slots]:
    """Return the values of a column, or the sketches that they are, as lists: all elements, where each begins, and its length.

    Parameters
    ----------
    words, valid
        Integers, or ids in the pool, and which of them are not null.
    """
    lengths = np.empty(len(words), np.int64)
    if sketch.is_union:
        sizes = (pool.arena, pool.offsets, words, valid)
        elements = np.empty(1, np.uint64)
        elements = np.empty(max(1, hll_kernels.open_sketches(*sizes, 0, elements, lengths)), np.uint64)
        hll_kernels.open_sketches(*sizes, 1, elements, lengths)
        return elements, np.cumsum(lengths) - lengths, lengths
    coupons = np.empty(len(words), np.uint64)
    if sketch.is_text:
        hll_kernels.coupons_of_texts(pool.arena, pool.offsets, words, coupons)
    else:
        hll_kernels.coupons_of_longs(words, coupons)
    marks = np.full(len(words), sketch.lg_k, np.uint64)
    elements = np.column_stack([marks, coupons]).reshape(-1)
    lengths[:] = np.where((valid != 0) & (coupons != 0), 2, 0)
    return elements, np.arange(len(words), dtype=np.int64) * 2, lengths


def sketch_bytes(lists: pa.ListArray, lg_k: int) -> pa.Array:
    """Return the bytes of the sketches that lists are; one without elements is an empty one of this precision."""
    lengths = np.array(pc.list_value_length(lists), np.int64)
    # Their 32 bits, which Arrow has a sign for.
    elements = np.array(lists.flatten(), np.int64).view(np.uint64)
    out, ends = np.empty(len(elements) + len(lists) + 1, np.uint64), np.empty(len(lists), np.int64)
    hll_kernels.marked(elements, np.cumsum(lengths), lg_k, out, ends)
    sizes = np.zeros(len(lists), np.int64)
    hll_kernels.write_sketches(out, ends, 0, sizes, np.empty(1, np.uint8))
    check_countable(int(sizes.sum()), "bytes of sketches")
    content = np.zeros(max(1, int(sizes.sum())), np.uint8)
    hll_kernels.write_sketches(out, ends, 1, sizes, content)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(lists), [None, pa.py_buffer(offsets), pa.py_buffer(content)])

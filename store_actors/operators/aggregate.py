"""The shard of an aggregation, and what it emits. Pure logic.

Life of a batch: :meth:`AggregateShard.apply` folds the batch into the newest version and returns the :class:`Change` (what the
delta file will hold); then :meth:`AggregateShard.commit` once the change is durable and counted, or :meth:`AggregateShard.abort`.
An epoch's rows come in pieces instead: :meth:`AggregateShard.open`, :meth:`AggregateShard.fold` for each piece, and
:meth:`AggregateShard.seal`, which returns the change; a batch is an epoch of one piece.

Versions (:mod:`store_actors.engine.versions`): state is changed in place and each version keeps what it overwrote. Aborting, and going
back to one of the last versions, put those rows back; nothing is reloaded when Spark replays a batch.

Event time is shared by all shards of an operator (:mod:`coordinator.model.watermarks`). As in Spark, a batch has two watermarks:
rows are late by the one before it, and what the other one has passed is closed. That is the watermark of the batches before, or, of
an operator that closes early, the one that includes the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, StateSchema
from coordinator.model.type_names import string_to_type
from store_actors.engine import count_kernels, fold_kernels
from store_actors.engine.arrays import Mask, Slots, Words, whole_numbers
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.layout import FieldSlot
from store_actors.engine.lists import sketch_bytes
from store_actors.engine.pieces import batches
from store_actors.engine.table import Touched
from store_actors.engine.unsafe_rows import MOST_BLOCK_BYTES, UnsafeBlock, are_supported
from store_actors.engine.versions import (
    CHANGE_COLUMN,
    REMOVED,
    UPDATED,
    UPDATED_AND_REMOVED,
    Change,
    UndoPart,
    VersionedTable,
)
from store_actors.engine.word_rows import EncodedBatch
from store_actors.engine.words import nested_keys
from store_actors.messages.requests import ShardInput

#: Stamps of rows have 32 bits.
_LAST_STAMP = 0xFFFFFFFF


@dataclass(slots=True)
class _OpenVersion:
    """What the pieces of an open version did so far.

    Attributes
    ----------
    first_stamp
        Rows with a stamp from it on were touched by the version.
    touched
        Slots of the groups that each piece touched; no group is gone before the end.
    late
        Keys of late rows.
    """

    first_stamp: int
    touched: list[Slots] = field(default_factory=list)
    late: list[Words] = field(default_factory=list)
    rows_in: int = 0

    def slots(self) -> Slots:
        """Return the slots of all groups that were touched, each once."""
        if len(self.touched) == 1:
            return self.touched[0]
        return np.unique(np.concatenate([np.empty(0, np.int64), *self.touched]))

    def rows_late(self) -> int:
        # Spark counts after it has added up the rows of each group, those of all its map tasks.
        return len(np.unique(np.concatenate(self.late), axis=0)) if self.late else 0


@dataclass(frozen=True, slots=True)
class UnsafeInput:
    """Rows of an aggregation in Spark's own format, whose first columns are those of ``raw_schema``.

    Attributes
    ----------
    rows_read
        Input rows that they stand for.
    """

    block: UnsafeBlock
    rows_read: int


class AggregateShard(VersionedTable):
    """Groups of one partition at its newest version, with the way back to the versions before."""

    held_bytes = 0

    _open: _OpenVersion
    _stamp = 0

    # -- a batch --------------------------------------------------------------------------------------------------

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Fold a batch into the newest version, as `version`, not yet committed.

        Parameters
        ----------
        watermark_ms
            Groups that it has passed are closed.
        late_ms
            Watermark by which rows are late; by default that of the version before.

        Raises
        ------
        InvalidRequestError
            Another change is pending, or `version` is not newer.
        SumOverflowError
            A sum that must not wrap overflowed. The shard is half changed, so its owner drops it.
        """
        self.open(version, late_ms)
        self._fold(rows)
        return self.seal(watermark_ms)

    def open(self, version: int, late_ms: int | None = None) -> None:
        """Begin a version, not yet committed, of which rows come in pieces; parameters and errors as of :meth:`apply`."""
        self.check_next(version, late_ms)
        self.begin(version)
        self._open = _OpenVersion(self._next_stamp())

    @cached_property
    def sent_fields(self) -> Sequence[FieldSlot]:
        """The fields of emitted groups, if they are words that Spark's own format has; empty otherwise."""
        layout = self.table.layout
        fields = [slot for slot in (*layout.keys, *layout.state) if not slot.name.startswith("__")]
        is_state = not any(accumulator.result for accumulator in self.schema.accumulators)
        are_words = are_supported(pa.schema([(slot.name, slot.view_type) for slot in fields]))
        return fields if is_state and are_words else ()

    @property
    def emits_at_seal(self) -> bool:
        """Whether groups are emitted when they are closed."""
        return self.schema.output_mode == "append"

    def fold(self, rows: ShardInput | UnsafeInput) -> ChangedGroups | None:
        """Fold a piece into the open version, and return the groups that it changed, as they are now.

        Returns
        -------
        ChangedGroups or None
            None if groups are emitted when they are closed.

        Raises
        ------
        SumOverflowError
            A sum that must not wrap overflowed. The shard is half changed, so its owner drops it.
        """
        slots = self._fold(rows)
        return None if self.emits_at_seal else ChangedGroups(self, self.table.columns(slots))

    def seal(self, watermark_ms: int) -> Change:
        """Close the groups that the watermark has passed, and return the open version's change."""
        open_version, table = self._open, self.table
        if not self.schema.keys and self.schema.output_mode != "append" and not open_version.touched:
            # Spark's global aggregate has its one row in every batch, even before any input came.
            self._note(table.touch_global_group(self._stamp))
        step = self.pending()
        step.watermark_ms = watermark_ms
        slots = open_version.slots()
        evicted, removed = self._expired(watermark_ms)
        step.parts.append(UndoPart(removed[:0], removed))
        # A stamp is never used again, and they grow.
        just_touched = (removed[:, 0] >> np.uint64(32)) >= np.uint64(open_version.first_stamp)
        rows = table.columns(slots)
        if len(evicted):
            rows = np.concatenate([rows[(table.rows[slots, 0] & LIVE) != 0], removed])
        kinds = np.concatenate(
            [
                np.zeros(len(rows) - len(evicted), np.int8),
                np.where(just_touched, UPDATED_AND_REMOVED, REMOVED).astype(np.int8),
            ]
        )
        return Change(
            version=step.version,
            base_version=step.base_version,
            delta=table.decode(rows).append_column(CHANGE_COLUMN, pa.array(kinds)),
            rows_updated=len(slots),
            rows_removed=len(evicted),
            rows_in=open_version.rows_in,
            rows_late=open_version.rows_late(),
            watermark_ms=watermark_ms,
        )

    def _fold(self, rows: ShardInput | UnsafeInput) -> Slots:
        """Fold rows in; return the slots of the groups that they changed."""
        # A group is stamped by the piece that changed it last: each piece shows what it changed.
        self._next_stamp()
        touched = Touched.nothing(self.table.layout.row_words)
        for encoded in self._encoded(rows):
            on_time = self._drop_late(encoded, self._open.late)
            touched = touched.joined(self.table.accumulate(on_time, self._stamp))
        self._open.rows_in += rows.rows_read
        slots = self._note(touched)
        # Without such sums no row is copied.
        if self.table.layout.fails_on_overflow:
            self.table.layout.check_overflow(self.table.taken(slots))
        return slots

    def _encoded(self, rows: ShardInput | UnsafeInput) -> Iterator[EncodedBatch]:
        if isinstance(rows, UnsafeInput):
            yield self.table.encode(rows.block)
            return
        for table, partial in ((rows.raw, False), (rows.partial, True)):
            for batch in batches(table, self.table.piece_bytes) if table.num_rows else ():
                yield self.table.encode(batch, partial=partial)

    def _note(self, touched: Touched) -> Slots:
        """Note the way back from a change of the open version; return the slots that it touched."""
        layout = self.table.layout
        created = self.table.columns(touched.created, layout.flag_words + layout.key_words)
        self.pending().parts.append(UndoPart(created, touched.before))
        slots = np.concatenate([touched.created, touched.changed])
        if len(slots):
            self._open.touched.append(slots)
        return slots

    def _next_stamp(self) -> int:
        """Return a stamp that no row has."""
        self._stamp += 1
        if self._stamp > _LAST_STAMP:
            self.table.used_rows()[:, 0] &= np.uint64(_LAST_STAMP)
            self._stamp = 1
        return self._stamp

    def _drop_late(self, batch: EncodedBatch, late: list[Words]) -> EncodedBatch:
        """Return the batch without its late rows, and add the keys of these to `late`."""
        word = self.table.layout.expiry_word
        if word < 0:
            return batch
        expiry = batch.keys[:, word - self.table.layout.flag_words].view(np.int64)
        keep = expiry > self.late_ms * 1000
        if keep.all():
            return batch
        dropped = batch.take(~keep)
        late.append(np.column_stack([dropped.keys, dropped.nulls]))
        return batch.take(keep)

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the rows that a batch emits, read off its delta, so that a retry of a committed batch emits the same."""
        return output_of(delta, self.schema.output_mode)


@dataclass(frozen=True, slots=True)
class ChangedGroups:
    """Groups that a piece changed, as words: they can be read until the shard changes again.

    Attributes
    ----------
    rows
        As of :meth:`~store_actors.engine.table.GroupTable.columns`.
    """

    shard: AggregateShard
    rows: Words

    def table(self) -> pa.Table:
        """Return what the operator emits for the groups."""
        return results_of(self.shard.table.decode(self.rows), self.shard.schema)

    def block(self) -> npt.NDArray[np.generic] | None:
        """Return what is emitted as rows in Spark's own format; None if that is not the state's words, or is too large."""
        fields, table = self.shard.sent_fields, self.shard.table
        if not fields or table.longest_row(self.rows, fields) * len(self.rows) > MOST_BLOCK_BYTES:
            return None
        return table.unsafe_block(self.rows, fields)


def output_of(delta: pa.Table, output_mode: str) -> pa.Table:
    """Return the rows that an aggregation emits for a delta.

    ``update``: every group that the batch changed. ``append``: every group that its watermark closed. (``complete``
    emits the whole version: :meth:`AggregateShard.snapshot`.)
    """
    change = delta.column(CHANGE_COLUMN)
    is_kept = pc.not_equal(change, REMOVED if output_mode == "update" else UPDATED)
    return delta.filter(is_kept).drop_columns([CHANGE_COLUMN])


def results_of(rows: pa.Table, schema: StateSchema) -> pa.Table:
    """Return the rows that an operator emits: its keys, and of each accumulator the fields that it emits.

    These are its state, except where Spark's final expression does not take that.
    """
    if not any(accumulator.result for accumulator in schema.accumulators):
        return rows
    state = {field.name for field in schema.state_fields}
    columns = {name: rows.column(name) for name in rows.column_names if name not in state}
    for accumulator in schema.accumulators:
        emitted = [rows.column(field.name) for field in accumulator.state]
        if accumulator.result and rows.num_rows == 0:
            # Nothing says how wide a row is.
            emitted = [pa.array([], string_to_type(field.type)) for field in accumulator.emitted]
        elif accumulator.result:
            emitted = _RESULTS[accumulator.kind](accumulator, emitted[0].combine_chunks())
        columns.update(zip((field.name for field in accumulator.emitted), emitted, strict=True))
    return pa.table(columns)


def _words(state: pa.Array) -> Words:
    """Return the words of states that have a fixed number of them, a row each."""
    if len(state) == 0:
        return np.empty((0, state.type.byte_width // 8), np.uint64)
    words = np.frombuffer(state.buffers()[1], np.uint64).reshape(-1, state.type.byte_width // 8)
    return np.array(words[state.offset : state.offset + len(state)])


def _registers(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    out = np.empty((len(state), 2))
    fold_kernels.sum_registers(_words(state), out)
    return [pa.array(out[:, 0]), pa.array(out[:, 1])]


def _cast(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    return [state.cast(string_to_type(accumulator.result[0].type))]


def _counted(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    """Return the most frequent value, or percentiles (options ``percentages`` and ``rule`` of ``count_kernels.choose``)."""
    counted = state.flatten()
    values, counts = counted.field(0), np.array(counted.field(1), np.int64)
    ends = np.cumsum(np.array(pc.list_value_length(state), np.int64))
    percentages = np.array(accumulator.options.get("percentages", ()), np.float64)
    if "percentages" not in accumulator.options:
        comparable = nested_keys(values) if pa.types.is_nested(values.type) else values
        codes = np.array(comparable.dictionary_encode().indices, np.uint64)
        chosen = np.empty(len(state), np.int64)
        count_kernels.most_frequent(ends, codes, counts, chosen)
        return [values.take(pa.array(chosen, mask=chosen < 0))]
    out, valid = np.zeros((len(state), len(percentages))), np.zeros(len(state), np.uint8)
    rule = int(accumulator.options["rule"])
    count_kernels.choose(ends, _as_doubles(values), counts, percentages, rule, out, valid)
    return [_of_doubles(out, valid != 0, string_to_type(accumulator.result[0].type))]


def _as_doubles(values: pa.Array) -> npt.NDArray[np.float64]:
    if pa.types.is_floating(values.type):
        return np.array(values.cast(pa.float64()))
    return np.array(_integers(values), np.float64)


def _integers(values: pa.Array) -> pa.Array:
    return (values.cast(pa.int32()) if pa.types.is_date32(values.type) else values).cast(pa.int64())


def _of_doubles(numbers: npt.NDArray[np.float64], valid: Mask, kind: pa.DataType) -> pa.Array:
    """Cast numbers, or lists of them, to a type; integers are truncated as in Java."""
    is_list = pa.types.is_list(kind)
    element = kind.value_type if is_list else kind
    flat = numbers.reshape(-1)
    if pa.types.is_floating(element):
        values = pa.array(flat).cast(element)
    elif pa.types.is_date32(element):
        values = pa.array(flat.astype(np.int32)).cast(element)
    else:
        values = pa.array(whole_numbers(flat)).cast(pa.int64()).cast(element)
    if not is_list:
        return pc.if_else(pa.array(valid), values, pa.scalar(None, element))
    ends = np.arange(len(numbers) + 1, dtype=np.int32) * numbers.shape[1]
    return pa.ListArray.from_arrays(pa.array(ends), values, type=kind, mask=pa.array(~valid))


def _sketch(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    """Return the bytes of Spark's CountMinSketch: version 1, total, depth, width, factors, table, all big-endian."""
    words, depth = _words(state), int(accumulator.options["depth"])
    width = (words.shape[1] - 1 - depth) // depth
    head = np.tile(np.array([1], ">i4").view(np.uint8), (len(words), 1))
    shape = np.tile(np.array([depth, width], ">i4").view(np.uint8), (len(words), 1))
    big = np.ascontiguousarray(words.astype(">u8")).view(np.uint8).reshape(len(words), -1)
    content = np.concatenate([head, big[:, :8], shape, big[:, 8:]], axis=1)
    fixed = pa.Array.from_buffers(pa.binary(content.shape[1]), len(words), [None, pa.py_buffer(content)])
    return [fixed.cast(pa.binary())]


def _bins(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    """Return place and height of the bins that are used; null where none is."""
    words, kind = _words(state), string_to_type(accumulator.result[0].type)
    used = words[:, 0].view(np.int64) if len(words) else np.empty(0, np.int64)
    bins = words[:, 1:].view(np.float64).reshape(len(words), -1, 2)
    chosen = bins[np.arange(bins.shape[1]) < used[:, np.newaxis]]
    position, height = kind.value_type
    positions = _of_doubles(np.ascontiguousarray(chosen[:, :1]), np.ones(len(chosen), np.bool_), position.type)
    values = pa.StructArray.from_arrays([positions, pa.array(chosen[:, 1])], fields=[position, height])
    ends = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
    return [pa.ListArray.from_arrays(pa.array(ends), values, type=kind, mask=pa.array(used == 0))]


def _hll_sketch(accumulator: Accumulator, state: pa.Array) -> list[pa.Array]:
    return [sketch_bytes(state, int(accumulator.options["lg_k"]))]


_RESULTS: Mapping[AccumulatorKind, Callable[[Accumulator, pa.Array], list[pa.Array]]] = {
    AccumulatorKind.DISTINCT_REGISTERS: _registers,
    AccumulatorKind.COUNTED: _counted,
    AccumulatorKind.COUNT_MIN: _sketch,
    AccumulatorKind.COUNT_MIN_BYTES: _sketch,
    AccumulatorKind.HISTOGRAM: _bins,
    AccumulatorKind.HLL_SKETCH: _hll_sketch,
    AccumulatorKind.HLL_UNION: _hll_sketch,
    AccumulatorKind.BITMAP: _cast,
    AccumulatorKind.BITMAP_OR: _cast,
}

"""First rows: of each key (``dropDuplicates``, ``dropDuplicatesWithinWatermark``), and of a query (``limit(n)``). Pure logic.

Of duplicates, state is the keys seen, with the time at which a key is forgotten: its event time, if that is one of the keys, or event
time and delay of its first row (``within watermark``). The rows themselves are not state; the delta carries the first ones, so that a
retry of a committed batch emits the same rows.

Schema: ``keys``; ``inputs`` are the other columns of a row, of any type; the accumulators are empty, or one ``VALUE``: the expiry,
which then is an input, too. Option ``late_us``: how long before its expiry a row is late already, in microseconds (the delay,
within watermark; else 0). Option ``late``: the input by whose time a row is late, where that is not a key; it is not part of what is
emitted.

Of a limit, one shard gets all rows. Its state is one row without a key: the number of rows emitted so far. The emitted rows are not
part of the state and may have any types. A delta has the emitted rows of its batch, each with the number of rows up to it, so that a
retry of a committed batch emits the same rows. A batch that emits nothing changes nothing.

Schema: no keys; ``inputs`` are the columns of a row; one ``VALUE``, int64: the number of rows emitted.
Option ``n``: the largest number of rows to emit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import StateSchema
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.pieces import batches
from store_actors.engine.versions import (
    CHANGE_COLUMN,
    REMOVED,
    UPDATED,
    UPDATED_AND_REMOVED,
    Change,
    UndoPart,
    VersionedTable,
)
from store_actors.messages.requests import ShardInput


@dataclass(frozen=True, slots=True)
class _FirstRows:
    """The rows of a piece whose keys are new: the slots of the keys, their words, and the chunks of each other column."""

    slots: Slots
    words: Words
    payload: Sequence[Sequence[pa.Array]]


class DeduplicateShard(VersionedTable):
    """Keys seen by one partition."""

    #: A first row is emitted as it comes.
    emits_at_seal = False
    held_bytes = 0

    #: What the pieces of the open version did so far.
    _pieces: list[_FirstRows]
    _rows_in: int
    _rows_late: int

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        super().__init__(schema, seed, memory)
        self._late: str | None = schema.options.get("late")
        unseen = {self._late, *(field.name for field in schema.state_fields)}
        self._payload = [field.name for field in schema.inputs if field.name not in unseen]

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Keep the rows whose key is new; see :meth:`AggregateShard.apply`."""
        self.open(version, late_ms)
        self._fold(rows)
        return self.seal(watermark_ms)

    def open(self, version: int, late_ms: int | None = None) -> None:
        """Begin a version whose rows come in pieces; see :meth:`AggregateShard.open`."""
        self.check_next(version, late_ms)
        self.begin(version)
        self._pieces, self._rows_in, self._rows_late = [], 0, 0

    def fold(self, rows: ShardInput) -> pa.Table:
        """Keep the rows of a piece whose key is new, and return them: keys and payload."""
        first = self._fold(rows)
        keys = self.table.decode(first.words).select([field.name for field in self.schema.keys])
        return self._with_payload(keys, [first])

    def seal(self, watermark_ms: int) -> Change:
        """Forget the keys that the watermark has passed, and return the open version's change."""
        step = self.pending()
        step.watermark_ms = watermark_ms
        evicted, removed = self._expired(watermark_ms)
        step.add(UndoPart(removed[:0], removed))
        # A new row may take a slot of its own only, so the slots show which of the removed keys this version made.
        created = np.concatenate([np.empty(0, np.int64), *(piece.slots for piece in self._pieces)])
        older = removed[~np.isin(evicted, created)]
        return step.change(
            self._delta(created, evicted, older),
            rows_updated=len(created),
            rows_removed=len(evicted),
            rows_in=self._rows_in,
            rows_late=self._rows_late,
        )

    def _fold(self, rows: ShardInput) -> _FirstRows:
        batch = pa.Table.from_batches(batches(rows.raw, self.table.piece_bytes), rows.raw.schema)
        words = self.table.rows_of_table(batch)
        on_time = self._on_time(batch, words)
        words = self._dated(batch, words)
        step = self.pending()
        created, sources = self.table.insert(words[on_time], step.version & 0xFFFFFFFF)
        rows_of_keys = self._chosen(batch, on_time[sources])
        payload = [rows_of_keys.column(name).chunks for name in self._payload]
        first = _FirstRows(created, self.table.taken(created), payload)
        step.add(UndoPart(first.words, first.words[:0]))
        self._pieces.append(first)
        self._rows_in += rows.rows_read
        self._rows_late += len(words) - len(on_time)
        return first

    @staticmethod
    def _chosen(batch: pa.Table, indices: Slots) -> pa.Table:
        """Return some rows of a batch, in its order: a filter goes chunk by chunk, so that none grows past what Arrow counts."""
        if len(indices) == batch.num_rows:
            return batch
        is_kept = np.zeros(batch.num_rows, np.bool_)
        is_kept[indices] = True
        return batch.filter(pa.array(is_kept))

    def _dated(self, batch: pa.Table, words: Words) -> Words:
        """Return words of rows; within a watermark, a row without a time is never late, but its key is forgotten as one of 1970."""
        for field in self.schema.state_fields:
            column = batch.column(field.name)
            if column.null_count:
                epoch = pa.scalar(int(self.schema.options["late_us"])).cast(column.type)
                index = batch.schema.get_field_index(field.name)
                dated = batch.set_column(index, batch.schema.field(index), pc.fill_null(column, epoch))
                return self.table.rows_of_table(dated)
        return words

    def _on_time(self, batch: pa.Table, words: Words) -> Slots:
        if self._late is not None:
            times = batch.column(self._late).cast(pa.int64())
            # A row without a time is never late.
            return np.flatnonzero(pc.fill_null(pc.greater(times, self.late_ms * 1000), True).to_numpy())
        word = self.table.layout.expiry_word
        if word < 0:
            return np.arange(len(words))
        limit = self.late_ms * 1000 + int(self.schema.options.get("late_us", 0))
        return np.flatnonzero(words[:, word].view(np.int64) > limit)

    def _delta(self, created: Slots, evicted: Slots, removed: Words) -> pa.Table:
        """Return the open version's delta: of the created keys, those in `evicted` slots are gone again; others were removed."""
        state = self.table.decode(np.concatenate([*(piece.words for piece in self._pieces), removed]))
        kinds = np.where(np.isin(created, evicted), UPDATED_AND_REMOVED, UPDATED)
        kinds = np.concatenate([kinds, np.full(len(removed), REMOVED)]).astype(np.int8)
        return self._with_payload(state, self._pieces, len(removed)).append_column(CHANGE_COLUMN, pa.array(kinds))

    def _with_payload(self, state: pa.Table, pieces: Sequence[_FirstRows], removed: int = 0) -> pa.Table:
        """Return columns of the keys of pieces, and of some that were removed, with the other columns of their first rows."""
        for number, name in enumerate(self._payload):
            kind = self.schema.raw_schema().field(name).type
            chunks = [chunk for piece in pieces for chunk in piece.payload[number]]
            if removed:
                chunks.append(pa.nulls(removed, kind))
            state = state.append_column(name, pa.chunked_array(chunks, kind))
        return state

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the first rows: keys and payload."""
        first = delta.filter(pc.not_equal(delta.column(CHANGE_COLUMN), REMOVED))
        return first.select([*(field.name for field in self.schema.keys), *self._payload])


class LimitShard(VersionedTable):
    """The number of rows that were emitted.

    Raises
    ------
    InvalidRequestError
        The limit is negative.
    """

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        super().__init__(schema, seed, memory)
        self._limit = int(schema.options["n"])
        if self._limit < 0:
            raise InvalidRequestError("a limit is at least 0; nothing was changed; give another one", n=self._limit)
        (self._count_column,) = (field.name for field in schema.state_fields)
        self._payload = [field.name for field in schema.inputs]

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Emit the first rows of a batch, up to the limit; see :meth:`AggregateShard.apply`. No row is ever late."""
        step = self.begin(version)
        step.watermark_ms = watermark_ms
        previous = self.table.taken(self.table.live())
        count = int(previous[0, self.table.layout.state[0].word]) if len(previous) else 0
        counts = np.arange(count, min(self._limit, count + rows.raw.num_rows)) + 1
        delta = self._delta(rows.raw.slice(0, len(counts)), counts)
        if len(counts):
            newest = delta.select([self._count_column]).slice(len(counts) - 1)
            count_row = self.table.rows_of(newest.combine_chunks().to_batches()[0])
            self.table.put(count_row)
            count_row[:, 0] |= LIVE
            step.add(UndoPart(count_row[:0] if len(previous) else count_row, previous))
        return step.change(
            delta, rows_updated=int(len(counts) > 0), rows_removed=0, rows_in=rows.rows_read, rows_late=0
        )

    def _delta(self, rows: pa.Table, counts: Slots) -> pa.Table:
        payload = [rows.column(name) for name in self._payload]
        changes = pa.array(np.full(len(counts), UPDATED, np.int8))
        names = [self._count_column, *self._payload, CHANGE_COLUMN]
        return pa.table([pa.array(counts, pa.int64()), *payload, changes], names=names)

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a delta, whose last count is the state; see :meth:`VersionedTable.load`."""
        counts = delta.select([self._count_column, CHANGE_COLUMN])
        super().load(counts.slice(max(0, counts.num_rows - 1)), version, watermark_ms)

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the rows that the batch emits."""
        return delta.filter(pc.equal(delta.column(CHANGE_COLUMN), UPDATED)).select(self._payload)

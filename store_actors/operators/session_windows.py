"""Session windows: groups that end when nothing comes for a while. Pure logic.

Each input row is a session of its own, from its event time to event time and gap. Sessions of one key that overlap or touch
are one: from the first start to the last end, with what all their rows add up to. The rules are those of Spark 3.5
(``MergingSessionsIterator``, ``SessionWindowStateStoreRestoreExec``, ``StreamingSessionWindowStateManager``):

- Rows are late by the end of their own session, before anything is merged: a late row is dropped even if an open session
  would take it in, in complete mode, too. Late rows that are equal in key and time count as one (in Spark, those of one map task).
- Sessions and rows are merged in the order of their start; of rows with one start the one that ends first comes first. This is
  by which ``first`` and ``last`` decide.
- All sessions of a key that has a row on time count as updated; those whose start no session has any more, as removed.

Schema: ``keys`` end with ``__row``, which numbers the sessions; ``inputs`` begin with ``session_start`` and ``session_end``, and so
do the accumulators, as ``VALUE``. ``expiry_key`` is ``session_end``, or None where sessions stay open for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.schema import ROW_COLUMN, StateSchema
from store_actors.engine import session_kernels
from store_actors.engine.arrays import Bytes, Mask, Slots, Words
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.layout import Feed
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.multimap import MultiTable
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, UPDATED, UPDATED_AND_REMOVED, Change, UndoPart
from store_actors.engine.word_rows import EncodedBatch
from store_actors.messages.requests import ShardInput

#: Change of a session that was merged into another one; the row has its values before that.
MERGED = 3


_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_TIMES = ("session_start", "session_end")


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Sessions and rows of the keys of a batch, in order."""

    #: ``keys``, ``nulls``: Words and null bits of each key.
    keys: Words
    nulls: Words
    #: Sessions that these keys have.
    slots: Slots
    #: ``input_order``, ``input_piece``: Input rows in order, and the piece that each goes into.
    input_order: Slots
    input_piece: Slots
    #: ``piece_slot``, ``piece_session``: Pieces of the sessions with input: the session of the state (or -1) that each begins
    #: with, and which session it is of.
    piece_slot: Slots
    piece_session: Slots
    #: ``session_key``, ``session_times``: Key, start and end of the sessions with input.
    session_key: Slots
    session_times: Slots


@dataclass(frozen=True, slots=True)
class _Merged:
    """The sessions of a batch's keys after the batch."""

    #: ``rows``, ``is_new``: Sessions with input, and which of them have no row of the state to replace.
    rows: Words
    is_new: Mask
    #: ``replaced``, ``absorbed``: Rows of the state that are replaced under their number, and that go into these.
    replaced: Words
    absorbed: Words
    #: ``updated``, ``removed``: Sessions, as Spark counts them.
    updated: int
    removed: int


class SessionShard(MultiTable):
    """Open sessions of one partition."""

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        super().__init__(schema, seed, memory)
        assert tuple(field.name for field in schema.inputs[:2]) == _TIMES, "the first inputs are a session's times"
        assert tuple(field.name for field in schema.state_fields[:2]) == _TIMES, (
            "a session's state begins with its times"
        )
        self._key_schema = StateSchema.keyed(schema.keys[:-1], ())

    # -- a batch --------------------------------------------------------------------------------------------------

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Merge a batch into the open sessions and close those that the watermark has passed; see :meth:`AggregateShard.apply`."""
        self.check_next(version, late_ms)
        table, stamp = self.table, version & 0xFFFFFFFF
        batch, rows_late = self._on_time(self._encode(rows.raw))
        merged = self._merge(self._timeline(batch), batch, stamp)
        table.layout.check_overflow(merged.rows)
        # A session that grows keeps its number, so the delta has no removal of it. Its expiry changes in place: `put`
        # enters it in the expiry queue again, and eviction reads in the row whether an earlier entry still holds.
        table.remove_rows(merged.absorbed)
        slots = table.put(merged.rows)
        _, evicted = self._expired(watermark_ms)
        removed = evicted[evicted[:, 0] >> _S32 != np.uint64(stamp)]
        closed = table.rows[slots, 0] & LIVE == 0
        step = self.begin(version)
        step.watermark_ms = watermark_ms
        step.add(UndoPart(merged.rows[merged.is_new], np.concatenate([merged.replaced, merged.absorbed, removed])))
        return step.change(
            self._delta(merged, closed, removed),
            rows_updated=merged.updated,
            rows_removed=merged.removed + len(evicted),
            rows_in=rows.rows_read,
            rows_late=rows_late,
        )

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the sessions that a batch emits, read off its delta, without their number.

        ``append``: those that its watermark closed. ``update``: those that it changed. (``complete``: :meth:`snapshot`.)
        """
        codes = (
            [UPDATED, UPDATED_AND_REMOVED] if self.schema.output_mode == "update" else [REMOVED, UPDATED_AND_REMOVED]
        )
        is_kept = pc.is_in(delta.column(CHANGE_COLUMN), pa.array(codes, pa.int8()))
        return delta.filter(is_kept).drop_columns([ROW_COLUMN, CHANGE_COLUMN])

    # -- in -------------------------------------------------------------------------------------------------------

    def _encode(self, rows: pa.Table) -> EncodedBatch:
        numbered = rows.append_column(ROW_COLUMN, pa.array(np.zeros(rows.num_rows, np.int64)))
        return self.table.encode_table(numbered)

    def _on_time(self, batch: EncodedBatch) -> tuple[EncodedBatch, int]:
        """Return the batch without late rows, and how many these are; rows of one key and time count once, as in Spark."""
        closes = self.schema.expiry_key is not None
        if not closes and (self.schema.output_mode != "complete" or self.schema.delay_ms is None):
            return batch, 0
        keep = batch.values[1].view(np.int64) > self.late_ms * 1000
        if keep.all():
            return batch, 0
        late = batch.take(~keep)
        return batch.take(keep), len(np.unique(np.column_stack([late.keys, late.nulls, late.values[:2].T]), axis=0))

    # -- merging --------------------------------------------------------------------------------------------------

    def _timeline(self, batch: EncodedBatch) -> _Timeline:
        """Return the pieces of the batch's keys, from the state and from the batch, cut into sessions."""
        table = self.table
        start, end = (slot.word for slot in table.layout.state[:2])
        distinct = GroupTable(self._key_schema, table.seed)
        named = np.column_stack([batch.nulls, batch.keys[:, :-1]])
        numbers, sources = distinct.insert(named, 1)
        firsts = sources[np.argsort(numbers)]
        keys, nulls = np.ascontiguousarray(named[firsts, 1:]), named[firsts, 0]
        state_places, slots = table.match(keys, nulls)
        places = np.concatenate([state_places, distinct.find(named)])
        starts = np.concatenate([table.rows[slots, start], batch.values[0]]).view(np.int64)
        ends = np.concatenate([table.rows[slots, end], batch.values[1]]).view(np.int64)
        bounds, order = np.zeros(len(keys) + 1, np.int64), np.empty(len(places), np.int64)
        session_kernels.arrange(places, starts, ends, len(slots), bounds, order)
        input_order, input_piece = np.empty(len(batch), np.int64), np.empty(len(batch), np.int64)
        piece_state, piece_session, session_key = (np.empty(len(places), np.int64) for _ in range(3))
        times = np.empty((len(batch), 2), np.int64)
        pieces, sessions = session_kernels.cut(
            starts, ends, len(slots), bounds, order, input_order, input_piece, piece_state, piece_session, session_key, times
        )  # fmt: skip
        piece_state = piece_state[:pieces]
        piece_slot = np.full(pieces, -1)
        piece_slot[piece_state >= 0] = slots[piece_state[piece_state >= 0]]
        return _Timeline(
            keys, nulls, slots, input_order, input_piece, piece_slot, piece_session[:pieces], session_key[:sessions],
            times[:sessions],
        )  # fmt: skip

    def _merge(self, line: _Timeline, batch: EncodedBatch, stamp: int) -> _Merged:
        table, layout = self.table, self.table.layout
        of_state = np.flatnonzero(line.piece_slot >= 0)
        previous, owners = table.taken(line.piece_slot[of_state]), line.piece_session[of_state]
        is_first = np.diff(owners, prepend=-1) != 0
        rows = self._fold(line, batch, of_state, previous)
        number = layout.keys[-1].word
        is_new = np.ones(len(rows), np.bool_)
        is_new[owners] = False
        rows[is_new, number] = self.numbers(int(np.count_nonzero(is_new))).view(np.uint64)
        rows[owners[is_first], number] = previous[is_first, number]
        rows[:, layout.flag_words : number] = line.keys[line.session_key]
        rows[:, 0] &= _LOW32 & ~layout.key_mask
        rows[:, 0] |= line.nulls[line.session_key] | LIVE | np.uint64(stamp << 32)
        starts = previous[:, layout.state[0].word].view(np.int64)
        return _Merged(
            rows,
            is_new,
            previous[is_first],
            previous[~is_first],
            updated=len(line.slots) - len(previous) + len(rows),
            removed=int(np.count_nonzero(starts != line.session_times[owners, 0])),
        )

    def _fold(self, line: _Timeline, batch: EncodedBatch, of_state: Slots, previous: Words) -> Words:
        """Return times and accumulators of sessions with input: rows are folded into their pieces, then pieces into the first."""
        layout = self.table.layout
        pieces = np.tile(layout.initial, (len(line.piece_slot), 1))
        pieces[of_state] = previous
        order = line.input_order
        self._accumulate(
            layout.raw,
            pieces,
            line.input_piece,
            np.take(batch.values, order, axis=1),
            np.take(batch.valid, order, axis=1),
        )
        is_first = np.diff(line.piece_session, prepend=-1) != 0
        rows: Words = pieces[is_first]
        if len(rows) < len(pieces):
            self._accumulate(layout.partial, rows, line.piece_session[~is_first], *self._partials(pieces[~is_first]))
        for slot, times in zip(layout.state[:2], line.session_times.T, strict=True):
            rows[:, slot.word] = times.view(np.uint64)
            rows[:, slot.flag_word] |= np.uint64(slot.flag)
        return rows

    def _accumulate(self, feed: Feed, rows: Words, targets: Slots, values: Words, valid: Bytes) -> None:
        pool = self.table.pool
        session_kernels.fold(feed.operations, rows, targets, values, valid, feed.limits, pool.arena, pool.offsets)
        self.table.extend(feed, rows, targets, values, valid)

    def _partials(self, rows: Words) -> tuple[Words, Bytes]:
        """Return the state words of rows as the columns of a batch of partial accumulators; their lists are the table's own."""
        state = self.table.layout.state
        valid = [
            ((rows[:, slot.flag_word] & np.uint64(slot.flag)) != 0).astype(np.uint8)
            for slot in state
            for _ in range(slot.words)
        ]
        return np.ascontiguousarray(rows[:, state[0].word :].T), np.stack(valid)

    # -- out ------------------------------------------------------------------------------------------------------

    def _delta(self, merged: _Merged, closed: Mask, removed: Words) -> pa.Table:
        kinds = [
            np.where(closed, UPDATED_AND_REMOVED, UPDATED),
            np.full(len(merged.absorbed), MERGED),
            np.full(len(removed), REMOVED),
        ]
        rows = self.table.decode(np.concatenate([merged.rows, merged.absorbed, removed]))
        return rows.append_column(CHANGE_COLUMN, pa.array(np.concatenate(kinds), pa.int8()))

"""The state of one side of a stream-stream join. Pure logic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, StateSchema
from store_actors.engine.arrays import Mask, Slots, Words, distinct
from store_actors.engine.expiry_queue import NEVER
from store_actors.engine.frozen import FrozenRows
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.layout import FieldSlot
from store_actors.engine.memory import Memory
from store_actors.engine.multimap import MultiTable
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import UndoPart, VersionStep
from store_actors.engine.words import decode_column
from store_actors.operators.join_schema import MATCHED_COLUMN, SIDE_COLUMN, JoinOptions, JoinType


@dataclass(slots=True)
class SideRows:
    """New rows of a side that can match or must be kept."""

    #: The rows as words of the side's table; numbers are yet to be given.
    words: Words
    #: Which of them have no null in a key compared by ``=``.
    probes: Slots
    matched: Mask
    #: Rows of an outer side that cannot match anything: emitted at once, never kept.
    excluded: pa.Table
    late: int


class JoinSide(MultiTable):
    """Rows of one side that may still match, by join key, and versions of them.

    Parameters
    ----------
    side
        0 left, 1 right.
    """

    def __init__(
        self,
        schema: StateSchema,
        options: JoinOptions,
        side: int,
        stored: tuple[str, ...],
        seed: int,
        memory: Memory,
    ) -> None:
        named = {field.name: field for field in schema.inputs}
        values = [
            *([Field(MATCHED_COLUMN, "bool")] if options.is_marked(side) else []),
            *(named[name] for name in stored),
        ]
        super().__init__(
            StateSchema(
                keys=schema.keys,
                inputs=(),
                accumulators=tuple(Accumulator(AccumulatorKind.VALUE, (), (field,)) for field in values),
                expiry_key=options.expiry[side],
                delay_ms=None,
                output_mode="append",
            ),
            seed,
            memory,
        )
        self._compacts_itself = False  # it is for the join to say, which holds the strings of both sides in one pool
        layout = self.table.layout
        slots = {slot.name: slot for slot in (*layout.keys, *layout.state)}
        if options.expiry[side] is not None and layout.expiry_word < 0:
            raise InvalidRequestError(
                "a join's expiry is no column of its side, nor a key", column=options.expiry[side]
            )
        self._side = side
        self._is_outer = options.join_type.is_outer(side)
        self._event_time, self._pre = options.event_time[side], options.pre[side]
        self._slots: dict[str, FieldSlot] = slots
        self._given = tuple(slot for slot in slots.values() if slot.name not in (ROW_COLUMN, MATCHED_COLUMN))
        self._number = slots[ROW_COLUMN].word
        self._time = -1 if options.as_of is None else slots[options.as_of.times[side]].word
        self._matched = slots.get(MATCHED_COLUMN)
        # Spark keeps rows whose key is null out of a join, but for a full outer one, where it takes nulls for equal.
        unequal = () if options.join_type is JoinType.FULL_OUTER else layout.keys
        self._plain_nulls = layout.null_bits(slot for slot in unequal if slot.name not in options.null_safe)
        #: Fields of :meth:`output`.
        self.output_fields = tuple(slots[name] for name in options.output[side])
        #: Slots of rows that a pending version made, and of older ones that it marked as matched.
        self._new: Slots = np.empty(0, np.int64)
        self._marked: list[Slots] = []
        self._removed: list[Words] = []
        self._step: VersionStep | None = None

    # -- a batch --------------------------------------------------------------------------------------------------

    def start(self, version: int, watermark_ms: int, first_number: int) -> None:
        """Begin a version, as :meth:`begin`; `first_number` is the first of the numbers that new rows get."""
        self._step = self.begin(version)
        self._step.watermark_ms = watermark_ms
        self._first_number = first_number
        self._new, self._marked, self._removed = np.empty(0, np.int64), [], []

    def read(self, rows: pa.Table) -> SideRows:
        """Return new rows as slots, without late rows and rows that neither can match nor are emitted."""
        count = rows.num_rows
        if self._event_time is not None:
            time = rows.column(self._event_time).cast(pa.int64())
            rows = _filtered(rows, pc.fill_null(pc.greater(time, self.late_ms * 1000), True))
        late = count - rows.num_rows
        excluded = rows.slice(0, 0)
        if self._pre is not None:
            passes = pc.fill_null(rows.column(self._pre), False)
            if self._is_outer:
                excluded = rows.filter(pc.invert(passes))
            rows = _filtered(rows, passes)
        words = self._words(rows)
        has_null = np.zeros(len(words), np.bool_)
        for word, bits in self._plain_nulls.items():
            has_null |= (words[:, word] & bits) != 0
        if has_null.any() and not self._is_outer:
            words, has_null = words[~has_null], np.zeros(len(words) - int(has_null.sum()), np.bool_)
        return SideRows(words, np.flatnonzero(~has_null), np.zeros(len(words), np.bool_), excluded, late)

    def _words(self, rows: pa.Table) -> Words:
        table = self.table
        words = table.rows_of_table(rows, self._given)
        for slot in table.layout.keys:
            if pa.types.is_floating(slot.type):
                # Equal keys are equal words: Spark joins -0.0 with 0.0, and every NaN with every other.
                values = words[:, slot.word].view(np.float64) + 0.0
                values[np.isnan(values)] = np.nan
                words[:, slot.word] = values.view(np.uint64)
        if self._matched is not None:
            words[:, self._matched.flag_word] |= np.uint64(self._matched.flag)
        return words

    def enter(self, rows: SideRows, chosen: Mask | None, first_number: int) -> int:
        """Keep the new rows that `chosen` selects (None: all); return their number."""
        words = rows.words if chosen is None else rows.words[chosen]
        if self._matched is not None:
            words[:, self._matched.word] = rows.matched
        words[:, self._number] = np.arange(first_number, first_number + len(words)).view(np.uint64)
        assert self._step is not None
        touched = self.table.upsert(words, self._step.version & 0xFFFFFFFF)
        self._new = touched.created
        key_end = self.table.layout.flag_words + self.table.layout.key_words
        created = words[:, :key_end].copy()
        created[:, 0] |= LIVE
        self._step.add(UndoPart(created, touched.before))
        return len(words)

    def mark(self, slots: Slots) -> None:
        """Note that kept rows were matched."""
        if self._matched is None:
            return
        word = self._matched.word
        slots = distinct(slots[self.table.rows[slots, word] == 0])
        older = slots[self.table.rows[slots, self._number].view(np.int64) < self._first_number]
        self._keep(self.table.taken(older))
        self.table.will_change(slots)
        self.table.rows[slots, word] = 1
        self._marked.append(older)

    def take_out(self, slots: Slots) -> Words:
        """Remove kept rows and return them."""
        return self._gone(self.table.remove_rows(self.table.taken(slots)))

    def expire(self, watermark_ms: int) -> Words:
        """Remove the rows that the watermark has passed and return them."""
        return self._gone(self.table.evict(watermark_ms * 1000))

    def keep_until(self, slots: Slots, until: Slots) -> None:
        """Have kept rows expire at other times, in microseconds."""
        word = self.table.layout.expiry_word
        changes = self.table.rows[slots, word].view(np.int64) != until
        slots, until = slots[changes], until[changes]
        rows = self.table.taken(slots)
        is_older = self.arrival(rows) < self._first_number
        self._keep(rows[is_older])
        self._marked.append(slots[is_older])
        rows[:, word] = until.view(np.uint64)
        (slot,) = (slot for slot in self.table.layout.state if slot.word == word)
        rows[until == NEVER, slot.flag_word] &= ~np.uint64(slot.flag)
        self.table.put(rows)

    def count_new(self, rows: Words) -> int:
        """Return how many of the rows came with the pending version."""
        return int(np.count_nonzero(self.arrival(rows) >= self._first_number))

    def _gone(self, slots: Slots) -> Words:
        rows = self.table.taken(slots)
        rows[:, 0] |= LIVE
        older = rows[self.arrival(rows) < self._first_number]
        self._keep(older)
        self._removed.append(older)
        return rows

    def _keep(self, before: Words) -> None:
        # Parts are undone newest first: a row that was marked and then removed comes back unmarked.
        assert self._step is not None
        if len(before):
            self._step.add(UndoPart(np.empty((0, before.shape[1]), np.uint64), before))

    def changed(self) -> tuple[Words, Words]:
        """Return the rows that a pending version added or newly matched, and the rows of the version before that it removed."""
        slots = np.concatenate([self._new, *self._marked])
        rows = self.table.taken(slots)
        return rows[(rows[:, 0] & LIVE) != 0], np.concatenate([rows[:0], *self._removed])

    # -- columns --------------------------------------------------------------------------------------------------

    def times(self, rows: Words) -> Slots:
        """Return the times of rows by which an as-of join compares them, in microseconds."""
        return rows[:, self._time].view(np.int64)

    def arrival(self, rows: Words) -> Slots:
        """Return the numbers of rows, which grow in the order of their arrival."""
        return rows[:, self._number].view(np.int64)

    def unmatched(self, rows: Words) -> Words:
        """Return the rows of an outer side that never matched."""
        return rows[:0] if self._matched is None else rows[rows[:, self._matched.word] == 0]

    def column(self, name: str, rows: Words, indices: Slots) -> pa.Array:
        """Return one column of some rows."""
        slot = self._slots[name]
        # Only the words of the one column are taken: pairs are many.
        flagged = (rows[indices, slot.flag_word] & np.uint64(slot.flag)) != 0
        valid = (~flagged if slot.is_key else flagged).astype(np.uint8)
        wide = 2 if pa.types.is_decimal(slot.type) else 1
        words = tuple(rows[indices, slot.word + number].view(np.int64) for number in range(wide))
        return decode_column(slot.type, words, valid, self.table.pool)

    def output(self, rows: Words) -> list[pa.Array]:
        """Return the output columns of rows."""
        return [self.table.decode_field(slot, rows) for slot in self.output_fields]

    def fields(self, names: Iterable[str]) -> tuple[FieldSlot, ...]:
        """Return which of the named columns are of this side."""
        return tuple(self._slots[name] for name in names if self.has(name))

    def stored_pieces(self, rows: Words) -> Iterator[Words]:
        """Yield whole rows in pieces, as :meth:`GroupTable.cut` cuts them."""
        layout = self.table.layout
        for piece in self.table.cut(rows, (*layout.keys, *layout.state)):
            yield rows[piece]

    def frozen_state(self, schema: pa.Schema, rows: Words, frozen: FrozenRows) -> Iterator[pa.Table]:
        """Yield :meth:`state` of rows that frozen rows gave out, a piece of a snapshot each."""
        table, layout = self.table.as_of(frozen.pool, frozen.lists), self.table.layout
        for piece in table.cut(rows, (*layout.keys, *layout.state), limit=table.snapshot_bytes):
            yield self.state(rows[piece], schema, table=table)

    def no_output(self, count: int) -> list[pa.Array]:
        """Return `count` nulls for each output column."""
        return [pa.nulls(count, slot.view_type) for slot in self.output_fields]

    def has(self, name: str) -> bool:
        """Return whether a column is one of its keys or of its state."""
        return name in self._slots

    def state(
        self, rows: Words, schema: pa.Schema, *, keys_only: bool = False, table: GroupTable | None = None
    ) -> pa.Table:
        """Return the rows (of a frozen `table`) in the operator's ``row_schema``; with nulls for values if only keys are wanted."""
        table = self.table if table is None else table
        keys = {slot.name for slot in self.table.layout.keys}
        columns: list[pa.Array] = []
        for field in schema:
            if field.name == SIDE_COLUMN:
                columns.append(pa.array(np.full(len(rows), self._side, np.int8)))
            elif field.name in self._slots and (field.name in keys or not keys_only):
                columns.append(table.decode_field(self._slots[field.name], rows))
            else:
                columns.append(pa.nulls(len(rows), field.type))
        return pa.Table.from_arrays(columns, schema=schema)

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay the rows of this side of a delta; see :meth:`VersionedTable.load`."""
        side_rows = delta.filter(pc.equal(delta.column(SIDE_COLUMN), self._side))
        super().load(side_rows, version, watermark_ms)


def _filtered(rows: pa.Table, keep: pa.ChunkedArray) -> pa.Table:
    return rows if pc.all(keep).as_py() is not False else rows.filter(keep)

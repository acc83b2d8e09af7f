"""Joins of two streams: inner, outer and left semi joins by equal keys and a further condition. Pure logic.

Each side's rows are kept by join key for as long as they may still match. New left rows meet the right rows that are kept, then new
right rows meet the left ones that are kept, the new ones among them: every pair once, in the batch of its younger row (as in Spark's
``StreamingSymmetricHashJoinExec``). Then what the watermark has passed is removed, and a row of an outer side that never matched is
emitted with nulls. A left row of a semi join is emitted at its first match and not kept.

Schema and options: :mod:`store_actors.operators.join_schema`.

Emitted are all left output columns, then all right ones; rows follow from the version and the batch, not from the delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import StateSchema
from coordinator.model.type_names import string_to_type
from store_actors.engine.arrays import Slots, Words, distinct
from store_actors.engine.frozen import FrozenRows
from store_actors.engine.layout import FieldSlot
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.pieces import cut
from store_actors.engine.table_view import Found, ShardView, TableView
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, UPDATED, Change, Compaction, Frozen, frozen_pieces
from store_actors.messages.requests import ShardInput
from store_actors.operators.expressions import PairCondition
from store_actors.operators.join_schema import JoinOptions, JoinType
from store_actors.operators.join_side import JoinSide, SideRows


class JoinShard:
    """Both sides of a join in one partition at the newest version, with the undo of the versions before.

    Raises
    ------
    InvalidRequestError
        The options name unknown columns, or the condition cannot be evaluated.
    """

    def __init__(self, schema: StateSchema, seed: int = 0, memory: Memory = HEAP) -> None:
        self.schema = schema
        self._options = options = JoinOptions.of(schema.options)
        stored = options.stored()
        self._sides = (
            JoinSide(schema, options, 0, stored[0], seed, memory),
            JoinSide(schema, options, 1, stored[1], seed, memory),
        )
        # One pool, so that equal keys are equal words on both sides.
        self._sides[1].table.pool = self._sides[0].table.pool
        types = {field.name: string_to_type(field.type) for field in (*schema.keys, *schema.inputs)}
        self._condition = None if options.condition is None else PairCondition(options.condition, types)
        self._emitted_schema = pa.schema([(name, types[name]) for names in options.output for name in names])
        self.version = 0
        self.watermark_ms = 0
        self._next_number: int | None = None
        self._compaction = Compaction()

    def __len__(self) -> int:
        return len(self._sides[0]) + len(self._sides[1])

    @property
    def nbytes(self) -> int:
        """Memory in bytes, retained versions included."""
        return self._sides[0].nbytes + self._sides[1].nbytes - self._sides[0].table.pool.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the words of a row of either side, at most."""
        return max(side.row_bytes for side in self._sides)

    def output_watermark_ms(self, watermark_ms: int) -> int:
        """Return the watermark of what is emitted once the operator's watermark is `watermark_ms`.

        The least of it and of what kept rows of either side may still have (Spark's ``produceOutputWatermark``).
        """
        lags = [-(-lag // 1000) for lag in self._options.output_lag_us if lag is not None]
        return max(0, watermark_ms - max([0, *lags]))

    # -- a batch --------------------------------------------------------------------------------------------------

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Join a batch with the newest version, as `version`, not yet committed; see :meth:`AggregateShard.apply`.

        As Spark's progress counts them, ``rows_updated`` are rows that are kept beyond the batch; ``rows_removed`` those kept until now
        whose time is over, but for the outer side's, and left rows of a semi join that were matched.
        """
        for side in self._sides:
            side.check_next(version, late_ms)
        number = self._first_number()
        for side in self._sides:
            side.start(version, watermark_ms, number)
        try:
            return self._applied(rows, watermark_ms, version, number)
        except BaseException:
            self.abort()
            raise

    def _applied(self, rows: ShardInput, watermark_ms: int, version: int, number: int) -> Change:
        new = [side.read(table) for side, table in zip(self._sides, rows.tables, strict=True)]
        emitted: list[pa.Table] = []
        kept, removed = 0, 0
        for index, side in enumerate(self._sides):
            emitted += self._excluded(index, new[index])
            if self._options.join_type is JoinType.LEFT_SEMI:
                pieces, taken_out = self._semi_join(index, new[index])
                removed += taken_out
            else:
                pieces = self._join(index, new[index])
            emitted += pieces
            chosen = ~new[index].matched if self._options.join_type is JoinType.LEFT_SEMI and index == 0 else None
            count = side.enter(new[index], chosen, number)
            number, kept = number + count, kept + count
        self._next_number = number
        for index, side in enumerate(self._sides):
            expired = side.expire(watermark_ms)
            # As Spark counts: what is over at once was never kept.
            passing = side.count_new(expired)
            kept -= passing
            if not self._options.join_type.is_outer(index):
                # Nor does it count rows that leave the state through the results, matched or not.
                removed += len(expired) - passing
            emitted += self._alone(index, side.unmatched(expired))
        return self._change(rows, new, emitted, watermark_ms, version, kept, removed)

    def _change(
        self,
        rows: ShardInput,
        new: Sequence[SideRows],
        emitted: Sequence[pa.Table],
        watermark_ms: int,
        version: int,
        kept: int,
        removed: int,
    ) -> Change:
        return Change(
            version=version,
            base_version=self.version,
            delta=self._delta(),
            rows_updated=kept,
            rows_removed=removed,
            rows_in=rows.rows_read,
            rows_late=sum(side_rows.late for side_rows in new),
            watermark_ms=watermark_ms,
            emitted=pa.concat_tables([self._emitted_schema.empty_table(), *emitted]),
        )

    def _join(self, index: int, rows: SideRows) -> list[pa.Table]:
        """Return the pairs of new rows of a side with kept rows of the opposite side; `index` is 0 left, 1 right."""
        opposite = self._sides[1 - index]
        emitted: list[pa.Table] = []
        for indices, slots in self._pairs(index, rows):
            rows.matched[indices] = True
            opposite.mark(slots)
            emitted += self._pair_tables(index, rows.words, indices, slots)
        return emitted

    def _pair_tables(self, index: int, rows: Words, indices: Slots, slots: Slots) -> list[pa.Table]:
        side, opposite = self._sides[index], self._sides[1 - index]
        return [
            self._table(
                index,
                side.output(np.take(rows, indices[piece], axis=0)),
                opposite.output(opposite.table.taken(slots[piece])),
            )
            for piece in self._cut_pairs(index, rows, indices, slots, (side.output_fields, opposite.output_fields))
        ]

    def _semi_join(self, index: int, rows: SideRows) -> tuple[list[pa.Table], int]:
        """Return the left rows that match for the first time, and how many of them were kept until now."""
        left_side = self._sides[0]
        if index == 0:
            for indices, _ in self._pairs(index, rows):
                rows.matched[indices] = True
            return self._alone(0, rows.words[rows.matched]), 0
        matched_slots = [distinct(slots) for _, slots in self._pairs(index, rows)]
        if not matched_slots:
            return [], 0
        taken_out = left_side.take_out(distinct(np.concatenate(matched_slots)))
        return self._alone(0, taken_out), len(taken_out)

    def _pairs(self, index: int, rows: SideRows) -> Iterator[tuple[Slots, Slots]]:
        """Yield indices of new rows of a side and slots of the opposite side that match them, a block at a time."""
        side, opposite = self._sides[index], self._sides[1 - index]
        probes = rows.words if len(rows.probes) == len(rows.words) else rows.words[rows.probes]
        for indices, slots in opposite.table.match_blocks(*side.table.chain_keys_of(probes)):
            indices = rows.probes[indices]
            if self._condition is None:
                if len(indices):
                    yield indices, slots
                continue
            names = self._condition.columns
            of_opposite = [name for name in names if not side.has(name)]
            for piece in self._cut_pairs(
                index, rows.words, indices, slots, (side.fields(names), opposite.fields(of_opposite))
            ):
                row_indices, opposite_slots = indices[piece], slots[piece]
                columns = {
                    name: side.column(name, rows.words, row_indices)
                    if side.has(name)
                    else opposite.column(name, opposite.table.rows, opposite_slots)
                    for name in names
                }
                true = self._condition.holds(columns, len(row_indices))
                if true.any():
                    yield row_indices[true], opposite_slots[true]

    def _cut_pairs(
        self,
        index: int,
        rows: Words,
        indices: Slots,
        slots: Slots,
        fields: tuple[Sequence[FieldSlot], Sequence[FieldSlot]],
    ) -> Iterable[slice]:
        """Return slices of the pairs of new and opposite rows, cut as :meth:`GroupTable.cut` cuts rows."""
        side, opposite = self._sides[index].table, self._sides[1 - index].table
        pair_bytes = side.longest_row(rows, fields[0]) + opposite.longest_row(opposite.used_rows(), fields[1])
        if len(indices) * pair_bytes <= side.piece_bytes:
            return (slice(0, len(indices)),)
        sizes = side.row_bytes(np.take(rows, indices, axis=0), fields[0])
        sizes += opposite.row_bytes(np.take(opposite.rows, slots, axis=0), fields[1])
        return cut(sizes, side.piece_bytes)

    # -- what is emitted ------------------------------------------------------------------------------------------

    def _table(self, index: int, side_columns: list[pa.Array], opposite_columns: list[pa.Array]) -> pa.Table:
        columns = [*side_columns, *opposite_columns] if index == 0 else [*opposite_columns, *side_columns]
        return pa.Table.from_arrays(columns, schema=self._emitted_schema)

    def _excluded(self, index: int, rows: SideRows) -> list[pa.Table]:
        """Return the rows that cannot match, with nulls for the opposite side."""
        count = rows.excluded.num_rows
        if count == 0:
            return []
        side_columns = [rows.excluded.column(name) for name in self._options.output[index]]
        return [self._table(index, side_columns, self._sides[1 - index].no_output(count))]

    def _alone(self, index: int, rows: Words) -> list[pa.Table]:
        """Return rows of a side with nulls for what is emitted of the opposite one, which is nothing where rows are semi joined."""
        side, opposite = self._sides[index], self._sides[1 - index]
        return [
            self._table(index, side.output(rows[piece]), opposite.no_output(piece.stop - piece.start))
            for piece in side.table.cut(rows, side.output_fields)
        ]

    def output(self, delta: pa.Table) -> pa.Table:
        """Refuse: pairs cannot be read off a delta; :attr:`Change.emitted` has them.

        Raises
        ------
        InvalidRequestError
            Always.
        """
        raise InvalidRequestError(
            "the rows that a join emits cannot be read off its delta; nothing was changed; apply the batch again",
            rows=delta.num_rows,
        )

    # -- versions -------------------------------------------------------------------------------------------------

    def _first_number(self) -> int:
        """Return the first number that no row of either side has."""
        if self._next_number is None:
            self._next_number = max(side.table.largest_number() for side in self._sides) + 1
        return self._next_number

    def _delta(self) -> pa.Table:
        schema = self.schema.row_schema()
        pieces: list[pa.Table] = []
        for side in self._sides:
            updated, removed = side.changed()
            for kind, rows in ((UPDATED, updated), (REMOVED, removed)):
                for rows_of_piece in side.stored_pieces(rows):
                    state = side.state(rows_of_piece, schema, keys_only=kind == REMOVED)
                    pieces.append(
                        state.append_column(CHANGE_COLUMN, pa.array(np.full(len(rows_of_piece), kind, np.int8)))
                    )
        return pa.concat_tables([schema.append(pa.field(CHANGE_COLUMN, pa.int8())).empty_table(), *pieces])

    def commit(self) -> int:
        """Make the pending change the newest version; returns its number."""
        for side in self._sides:
            side.commit()
        self._settled()
        self._compact()
        return self.version

    def abort(self) -> None:
        """Drop the pending change; the shard is again what it was before."""
        for side in self._sides:
            side.abort()

    def rollback(self, version: int) -> bool:
        """Go back to an earlier version if memory can undo to it; return False, without effect, if it must be loaded."""
        done = [side.rollback(version) for side in self._sides]
        self._settled()
        return all(done)

    def _settled(self) -> None:
        # Both sides take every step together.
        self.version, self.watermark_ms = self._sides[0].version, self._sides[0].watermark_ms

    def retained(self) -> dict[int, int]:
        """Return the versions in memory; see :meth:`VersionedTable.retained`."""
        return self._sides[0].retained()

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a committed delta (or a snapshot, whose rows are all updates) on top of the newest version."""
        for side in self._sides:
            side.load(delta, version, watermark_ms)
        self._next_number = None
        self._settled()
        self._compact()

    def snapshot(self) -> pa.Table:
        """Return all rows of the newest version, with a pending change if there is one; ``row_schema``."""
        tables = [table for piece in self.frozen() for table in piece()]
        return pa.concat_tables([self.schema.row_schema().empty_table(), *tables])

    def frozen(self) -> Frozen:
        """Return :meth:`snapshot` of now, in pieces."""
        schema = self.schema.row_schema()
        parts = [frozen_pieces(FrozenRows(side.table), partial(side.frozen_state, schema)) for side in self._sides]
        return (piece for part in parts for piece in part)

    def view(self, version: int) -> ShardView:
        """Return a retained version of both sides, to be read."""
        return _JoinView(self._sides, self.schema, version)

    def room(self) -> Mapping[str, Any]:
        """Return the sizes that :meth:`reserve` needs, of each side; see :meth:`VersionedTable.room`."""
        return {"sides": [dict(side.room()) for side in self._sides]}

    def reserve(self, room: Mapping[str, Any]) -> None:
        """Reserve memory on both sides before rows are loaded; see :meth:`VersionedTable.reserve`."""
        for side, side_room in zip(self._sides, room["sides"], strict=True):
            side.reserve(side_room)

    def _compact(self) -> None:
        """Drop strings that no version of either side holds any more, if it is time to."""
        if self._compaction.is_due(*(side.table for side in self._sides)):
            self._compaction.run(*self._sides)


class _JoinView:
    """A version of both sides; see :class:`~store_actors.engine.table_view.ShardView`."""

    def __init__(self, sides: Sequence[JoinSide], schema: StateSchema, version: int) -> None:
        self._sides = [(side, TableView(side, version)) for side in sides]
        self.schema = schema
        self._schema = schema.row_schema()

    @property
    def is_there(self) -> bool:
        return all(view.is_there for _, view in self._sides)

    def find(self, keys: pa.RecordBatch, columns: Sequence[str]) -> Found:
        """Find the rows of each key: those of the left side, then those of the right side."""
        key_indices, tables = [], [self._schema.empty_table()]
        for side, view in self._sides:
            found_indices, rows = view.words_of(keys)
            key_indices.append(found_indices)
            tables += [side.state(piece, self._schema) for piece in side.stored_pieces(rows)]
        order = np.argsort(np.concatenate(key_indices), kind="stable")
        return np.concatenate(key_indices)[order], pa.concat_tables(tables).take(pa.array(order)).select(list(columns))

    def frozen(self, columns: Sequence[str]) -> Frozen:
        def shown(side: JoinSide, rows: Words, frozen: FrozenRows) -> Iterator[pa.Table]:
            return (table.select(list(columns)) for table in side.frozen_state(self._schema, rows, frozen))

        parts = [frozen_pieces(view.frozen_rows(), partial(shown, side)) for side, view in self._sides]
        return (piece for part in parts for piece in part)

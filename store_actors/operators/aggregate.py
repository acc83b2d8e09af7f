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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from store_actors.engine.arrays import Slots, Words, distinct
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.layout import FieldSlot
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
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate_results import emits_state, results_of

#: Stamps of rows have 32 bits.
_LAST_STAMP = 0xFFFFFFFF


@dataclass(slots=True)
class _OpenVersion:
    #: Rows with a stamp from it on were touched by the version.
    first_stamp: int
    #: Slots of the groups that each piece touched; no group is gone before the end.
    touched: list[Slots] = field(default_factory=list)
    #: Keys of late rows.
    late: list[Words] = field(default_factory=list)
    rows_in: int = 0

    def slots(self) -> Slots:
        """Return the slots of all groups that were touched, each once."""
        if len(self.touched) == 1:
            return self.touched[0]
        return distinct(np.concatenate([np.empty(0, np.int64), *self.touched]))

    def rows_late(self) -> int:
        # Spark counts after it has added up the rows of each group, those of all its map tasks.
        return len(np.unique(np.concatenate(self.late), axis=0)) if self.late else 0


@dataclass(frozen=True, slots=True)
class UnsafeInput:
    """Rows of an aggregation in Spark's own format, whose first columns are those of ``raw_schema``."""

    block: UnsafeBlock
    #: Input rows that they stand for.
    rows_read: int


class AggregateShard(VersionedTable):
    """Groups of one partition at its newest version, with the way back to the versions before."""

    held_bytes = 0

    _open: _OpenVersion
    _stamp = 0

    # -- a batch --------------------------------------------------------------------------------------------------

    def apply(self, rows: ShardInput, watermark_ms: int, version: int, late_ms: int | None = None) -> Change:
        """Fold a batch into the newest version, as `version`, not yet committed.

        Raises errors as :meth:`check_next` and :meth:`fold`.

        Parameters
        ----------
        watermark_ms
            Groups that it has passed are closed.
        late_ms
            Watermark by which rows are late; by default that of the version before.
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
        are_words = are_supported(pa.schema([(slot.name, slot.view_type) for slot in fields]))
        return fields if emits_state(self.schema) and are_words else ()

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
        step.add(UndoPart(removed[:0], removed))
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
        return step.change(
            table.decode(rows).append_column(CHANGE_COLUMN, pa.array(kinds)),
            rows_updated=len(slots),
            rows_removed=len(evicted),
            rows_in=open_version.rows_in,
            rows_late=open_version.rows_late(),
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
        self.pending().add(UndoPart(created, touched.before))
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
    """Groups that a piece changed, as words: they can be read until the shard changes again."""

    shard: AggregateShard
    #: As of :meth:`~store_actors.engine.table.GroupTable.columns`.
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

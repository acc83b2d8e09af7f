"""The shard of an aggregation. Pure logic.

Life of a batch: :meth:`AggregateShard.apply` folds the batch into the newest version and returns the :class:`Change` (what the
delta file will hold); then :meth:`AggregateShard.commit` once the change is durable and counted, or :meth:`AggregateShard.abort`.

Versions (:mod:`store_actors.engine.versions`): state is changed in place and each version keeps what it overwrote. Aborting, and going
back to one of the last versions, put those rows back; nothing is reloaded when Spark replays a batch.

Event time is shared by all shards of an operator (:mod:`coordinator.model.watermarks`). As in Spark, a batch has two watermarks:
rows are late by the one before it, and what the other one has passed is closed. That is the watermark of the batches before, or, of
an operator that closes early, the one that includes the batch.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store_actors.engine.arrays import Words
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.pieces import batches
from store_actors.engine.table import Touched
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


class AggregateShard(VersionedTable):
    """Groups of one partition at its newest version, with the way back to the versions before."""

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
        self.check_next(version, late_ms)
        touched, rows_late = self._fold(rows, version)
        # Without such sums no row is copied.
        if self.table.layout.fails_on_overflow:
            rows_touched = self.table.taken(np.concatenate([touched.created, touched.changed]))
            self.table.layout.check_overflow(rows_touched)
        change, undo = self._evict(touched, watermark_ms, version, rows.rows_read, rows_late)
        step = self.begin(version)
        step.watermark_ms = watermark_ms
        step.parts.append(undo)
        return change

    def _fold(self, rows: ShardInput, version: int) -> tuple[Touched, int]:
        touched = Touched.nothing(self.table.layout.row_words)
        late: list[Words] = []
        for table, partial in ((rows.raw, False), (rows.partial, True)):
            for batch in batches(table, self.table.piece_bytes):
                encoded = self.table.encode(batch, partial=partial)
                on_time = self._drop_late(encoded, late)
                touched = touched.joined(self.table.accumulate(on_time, version & 0xFFFFFFFF))
        if (
            not self.schema.keys
            and self.schema.output_mode != "append"
            and not len(touched.created) + len(touched.changed)
        ):
            # Spark's global aggregate has its one row in every batch, even before any input came.
            touched = self.table.touch_global_group(version & 0xFFFFFFFF)
        # Spark counts after it has added up the rows of each group, those of all its map tasks.
        return touched, len(np.unique(np.concatenate(late), axis=0)) if late else 0

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

    def _evict(
        self, touched: Touched, watermark_ms: int, version: int, rows_in: int, rows_late: int
    ) -> tuple[Change, UndoPart]:
        """Close groups; return the batch's change, and the undo of it."""
        table, layout = self.table, self.table.layout
        slots = np.concatenate([touched.created, touched.changed])
        rows = table.columns(slots)
        created = rows[: len(touched.created), : layout.flag_words + layout.key_words].copy()
        evicted, removed = self._expired(watermark_ms)
        just_touched = (removed[:, 0] >> np.uint64(32)) == np.uint64(version & 0xFFFFFFFF)
        if len(evicted):
            rows = np.concatenate([rows[(table.rows[slots, 0] & LIVE) != 0], removed])
        kinds = np.concatenate(
            [
                np.zeros(len(rows) - len(evicted), np.int8),
                np.where(just_touched, UPDATED_AND_REMOVED, REMOVED).astype(np.int8),
            ]
        )
        change = Change(
            version=version,
            base_version=self.version,
            delta=table.decode(rows).append_column(CHANGE_COLUMN, pa.array(kinds)),
            rows_updated=len(touched.created) + len(touched.changed),
            rows_removed=len(evicted),
            rows_in=rows_in,
            rows_late=rows_late,
            watermark_ms=watermark_ms,
        )
        before = touched.before if not len(evicted) else np.concatenate([touched.before, removed[~just_touched]])
        return change, UndoPart(created, before)

    def output(self, delta: pa.Table) -> pa.Table:
        """Return the rows that a batch emits, read off its delta, so that a retry of a committed batch emits the same."""
        return output_of(delta, self.schema.output_mode)


def output_of(delta: pa.Table, output_mode: str) -> pa.Table:
    """Return the rows that an aggregation emits for a delta.

    ``update``: every group that the batch changed. ``append``: every group that its watermark closed. (``complete``
    emits the whole version: :meth:`AggregateShard.snapshot`.)
    """
    change = delta.column(CHANGE_COLUMN)
    is_kept = pc.not_equal(change, REMOVED if output_mode == "update" else UPDATED)
    return delta.filter(is_kept).drop_columns([CHANGE_COLUMN])

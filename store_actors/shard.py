"""One shard of one stateful operator: pure logic, no Ray, no Spark, no I/O.

Life of a batch: :meth:`Shard.apply` folds the batch into the newest version and returns the :class:`Change` (what the
delta file will hold); then :meth:`Shard.commit` once the change is durable and counted, or :meth:`Shard.abort`.

Versions: state is changed in place and each version keeps what it overwrote (created keys, former rows). Aborting and
going back to one of the last :data:`RETAINED_VERSIONS` versions put those rows back; nothing else is copied, and nothing is
reloaded when Spark replays a batch.

Event time (``shared`` by all shards of a query, because every shard sees the largest event time of the whole batch):
rows are late by the watermark of the version that the batch reads; groups are closed by the watermark that includes this
batch. Spark does the second only one batch later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.errors import InvalidRequestError
from store_actors.messages import ShardInput
from store_actors.schema import StateSchema
from store_actors.table import EncodedBatch, GroupTable, Touched

__all__ = [
    "CHANGE_COLUMN",
    "REMOVED",
    "RETAINED_VERSIONS",
    "UPDATED",
    "UPDATED_AND_REMOVED",
    "Change",
    "Shard",
    "output_of",
]

RETAINED_VERSIONS = 2

#: Last column of a delta: what the batch did to the row's group.
CHANGE_COLUMN = "__change"
#: The group is in the version, with the row's values.
UPDATED = 0
#: The watermark closed the group; the row holds its final values, from an earlier version.
REMOVED = 1
#: The batch changed the group and its watermark closed it at once.
UPDATED_AND_REMOVED = 2

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Change:
    """What one batch did to a shard.

    Attributes
    ----------
    delta
        ``row_schema`` columns and ``__change`` (int8).
    rows_in, rows_late
        Input rows of the shard, and rows (partially aggregated ones, as Spark counts them) dropped as late.
    watermark_ms
        Watermark that includes the batch, in milliseconds since the epoch.
    """

    version: int
    base_version: int
    delta: pa.Table
    rows_updated: int
    rows_removed: int
    rows_in: int
    rows_late: int
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class _Undo:
    """How to get from a version back to the one it was made from."""

    base_version: int
    base_watermark_ms: int
    created: Words
    before: Words


class Shard:
    """Groups of one partition at its newest version, with the way back to the versions before.

    Parameters
    ----------
    schema
        The operator's schema.
    """

    def __init__(self, schema: StateSchema) -> None:
        self.schema = schema
        self.table = GroupTable(schema)
        self.version = 0
        self.watermark_ms = 0
        self._undo: deque[_Undo] = deque(maxlen=RETAINED_VERSIONS)
        self._pending: tuple[Change, _Undo] | None = None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, with what the retained versions need."""
        return self.table.nbytes + sum(undo.created.nbytes + undo.before.nbytes for undo in self._undo)

    # -- a batch --------------------------------------------------------------------------------------------------

    def apply(self, rows: ShardInput, max_event_ms: int | None, version: int) -> Change:
        """Fold a batch into the newest version, as `version`, not yet committed.

        Parameters
        ----------
        rows
            The shard's rows of the batch.
        max_event_ms
            Largest event time of the whole micro-batch over all shards; None without rows or watermark.
        version
            Version to make, larger than the newest.

        Raises
        ------
        InvalidRequestError
            Another change is pending, or `version` is not newer.
        """
        if self._pending is not None:
            raise InvalidRequestError("the shard has an uncommitted change; commit or abort it first", version=version)
        if version <= self.version:
            raise InvalidRequestError(
                "a shard only moves to a newer version; go back first", version=version, newest=self.version
            )
        touched, rows_late = self._fold(rows, version)
        watermark_ms = self._next_watermark(max_event_ms)
        change, before = self._evict(touched, watermark_ms, version, rows.rows_read, rows_late)
        undo = _Undo(self.version, self.watermark_ms, self._created_rows, before)
        self._pending = (change, undo)
        return change

    def _fold(self, rows: ShardInput, version: int) -> tuple[Touched, int]:
        touched = Touched.nothing(self.table.layout.row_words)
        rows_late = 0
        for table, partial in ((rows.raw, False), (rows.partial, True)):
            for batch in table.combine_chunks().to_batches():
                encoded = self.table.encode(batch, partial=partial)
                on_time = self._drop_late(encoded)
                rows_late += batch.num_rows - len(on_time)
                touched = touched.joined(self.table.accumulate(on_time, version & 0xFFFFFFFF))
        if not self.schema.keys and len(self.table) == 0 and self.schema.output_mode != "append":
            # Spark's global aggregate has its one row even before any input came.
            touched = touched.joined(self.table.create_global_group(version & 0xFFFFFFFF))
        return touched, rows_late

    def _drop_late(self, batch: EncodedBatch) -> EncodedBatch:
        word = self.table.layout.expiry_word
        if word < 0:
            return batch
        expiry = batch.keys[:, word - self.table.layout.flag_words].view(np.int64)
        keep = expiry > self.watermark_ms * 1000
        return batch if keep.all() else batch.take(keep)

    def _next_watermark(self, max_event_ms: int | None) -> int:
        """Spark's rule: the largest event time less the delay, and never back."""
        if self.schema.delay_ms is None or max_event_ms is None:
            return self.watermark_ms
        return max(self.watermark_ms, max_event_ms - self.schema.delay_ms)

    def _evict(
        self, touched: Touched, watermark_ms: int, version: int, rows_in: int, rows_late: int
    ) -> tuple[Change, Words]:
        """Close groups, and describe what the batch did. Returns the change and the former rows for the undo."""
        table = self.table
        self._created_rows: Words = np.take(table.rows, touched.created, axis=0)
        gone = table.evict(watermark_ms * 1000)
        removed = table.rows[gone]
        just_touched = (removed[:, 0] >> np.uint64(32)) == np.uint64(version & 0xFFFFFFFF)
        slots = np.concatenate([touched.created, touched.changed])
        if len(gone):
            slots = slots[(table.rows[slots, 0] & np.uint64(1 << 31)) != 0]
        rows = np.take(table.rows, slots, axis=0)
        if len(gone):
            rows = np.concatenate([rows, removed])
        kinds = np.concatenate(
            [np.zeros(len(slots), np.int8), np.where(just_touched, UPDATED_AND_REMOVED, REMOVED).astype(np.int8)]
        )
        change = Change(
            version=version,
            base_version=self.version,
            delta=table.decode(rows).append_column(CHANGE_COLUMN, pa.array(kinds)),
            rows_updated=len(touched.created) + len(touched.changed),
            rows_removed=len(gone),
            rows_in=rows_in,
            rows_late=rows_late,
            watermark_ms=watermark_ms,
        )
        before = touched.before if not len(gone) else np.concatenate([touched.before, removed[~just_touched]])
        return change, before

    def commit(self) -> int:
        """Make the pending change the newest version; returns its number."""
        change, undo = self._take_pending()
        self._undo.append(undo)
        self.version, self.watermark_ms = change.version, change.watermark_ms
        return self.version

    def abort(self) -> None:
        """Drop the pending change; the shard is again what it was before :meth:`apply`."""
        _, undo = self._take_pending()
        self._revert(undo)

    def _take_pending(self) -> tuple[Change, _Undo]:
        if self._pending is None:
            raise InvalidRequestError("the shard has no uncommitted change", version=self.version)
        pending, self._pending = self._pending, None
        return pending

    # -- versions -------------------------------------------------------------------------------------------------

    def rollback(self, version: int) -> bool:
        """Go back to an earlier version if memory still has the way; False (and no effect) if it must be loaded."""
        if self._pending is not None:
            self.abort()
        reachable = {self.version} | {undo.base_version for undo in self._undo}
        if version not in reachable:
            return False
        while self.version != version:
            undo = self._undo.pop()
            self._revert(undo)
            self.version, self.watermark_ms = undo.base_version, undo.base_watermark_ms
        return True

    def _revert(self, undo: _Undo) -> None:
        self.table.remove_rows(undo.created)
        self.table.put(undo.before)

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a committed delta (or a snapshot, whose rows are all updates) on top of the newest version."""
        change = delta.column(CHANGE_COLUMN).combine_chunks()
        live = pc.equal(change, UPDATED)
        rows = delta.drop_columns([CHANGE_COLUMN])
        for batch in rows.filter(live).combine_chunks().to_batches():
            self.table.put(self.table.rows_of(batch))
        for batch in rows.filter(pc.invert(live)).combine_chunks().to_batches():
            self.table.remove_rows(self.table.rows_of(batch))
        self._undo.clear()
        self.version, self.watermark_ms = version, watermark_ms

    def snapshot(self) -> pa.Table:
        """All groups of the newest version, with a pending change if there is one; ``row_schema``."""
        return self.table.decode(self.table.rows[self.table.live()])


def output_of(delta: pa.Table, output_mode: str) -> pa.Table:
    """Rows that a batch emits, read off its delta, so that a retry of a committed batch emits the same.

    ``update``: every group that the batch changed. ``append``: every group that its watermark closed. (``complete``
    emits the whole version: :meth:`Shard.snapshot`.)
    """
    change = delta.column(CHANGE_COLUMN)
    wanted = pc.not_equal(change, REMOVED if output_mode == "update" else UPDATED)
    return delta.filter(wanted).drop_columns([CHANGE_COLUMN])

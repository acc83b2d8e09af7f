"""The rows of a keyed store as words: whole rows put and removed under a version, and scans that outlive changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError, VersionNotFoundError
from coordinator.model.schema import Field, StateSchema
from store_actors.engine.arrays import Mask, Slots, Words, distinct
from store_actors.engine.expiry_queue import NEVER, ExpiryQueue
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.layout import FieldSlot
from store_actors.engine.memory import Memory, blocks
from store_actors.engine.pieces import batches
from store_actors.engine.strings import StringPool
from store_actors.engine.table import GroupTable
from store_actors.engine.table_view import VersionView
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, UndoPart, VersionedTable, VersionStep

_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)


class RowScan(Iterator[pa.RecordBatch]):
    """Rows as they were when the scan was made, as record batches in ``row_schema``; made by a handle.

    It keeps slots, and copies the rows that it has not emitted only when the table is about to change.

    Parameters
    ----------
    slots, extra
        What to emit: rows of the table, then rows that are no longer in it.
    """

    def __init__(self, table: GroupTable, slots: Slots, extra: Words, batch_rows: int) -> None:
        self._table = table
        self._pool: StringPool = table.pool
        self._slots: Slots | None = slots
        self._rows = extra
        self._position = 0
        self._batch_rows = batch_rows
        #: Batches that were made with one that was emitted: rows with much text are cut.
        self._ready: deque[pa.RecordBatch] = deque()

    def __iter__(self) -> RowScan:
        return self

    def __next__(self) -> pa.RecordBatch:
        if not self._ready:
            rows = self._take(self._batch_rows)
            if not len(rows):
                raise StopIteration
            self._ready.extend(self._table.as_of(self._pool, self._table.lists).decode(rows).to_batches())
        return self._ready.popleft()

    def _take(self, limit: int) -> Words:
        begin = self._position
        if self._slots is not None and begin < len(self._slots):
            rows = self._table.taken(self._slots[begin : begin + limit])
        else:
            done = 0 if self._slots is None else len(self._slots)
            rows = self._rows[begin - done : begin - done + limit]
        self._position += len(rows)
        return rows

    @property
    def nbytes(self) -> int:
        """Memory held besides the table, in bytes."""
        return self._rows.nbytes + (0 if self._slots is None else self._slots.nbytes)

    def freeze(self) -> None:
        """Copy what is left, because the table is about to change."""
        if self._slots is not None:
            remaining = self._table.taken(self._slots[self._position :])
            done = max(0, self._position - len(self._slots))
            rows = self._table.memory.kept(np.concatenate([remaining, self._rows[done:]]))
            self._rows, self._slots, self._position = rows, None, 0

    def read_all(self) -> pa.Table:
        """Return everything that is left, as one table."""
        schema = self._table.layout.schema.row_schema()
        return pa.Table.from_batches(list(self), schema=schema)

    def close(self) -> None:
        """Give out nothing more, and hold no rows."""
        self._slots, self._rows, self._position = None, self._rows[:0].copy(), 0
        self._ready.clear()


@dataclass(frozen=True, slots=True)
class NetChange:
    """The net change of a version against its base."""

    #: New rows, then changed ones with their new words, then removed ones with their last.
    rows: Words
    added: int
    changed: int
    removed: int
    #: Keys that were put and are there, also those with the words that they had.
    rows_updated: int


class KeyedTable(VersionedTable):
    """Rows of value words under key words, with the way back to the versions before."""

    def __init__(
        self,
        keys: tuple[Field, ...],
        values: tuple[Field, ...],
        due: str | None,
        seed: int,
        memory: Memory,
    ) -> None:
        super().__init__(StateSchema.keyed(keys, values), seed, memory)
        layout = self.table.layout
        #: The value column that has the time at which each row falls due, if there is one; a row with null is never due.
        self._due_slot = next((slot for slot in layout.state if slot.name == due), None)
        #: Rows by these times. Every write adds entries and none is removed: an entry counts only if its row has the same time when the
        #: entry comes up. So to drop a version, or go back to one, it is enough to add entries for the rows that come back.
        self._due_queue = ExpiryQueue(memory)
        #: Leading words of a row that tell its key: flags and key words.
        self.key_end = layout.flag_words + layout.key_words
        self._scans: WeakSet[RowScan] = WeakSet()
        #: Slots of keys that each change of the pending version has created, and of those of its base that it has put (-1: removed);
        #: None once it has both put and removed some.
        self._written: list[tuple[Slots, Slots]] | None = None
        self._last_change = ""
        #: Whether an error (memory exhausted) came in the middle of a change: what is held is of no version then.
        self.is_broken = False
        #: Who reads the table, and holds rows of its own for that: scans that were frozen, and views of older versions.
        self._readers: WeakSet[RowScan | VersionView] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes, with what older versions, a pending change and those who read need."""
        beside = [*self.steps(), *self._scans, *self._readers, self._due_queue]
        return self.table.nbytes + sum(holder.nbytes for holder in beside)

    def read_by(self, reader: VersionView) -> None:
        """Count what a reader holds for as long as it is there."""
        self._readers.add(reader)

    # -- changes --------------------------------------------------------------------------------------------------

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Enter a change of the table in place. After an error within, the table is given up: how far the change got is unknown."""
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    def check_whole(self) -> None:
        """Refuse to go on with a table that was given up.

        Raises
        ------
        VersionNotFoundError
            An error cut a change of it short.
        """
        if self.is_broken:
            raise VersionNotFoundError(
                "an error in the middle of a change (see the store actor's log) left nothing to read or to go on from in memory; what "
                "was committed is safe in its files; open a new handle, which loads it from there",
                version=self.version,
            )

    def put_rows(self, rows: Words, step: VersionStep) -> None:
        """Write whole rows as part of a pending version; of rows with one key the last one stays."""
        self.freeze_scans()
        with self.changing():
            touched = self.table.upsert(rows, step.version & 0xFFFFFFFF)
            created = self.table.taken(touched.created)[:, : self.key_end].copy()
            step.add(UndoPart(created, touched.before))
            self._note("put", touched.created, touched.changed)
            self._note_due(rows)

    def remove_rows(self, keys: Words, step: VersionStep) -> int:
        """Remove the rows with these keys as part of a pending version; returns how many were there."""
        self.freeze_scans()
        with self.changing():
            removed = self.table.taken(self.table.remove_rows(keys))
            # Rows that this version wrote are not part of the base, or were kept when it first wrote them.
            before = _chosen(removed, removed[:, 0] >> _S32 != np.uint64(step.version & 0xFFFFFFFF))
            before[:, 0] |= LIVE
            step.add(UndoPart(np.empty((0, self.key_end), np.uint64), before))
            self._note("removal", np.empty(0, np.int64), np.full(len(before), -1))
        return len(removed)

    def _note(self, change: str, created: Slots, changed: Slots) -> None:
        """Note what a change of the pending version wrote, for as long as all of its changes are of one kind."""
        if self._written and change != self._last_change:
            self._written = None
        elif self._written is not None:
            self._written.append((created, changed))
            self._last_change = change

    def net_change(self, step: VersionStep) -> NetChange:
        """Return what a pending version changes."""
        table = self.table
        before = _joined([part.before for part in step.parts], table.layout.row_words)
        new, slots = self._slots_of(step, before)
        changed, removed = slots[table.differing(slots, before, _LOW32)], _chosen(before, slots < 0)
        rows = table.columns(np.concatenate([new, changed]))
        if len(removed):
            rows = np.concatenate([rows, removed])
        return NetChange(rows, len(new), len(changed), len(removed), len(new) + len(slots) - len(removed))

    def _slots_of(self, step: VersionStep, before: Words) -> tuple[Slots, Slots]:
        """Return the slots of keys that a pending version has added to its base, and of the rows `before` of that (-1: removed)."""
        table = self.table
        if self._written is not None:
            created, changed = ([slots[number] for slots in self._written] for number in range(2))
            nothing = np.empty(0, np.int64)
            return np.concatenate([nothing, *created]), np.concatenate([nothing, *changed])
        created_keys = _joined([part.created for part in step.parts], self.key_end)
        slots, new = table.find(before), distinct(table.find(created_keys))
        # A key of the base that was removed and put again is among both; a created one may be gone again.
        in_base = table.memory.zeros(len(table.rows), np.bool_)
        in_base[slots[slots >= 0]] = True
        new = new[new >= 0]
        return new[~in_base[new]], slots

    def begin(self, version: int) -> VersionStep:
        """Begin a version, as :meth:`VersionedTable.begin`; an error on the way breaks the store."""
        self.check_next(version)
        with self.changing():
            self._written = []
            return super().begin(version)

    def commit(self) -> int:
        """Commit the pending version, as :meth:`VersionedTable.commit`; an error on the way breaks the store."""
        with self.changing():
            self._written = None
            return super().commit()

    def abort(self) -> None:
        """Drop the pending version, as :meth:`VersionedTable.abort`; an error on the way breaks the store."""
        with self.changing():
            super().abort()

    def rollback(self, version: int) -> bool:
        """Go back to an earlier version, as :meth:`VersionedTable.rollback`; return False if the store is broken."""
        with self.changing():
            return not self.is_broken and super().rollback(version)

    def _revert(self, step: VersionStep) -> None:
        self.freeze_scans()
        super()._revert(step)
        for part in step.parts:
            self._note_due(part.before)

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a committed delta (or a snapshot, whose rows are all updates) on top of the newest version."""
        self.freeze_scans()
        with self.changing():
            super().load(delta, version, watermark_ms)
            if self._due_slot is not None:
                updated = delta.filter(pc.equal(delta.column(CHANGE_COLUMN), UPDATED))
                for batch in batches(updated, self.table.piece_bytes):
                    self._note_due(self.table.rows_of(batch))

    def clear_columns(self, names: Collection[str]) -> None:
        """Make value columns null in all rows, for good: there is no way back to versions before."""
        assert not self.steps(), "there is no way back to what a store was loaded from"
        self.freeze_scans()
        with self.changing():
            used = self.table.used_rows()
            dropped = [slot for slot in self.table.layout.state if slot.name in names]
            for block in blocks(self.table.memory, used):
                for slot in dropped:
                    used[block, slot.word : slot.word + slot.words] = 0
                    used[block, slot.flag_word] &= ~np.uint64(slot.flag)

    # -- rows that fall due ---------------------------------------------------------------------------------------

    def _note_due(self, rows: Words) -> None:
        if self._due_slot is None:
            return
        if self._due_queue.is_cluttered(len(self.table)):
            self._due_queue = ExpiryQueue(self.table.memory)
            slots = self.table.live()
            self._enter_due(self._due_times(self.table.taken(slots)), slots)
        self._enter_due(self._due_times(rows), self.table.find(rows))

    def _enter_due(self, times: Slots, slots: Slots) -> None:
        is_entered = (times != NEVER) & (slots >= 0)
        self._due_queue.add(times[is_entered], slots[is_entered])

    def _require_due(self) -> FieldSlot:
        if self._due_slot is None:
            raise InvalidRequestError("the store was opened without a column by which its rows fall due")
        return self._due_slot

    def _due_times(self, rows: Words) -> Slots:
        slot = self._require_due()
        valid = (rows[:, slot.flag_word] & np.uint64(slot.flag)) != 0
        times: Slots = np.where(valid, np.ascontiguousarray(rows[:, slot.word]).view(np.int64), NEVER)
        return times

    def due(self, limit: int) -> Words:
        """Return the rows whose due column is at most `limit` now, as words; what is not due is not looked at."""
        self._require_due()
        with self.changing():  # what is found is out of the queue until it is entered again
            slots = distinct(self._due_queue.due(limit))
            rows = self.table.taken(slots)
            times = self._due_times(rows)
            is_due = (rows[:, 0] & LIVE != 0) & (times <= limit)
            # The caller may leave a row as it is, or abort: it stays due.
            self._enter_due(times[is_due], slots[is_due])
            due: Words = rows[is_due]
            return due

    def earliest_due(self) -> int | None:
        """Return the least value of the due column as the rows are now; None if no row falls due."""
        least = int(self._due_times(self.table.taken(self.table.live())).min(initial=NEVER))
        return None if least == NEVER else least

    # -- scans and strings ----------------------------------------------------------------------------------------

    def watch(self, scan: RowScan) -> RowScan:
        """Keep a scan as it is when the table changes."""
        self._scans.add(scan)
        return scan

    def freeze_scans(self) -> None:
        """Called before every change."""
        for scan in list(self._scans):
            scan.freeze()
            self._readers.add(scan)
        self._scans.clear()

    def compact(self) -> None:
        """Drop unused strings if it is time to, once scans have their own copies; see :meth:`VersionedTable.compact`."""
        if self._compaction.is_due(self.table):
            self.freeze_scans()
            self._compaction.run(self)


def _chosen(rows: Words, mask: Mask) -> Words:
    """Return some of the rows; they are not copied if that is all."""
    return rows if mask.all() else rows[mask]


def _joined(parts: list[Words], words: int) -> Words:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, words), np.uint64), *parts])

"""A table whose newest versions stay within reach: what every version overwrote is kept, and can be put back.

State is changed in place. Each :class:`VersionStep` remembers the keys that its version made and the rows it overwrote or
removed; going back puts those back, and a reader of an older version lays them over the table
(:mod:`store_actors.engine.table_view`). Nothing else is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from coordinator.model.errors import InvalidRequestError, VersionNotFoundError
from coordinator.model.schema import StateSchema
from store_actors.engine.arrays import Slots, Words
from store_actors.engine.compaction import compact_together
from store_actors.engine.frozen import FrozenRows
from store_actors.engine.index_kernels import LIVE
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.pieces import batches
from store_actors.engine.table import GroupTable

RETAINED_VERSIONS = 2

#: Last column of a delta: what the batch did to the row's group.
CHANGE_COLUMN = "__change"
#: The group is in the version, with the row's values.
UPDATED = 0
#: The group was removed (closed by the watermark, or by its key); the row holds its final values, from an earlier version.
REMOVED = 1
#: The batch changed the group and its watermark closed it at once.
UPDATED_AND_REMOVED = 2


#: Garbage strings are not looked for in pools smaller than this, in bytes.
_SMALL_POOL = 1 << 20

_serials = count(1)


@dataclass(frozen=True, slots=True)
class Change:
    """The change that one batch made to a shard."""

    version: int
    base_version: int
    #: ``row_schema`` columns and ``__change`` (int8).
    delta: pa.Table
    rows_updated: int
    rows_removed: int
    #: ``rows_in``, ``rows_late``: Input rows of the shard, and rows (of an aggregation groups of them, as Spark counts them)
    #: dropped as late.
    rows_in: int
    rows_late: int
    #: Watermark that includes the batch, in milliseconds since the epoch.
    watermark_ms: int
    #: Rows that the batch emits, if these cannot be read off `delta`.
    emitted: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class UndoPart:
    """The way back from one change."""

    #: Rows that were new; only their flag and key words are used, and further words may be missing.
    created: Words
    #: Whole rows of the version before that were overwritten or removed.
    before: Words


@dataclass(slots=True)
class VersionStep:
    """The difference between a version and the one it was made from. A key's first entry has its row as it was before."""

    version: int
    watermark_ms: int
    base_version: int
    base_watermark_ms: int
    memory: Memory
    #: In the order of the changes; an epoch has one for each piece of rows.
    parts: list[UndoPart] = field(default_factory=list)
    nbytes: int = 0
    #: Never used twice, unlike versions, which are written again after a rollback.
    serial: int = field(default_factory=lambda: next(_serials))

    def add(self, *parts: UndoPart) -> None:
        """Add the way back from the next changes."""
        for part in parts:
            kept = UndoPart(self.memory.kept(part.created), self.memory.kept(part.before))
            self.parts.append(kept)
            self.nbytes += kept.created.nbytes + kept.before.nbytes

    def change(self, delta: pa.Table, *, rows_updated: int, rows_removed: int, rows_in: int, rows_late: int) -> Change:
        """Return the change that makes the version, with the watermark that the step has by now."""
        return Change(
            self.version, self.base_version, delta, rows_updated, rows_removed, rows_in, rows_late, self.watermark_ms
        )


class VersionedTable:
    """Rows at the newest version, with the way back to the :data:`RETAINED_VERSIONS` versions before."""

    def __init__(
        self,
        schema: StateSchema,
        seed: int = 0,
        memory: Memory = HEAP,
        table: Callable[[StateSchema, int, Memory], GroupTable] = GroupTable,
    ) -> None:
        self.schema = schema
        self.table = table(schema, seed, memory)
        self.version = 0
        self.watermark_ms = 0
        #: Rows up to it are late for the version that is being made.
        self.late_ms = 0
        #: Serial of the step that made the oldest retained version.
        self._origin = next(_serials)
        self._steps: deque[VersionStep] = deque()
        self._pending: VersionStep | None = None
        self._compaction = Compaction()
        #: Whether unused strings and lists are compacted automatically. Overwritten values and late rows leave some.
        self._compacts_itself = True

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Memory in bytes, retained versions included."""
        return self.table.nbytes + sum(step.nbytes for step in self._steps)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's words."""
        return 8 * self.table.layout.row_words

    def output_watermark_ms(self, watermark_ms: int) -> int:
        """Return the event time that emitted rows have reached when the operator's watermark is `watermark_ms`."""
        return watermark_ms

    # -- the next version -----------------------------------------------------------------------------------------

    def check_next(self, version: int, late_ms: int | None = None) -> None:
        """Refuse a version that cannot be made now.

        Parameters
        ----------
        late_ms
            Watermark up to which rows are late for it; by default that of the newest version.

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
        self.late_ms = self.watermark_ms if late_ms is None else late_ms

    def begin(self, version: int) -> VersionStep:
        """Start a version; its changes are added to the step as they are made.

        Raises errors as :meth:`check_next`.
        """
        self.check_next(version, self.late_ms)
        self._pending = VersionStep(version, self.watermark_ms, self.version, self.watermark_ms, self.table.memory)
        return self._pending

    def pending(self) -> VersionStep:
        """Return the step of the version that was begun.

        Raises
        ------
        InvalidRequestError
            None was.
        """
        if self._pending is None:
            raise InvalidRequestError("the shard has no uncommitted change", version=self.version)
        return self._pending

    def commit(self) -> int:
        """Make the pending change the newest version; returns its number."""
        step = self._take_pending()
        if len(self._steps) == RETAINED_VERSIONS:
            self._origin = self._steps.popleft().serial
        self._steps.append(step)
        self.version, self.watermark_ms = step.version, step.watermark_ms
        if self._compacts_itself:
            self.compact()
        return self.version

    def _expired(self, watermark_ms: int) -> tuple[Slots, Words]:
        """Remove the rows that the watermark has passed; return their slots, and the rows as they were."""
        slots = self.table.evict(watermark_ms * 1000)
        rows = self.table.taken(slots)
        rows[:, 0] |= LIVE
        return slots, rows

    def abort(self) -> None:
        """Drop the pending change; the shard is again what it was before."""
        self._revert(self._take_pending())

    def _take_pending(self) -> VersionStep:
        pending, self._pending = self.pending(), None
        return pending

    # -- versions -------------------------------------------------------------------------------------------------

    def retained(self) -> dict[int, int]:
        """Return the versions in memory, oldest first, each with the serial number of the history that made it."""
        if not self._steps:
            return {self.version: self._origin}
        return {self._steps[0].base_version: self._origin} | {step.version: step.serial for step in self._steps}

    def steps_since(self, version: int, serial: int) -> Iterator[VersionStep]:
        """Yield the steps that were made on top of a version, oldest first, a pending one last.

        Raises
        ------
        VersionNotFoundError
            The version is not in memory, or another attempt's of the same number is.
        """
        if self.retained().get(version) != serial:
            raise VersionNotFoundError(
                "memory no longer holds the version that is read; nothing is lost: load it from its files",
                version=version,
                retained=list(self.retained()),
            )
        yield from (step for step in self._steps if step.base_version >= version)
        if self._pending is not None:
            yield self._pending

    def steps(self) -> list[VersionStep]:
        """Return every step that memory holds, a pending one last."""
        return [*self._steps, *([] if self._pending is None else [self._pending])]

    def rollback(self, version: int) -> bool:
        """Go back to an earlier version if memory still has the way; False (and no effect) if it must be loaded."""
        if self._pending is not None:
            self.abort()
        if version not in self.retained():
            return False
        while self.version != version:
            step = self._steps.pop()
            self._revert(step)
            self.version, self.watermark_ms = step.base_version, step.base_watermark_ms
        return True

    def _revert(self, step: VersionStep) -> None:
        for part in reversed(step.parts):
            self.table.remove_rows(part.created)
            self.table.put(part.before)
        self.table.will_undo()

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a committed delta (or a snapshot, whose rows are all updates) on top of the newest version."""
        live = pc.equal(delta.column(CHANGE_COLUMN), UPDATED)
        rows = delta.drop_columns([CHANGE_COLUMN])
        for batch in batches(rows.filter(live), self.table.piece_bytes):
            self.table.put(self.table.rows_of(batch))
        for batch in batches(rows.filter(pc.invert(live)), self.table.piece_bytes):
            self.table.remove_rows(self.table.rows_of(batch, self.table.layout.keys))
        self._steps.clear()
        self.version, self.watermark_ms, self._origin = version, watermark_ms, next(_serials)
        if self._compacts_itself:
            self.compact()

    def snapshot(self) -> pa.Table:
        """Return all rows of the newest version, with a pending change if there is one; ``row_schema``."""
        return self.table.decode(self.table.taken(self.table.live()))

    def frozen(self) -> Frozen:
        """Return :meth:`snapshot` of now, in pieces."""
        return frozen_pieces(FrozenRows(self.table), self.table.decode_frozen)

    def room(self) -> Mapping[str, Any]:
        """Return the sizes of the table, as JSON values, for :meth:`reserve`."""
        return self.table.room()

    def reserve(self, room: Mapping[str, Any]) -> None:
        """Reserve memory for the rows of another table, by its sizes; sizes of another kind of table are ignored."""
        self.table.reserve(room)

    def compact(self) -> None:
        """Drop strings and lists that no version holds any more, if it is time to."""
        if self._compaction.is_due(self.table):
            self._compaction.run(self)


#: The rows of one moment, in no particular order. Each piece is taken under the owner's lock, and then made into tables without it.
Frozen = Generator[Callable[[], Iterator[pa.Table]], None, None]


def frozen_pieces(rows: FrozenRows, decode: Callable[[Words, FrozenRows], Iterator[pa.Table]]) -> Frozen:
    """Yield the pieces of frozen rows, one after the other."""
    try:
        for piece in rows:
            yield partial(decode, piece, rows)
    finally:
        rows.close()


class Compaction:
    """When strings and lists that no version holds any more are dropped: each time that their pools have doubled."""

    def __init__(self) -> None:
        #: Size of the pools after the last time, in bytes.
        self._floor = 0

    def is_due(self, *sharing: GroupTable) -> bool:
        """Return whether it is time to, by the pools of the first table. Not while a reader has the tables frozen."""
        return _pooled(sharing[0]) >= 2 * self._floor + _SMALL_POOL and not any(table.is_frozen for table in sharing)

    def run(self, *sharing: VersionedTable) -> None:
        """Drop what none of the tables, which share one pool of strings, holds in any of its versions."""
        tables = []
        for store in sharing:
            parts = [part for step in store.steps() for part in step.parts]
            # Of created rows only flags and keys are used, so they hold no list.
            key_end = store.table.layout.flag_words + store.table.layout.key_words
            tables.append((store.table, [rows for part in parts for rows in (part.created[:, :key_end], part.before)]))
        compact_together(tables)
        self._floor = _pooled(sharing[0].table)


def _pooled(table: GroupTable) -> int:
    """Return the bytes in a table's pools. Of lists only what is in use: room to grow is not garbage."""
    return table.pool.nbytes + table.lists.used * table.lists.arena.itemsize


class Loadable(Protocol):
    """A store, empty or at some version, that takes the rows of files."""

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a committed delta, or a file of a snapshot, on top of the newest version."""

    def reserve(self, room: Mapping[str, Any]) -> None:
        """Reserve memory for the rows of a snapshot."""


class VersionedStore(Loadable, Protocol):
    """Rows at their newest version, with the way back to the few versions before.

    A change is pending from the write that makes it until :meth:`commit` or :meth:`abort`.
    """

    @property
    def schema(self) -> StateSchema:
        """Schema of rows and deltas."""

    @property
    def version(self) -> int:
        """The newest committed version."""

    @property
    def watermark_ms(self) -> int:
        """Watermark of the newest version, in milliseconds since the epoch."""

    @property
    def nbytes(self) -> int:
        """Memory of the store, in bytes."""

    def __len__(self) -> int:
        """Return the number of rows, those of a pending change included."""

    def commit(self) -> object:
        """Make the pending change the newest version."""

    def abort(self) -> None:
        """Drop the pending change."""

    def rollback(self, version: int) -> bool:
        """Go back to a retained version; return False (without any effect) if the version must be loaded."""

    def retained(self) -> Collection[int]:
        """Return the versions in memory, oldest first."""

    def frozen(self) -> Frozen:
        """Return all rows of the newest version as they are now, in pieces."""

    def room(self) -> Mapping[str, Any]:
        """Return how much memory the rows need, as JSON values, for :meth:`reserve`."""

"""Loading a version of a shard from its files: in which order they are read, and which of their rows are of the shard.

A shard of a rescaled state is, until it has a snapshot of its own, what its parents had of its keys. Their files are read side by side,
version by version: what a version changed in all rows, such as a column that it dropped, is then done when the rows of all parents are
at that version.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from coordinator.model.commits import CommitEntry, SnapshotEntry, StoredFile
from coordinator.model.errors import CorruptStateError
from coordinator.model.load_plans import LoadPlan, Parent
from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.engine.spark_hash import spark_hash
from store_actors.engine.versions import Loadable
from store_actors.serving.files import corrupt_file, decode_file, room_of
from store_actors.serving.metrics import StoreMetrics

log = logging.getLogger(__name__)

#: Converts rows to the columns of a store. Arguments: the rows, and the name of the file that they come from.
Adapt = Callable[[pa.Table, str], pa.Table]

#: Stands for a file's name where rows come from memory.
IN_MEMORY = "(memory)"
#: Files that are fetched ahead of the one that is being applied.
_AHEAD = 8

Store = TypeVar("Store", bound=Loadable)
#: Rows of a parent that memory holds at the version that is taken over; None if it does not.
InMemory = Callable[[Parent, int], "MemoryRows | None"]


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Rows of a shard that memory has: as of a snapshot, ``__change`` last."""

    watermark_ms: int
    tables: Iterable[pa.Table]


class NoSnapshotError(Exception):
    """All snapshots of a shard that needs one were passed over."""


@dataclass(frozen=True, slots=True)
class Split:
    """The selection of a shard's rows that are of another shard, which was made of it by a rescaling."""

    #: Columns whose hash tells.
    keys: tuple[str, ...]
    #: Shard and number of shards of the files: where all their rows are.
    whole: tuple[int, int]
    #: Shards and their numbers, from the first rescale on: where the rows are that are wanted.
    into: tuple[tuple[int, int], ...]

    def rows(self, table: pa.Table, file: str) -> pa.Table:
        """Return the rows that are wanted.

        Raises
        ------
        CorruptStateError
            A row is not where its key belongs, so it is not known where the others are.
        """
        hashes = spark_hash(table, self.keys)
        shard, num_shards = self.whole
        if (hashes % num_shards != shard).any():
            raise CorruptStateError(
                "a file has rows of keys that belong to another shard, so it cannot be told which rows a shard of the rescaled state "
                "has; nothing was changed; restart the query with the number of shards that wrote the file",
                file=file,
                shard=shard,
                shards=num_shards,
                keys=", ".join(self.keys),
            )
        chosen = np.ones(len(hashes), np.bool_)
        for shard, num_shards in self.into:
            chosen &= hashes % num_shards == shard
        return table if chosen.all() else table.filter(pa.array(chosen))


@dataclass(frozen=True, slots=True)
class Step:
    """A file that is read, or rows that memory has, as a snapshot of the version."""

    version: int
    source: CommitEntry | SnapshotEntry | MemoryRows
    split: Split | None = None


def reading_order(plan: LoadPlan, skipped: Collection[str], in_memory: InMemory | None) -> list[Step]:
    """Return the steps that make a plan's version, in order.

    Parameters
    ----------
    skipped
        First files of snapshots that cannot be read.

    Raises
    ------
    NoSnapshotError
        Without these there is no way.
    """
    # Stable, and of one shard alone it is in order.
    return sorted(_steps(plan, None, skipped, in_memory), key=lambda step: step.version)


def _steps(plan: LoadPlan, split: Split | None, skipped: Collection[str], in_memory: InMemory | None) -> Iterator[Step]:
    start = next((snapshot for snapshot in plan.snapshots if snapshot.file not in skipped), None)
    if start is not None:
        yield Step(start.version, start, split)
    elif plan.oldest_retained > 0:
        raise NoSnapshotError
    elif plan.origin is not None:
        origin = plan.origin
        child = origin.shard, origin.num_shards
        for parent in origin.parents:
            whole = parent.shard, parent.num_shards
            child_split = (
                Split(origin.keys, whole, (child,))
                if split is None
                else replace(split, whole=whole, into=(child, *split.into))
            )
            rows = None if in_memory is None else in_memory(parent, origin.version)
            if rows is None:
                yield from _steps(parent.plan, child_split, skipped, in_memory)
            else:
                yield Step(origin.version, rows, child_split)
    since = 0 if start is None else start.version
    yield from (Step(entry.version, entry, split) for entry in plan.deltas if entry.version > since)


class Loader:
    """Reads files of an object store, several at once.

    Parameters
    ----------
    ahead_bytes
        Largest number of bytes that are fetched before they are used. A single file may be larger.
    """

    def __init__(
        self, objects: ObjectStore, metrics: StoreMetrics, runtime: Runtime, ahead_bytes: int = sys.maxsize
    ) -> None:
        self._ahead_bytes = ahead_bytes
        self._objects = objects
        self._metrics = metrics
        self._clock = runtime.clock
        self._pool = runtime.threads.pool(_AHEAD, "statefleet-load")

    def load(
        self,
        make: Callable[[], Store],
        plan: LoadPlan,
        adapt: Adapt | None = None,
        in_memory: InMemory | None = None,
    ) -> tuple[Store, int]:
        """Return a shard at the plan's version, and how many deltas were applied after the snapshot.

        A snapshot that is missing or damaged is skipped with a warning, as an older snapshot and more deltas give the same rows.

        Parameters
        ----------
        adapt
            Converts rows to the columns of the shard. The file's name is :data:`IN_MEMORY` for rows from memory.
        in_memory
            Returns the rows of a parent shard of a rescaled one, with ``__change`` as last column, if they are in memory. By default
            all rows are read from files.

        Raises
        ------
        CorruptStateError
            A delta that is needed is missing or damaged. Or no snapshot can be read, and early deltas are not retained.
        """
        begun_s = self._clock.elapsed_s()
        skipped: set[str] = set()
        first_error: CorruptStateError | None = None
        while True:
            try:
                steps = reading_order(plan, skipped, in_memory)
            except NoSnapshotError:
                assert first_error is not None, "a floor has a snapshot"
                raise first_error from None
            shard = make()
            try:
                for run in _runs(steps):
                    self._enter(shard, run, adapt)
            except _SnapshotError as error:
                self._metrics.snapshots_skipped += 1
                log.warning("falling back to older files: %s", error.cause)
                first_error = first_error or error.cause
                skipped.add(error.file)
                continue
            self._metrics.snapshots_loaded += sum(isinstance(step.source, SnapshotEntry) for step in steps)
            self._metrics.made_of_memory += sum(isinstance(step.source, MemoryRows) for step in steps)
            self._metrics.loading_s += self._clock.elapsed_s() - begun_s
            return shard, sum(isinstance(step.source, CommitEntry) for step in steps)

    def _enter(self, shard: Loadable, run: Sequence[Step], adapt: Adapt | None) -> None:
        """Load the rows of a run of steps: rows from memory, a snapshot, or deltas."""
        first = run[0]
        if isinstance(first.source, MemoryRows):
            for rows in first.source.tables:
                _load(shard, first, rows, IN_MEMORY, adapt)
        elif isinstance(first.source, SnapshotEntry):
            self._enter_snapshot(shard, first, first.source, adapt)
        else:
            entries = [step.source for step in run if isinstance(step.source, CommitEntry)]
            for step, entry, rows in zip(run, entries, self._ahead(entries), strict=True):
                _load(shard, step, rows, entry.file, adapt)

    def _enter_snapshot(self, shard: Loadable, step: Step, snapshot: SnapshotEntry, adapt: Adapt | None) -> None:
        """Load the files of a snapshot in order; the next file is fetched meanwhile."""
        first, *further = snapshot.pieces
        rows = self._read_snapshot(snapshot, first)
        if further and step.split is None:
            shard.reserve(room_of(rows))
        for piece in further:
            waiting = None
            if piece.file_bytes <= self._ahead_bytes:
                waiting = self._pool.submit(self._read_snapshot, snapshot, piece)
            _load(shard, step, rows, snapshot.file, adapt)
            rows = self._read_snapshot(snapshot, piece) if waiting is None else waiting.result()
        _load(shard, step, rows, snapshot.file, adapt)

    def _read_snapshot(self, snapshot: SnapshotEntry, piece: StoredFile) -> pa.Table:
        try:
            return self.read(snapshot, piece)
        except CorruptStateError as error:
            raise _SnapshotError(snapshot.file, error) from error

    def replay(self, shard: Loadable, plan: LoadPlan, version: int, adapt: Adapt | None = None) -> int:
        """Apply the plan's deltas after `version` to a shard; return their number.

        Raises
        ------
        CorruptStateError
            A delta is missing or damaged; the shard is at some version in between.
        """
        entries = [entry for entry in plan.deltas if entry.version > version]
        for entry, rows in zip(entries, self._ahead(entries), strict=True):
            shard.load(adapt(rows, entry.file) if adapt else rows, entry.version, entry.watermark_ms)
        return len(entries)

    def _ahead(self, entries: Sequence[CommitEntry]) -> Iterator[pa.Table]:
        """Yield the rows of each entry, in order; the next few files are fetched meanwhile."""
        waiting: deque[tuple[Any, int]] = deque()
        unread, under_way = deque(entries), 0
        while unread or waiting:
            while unread and (
                not waiting or (len(waiting) < _AHEAD and under_way + unread[0].file_bytes <= self._ahead_bytes)
            ):
                entry = unread.popleft()
                waiting.append((self._pool.submit(self.read, entry), entry.file_bytes))
                under_way += entry.file_bytes
            table, size = waiting.popleft()
            yield table.result()
            under_way -= size

    def read(self, entry: CommitEntry | SnapshotEntry, piece: StoredFile | None = None) -> pa.Table:
        """Return the checked rows of a file; of a snapshot, those of a `piece` (by default the first).

        Raises
        ------
        CorruptStateError
            It is missing or damaged.
        """
        file = entry.file if piece is None else piece.file
        try:
            data = self._objects.get(file)
        except FileNotFoundError as error:
            raise corrupt_file(entry, "it is missing from the object store", file) from error
        self._metrics.bytes_loaded += len(data)
        self._metrics.deltas_loaded += isinstance(entry, CommitEntry)
        rows = decode_file(data, entry, piece)
        self._metrics.rows_loaded += len(rows)
        return rows


class _SnapshotError(Exception):
    """A file of a snapshot is missing or damaged."""

    def __init__(self, file: str, cause: CorruptStateError) -> None:
        super().__init__(file)
        self.file, self.cause = file, cause


def _runs(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Group consecutive deltas, which are fetched ahead; every other step is a group of its own."""
    for is_delta, run in groupby(steps, key=lambda step: isinstance(step.source, CommitEntry)):
        if is_delta:
            yield list(run)
        else:
            yield from ([step] for step in run)


def _load(shard: Loadable, step: Step, rows: pa.Table, file: str, adapt: Adapt | None) -> None:
    chosen = rows if step.split is None else step.split.rows(rows, file)
    shard.load(adapt(chosen, file) if adapt else chosen, step.version, step.source.watermark_ms)

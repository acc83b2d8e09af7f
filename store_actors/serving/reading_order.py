"""In which order the files of a load plan are read, and which of their rows are of the shard. Pure rules.

A shard of a rescaled state is, until it has a snapshot of its own, what its parents had of its keys. Their files are read side by side,
version by version: what a version changed in all rows, such as a column that it dropped, is then done when the rows of all parents are
at that version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import CorruptStateError
from coordinator.model.load_plans import LoadPlan, Parent
from store_actors.engine.spark_hash import spark_hash

#: Rows of a parent that memory holds at the version that is taken over; None if it does not.
InMemory = Callable[[Parent, int], "MemoryRows | None"]


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Rows of a shard that memory has: as of a snapshot, ``__change`` last."""

    watermark_ms: int
    tables: Iterable[pa.Table]


class NoSnapshotError(Exception):
    """All snapshots of a shard that needs one were passed over."""


def nothing_in_memory(parent: Parent, version: int) -> MemoryRows | None:
    """Return None for every parent: all rows are read from files."""
    return None


@dataclass(frozen=True, slots=True)
class Split:
    """The selection of a shard's rows that are of another shard, which was made of it by a rescaling.

    Attributes
    ----------
    keys
        Columns whose hash tells.
    whole
        Shard and number of shards of the files: where all their rows are.
    into
        Shards and their numbers, from the first rescale on: where the rows are that are wanted.
    """

    keys: tuple[str, ...]
    whole: tuple[int, int]
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
    """A file that is read, or rows that memory has.

    Attributes
    ----------
    entry
        Whose files; None of rows in memory.
    rows, watermark_ms
        Those in memory, as a snapshot of the version, with its watermark.
    split
        Which of the rows; None for all.
    """

    version: int
    entry: CommitEntry | SnapshotEntry | None
    rows: Iterable[pa.Table] = ()
    watermark_ms: int = 0
    split: Split | None = None


def reading_order(plan: LoadPlan, skipped: Collection[str], in_memory: InMemory) -> list[Step]:
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


def _steps(plan: LoadPlan, split: Split | None, skipped: Collection[str], in_memory: InMemory) -> Iterator[Step]:
    start = next((snapshot for snapshot in plan.snapshots if snapshot.file not in skipped), None)
    if start is not None:
        yield Step(start.version, start, split=split)
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
            rows = in_memory(parent, origin.version)
            if rows is None:
                yield from _steps(parent.plan, child_split, skipped, in_memory)
            else:
                yield Step(origin.version, None, rows.tables, rows.watermark_ms, child_split)
    since = 0 if start is None else start.version
    yield from (Step(entry.version, entry, split=split) for entry in plan.deltas if entry.version > since)

"""Sums over the commits of a batch, of which results, versions, metrics and the dashboard show parts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from coordinator.model.commits import CommitEntry


class BatchStats:
    """Sums over commits of one version of a state. Each sum is computed when it is asked for: there may be many thousands of shards.

    Parameters
    ----------
    partitions
        Of each partition that committed, the commits of its stores; at least one each.
    """

    __slots__ = ("_entries", "_several", "_single")

    def __init__(self, partitions: Sequence[Sequence[CommitEntry]]) -> None:
        #: Commits of partitions that have one store, as almost all do; and those of the others, by partition.
        self._single = [stores[0] for stores in partitions if len(stores) == 1]
        self._several = [stores for stores in partitions if len(stores) > 1]
        self._entries = [*self._single, *(entry for stores in self._several for entry in stores)]

    @property
    def commits(self) -> int:
        """Partitions that committed."""
        return len(self._single) + len(self._several)

    @property
    def rows_in(self) -> int:
        """Rows that reached the partitions."""
        return self._of_partitions("rows_in")

    @property
    def rows_late(self) -> int:
        """Late rows among :attr:`rows_in`."""
        return self._of_partitions("rows_late")

    def _of_partitions(self, field: str) -> int:
        """Return the sum of a field that every store of a partition reports for all of them, so that the largest report counts."""
        value = attrgetter(field)
        largest: int = sum(map(value, self._single)) + sum(max(map(value, stores)) for stores in self._several)
        return largest

    def total(self, field: str) -> int:
        """Return the sum of a field of :class:`~coordinator.model.commits.CommitEntry` over all stores."""
        return sum(map(attrgetter(field), self._entries))

    def counts(self) -> dict[str, int]:
        """Return sums over the batch by the names of their metrics."""
        return {
            "rows_in": self.rows_in,
            "rows_late": self.rows_late,
            "rows_updated": self.total("rows_updated"),
            "rows_removed": self.total("rows_removed"),
            "delta_bytes": self.total("file_bytes"),
        }

    def of_epoch(self) -> dict[str, int]:
        """Return the longest wait of a row and the number of pieces, if it is an epoch of a continuous query."""
        waits = [entry.waited_ms for entry in self._entries if entry.waited_ms is not None]
        return {"longestWaitMs": max(waits), "pieces": self.total("pieces")} if waits else {}

    @property
    def first_begun_ms(self) -> int | None:
        """When the first shard began, in milliseconds since the epoch; None without commits."""
        return min([entry.committed_at_ms for entry in self._entries], default=None)

    @property
    def last_begun_ms(self) -> int | None:
        """When the last shard began, in milliseconds since the epoch; None without commits."""
        return max([entry.committed_at_ms for entry in self._entries], default=None)

    @property
    def watermark_ms(self) -> int | None:
        """The lowest watermark; None without commits."""
        return min([entry.watermark_ms for entry in self._entries], default=None)

    @property
    def due_ms(self) -> int | None:
        """Earliest time at which a row of the state falls due by processing time; None if none does."""
        return min([entry.due_ms for entry in self._entries if entry.due_ms is not None], default=None)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a micro-batch for a state, all shards together."""

    #: Shards that have not committed it.
    missing: tuple[int, ...]
    #: Of each shard that has, the rows that reached it.
    rows_of: Mapping[int, int]
    #: Sums by the names of Spark's ``StateOperatorProgress``, as JSON data: times that all shards worked on rows and wrote deltas, and
    #: ``due_ms``, the earliest time at which a row of the state falls due by processing time (None if none does), and the watermark.
    progress: Mapping[str, Any]

    def unlike(self, sent: Mapping[int, Collection[int]]) -> dict[int, tuple[Collection[int], int]]:
        """Return the shards to which other numbers of rows were sent than they committed.

        Parameters
        ----------
        sent
            Of each shard, how many rows each attempt at a task sent it. A shard that is not there was committed by a lost task.

        Returns
        -------
        dict
            Of each such shard, the numbers that were sent, and the number that it committed.
        """
        return {
            shard: (sent[shard], rows)
            for shard, rows in self.rows_of.items()
            if shard in sent and rows not in sent[shard]
        }

    @classmethod
    def of(cls, missing: tuple[int, ...], shards: Mapping[int, Sequence[CommitEntry]]) -> BatchResult:
        """Return the result of the shards that have committed, each given as the commits of its stores."""
        stats = BatchStats(list(shards.values()))
        progress = {
            "rows_total": stats.total("state_rows"),
            "rows_updated": stats.total("rows_updated"),
            "rows_removed": stats.total("rows_removed"),
            "rows_late": stats.rows_late,
            "memory_bytes": stats.total("state_bytes"),
            "updates_ms": stats.total("apply_ms"),
            "commit_ms": stats.total("write_ms"),
            "due_ms": stats.due_ms,
            "watermark_ms": stats.watermark_ms or 0,
            "custom": {"rowsRead": stats.rows_in, "deltaBytes": stats.total("file_bytes"), **stats.of_epoch()},
        }
        rows_of = {shard: max(entry.rows_in for entry in stores) for shard, stores in shards.items()}
        return cls(missing, rows_of, progress)

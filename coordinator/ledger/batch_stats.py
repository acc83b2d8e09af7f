"""Sums over the commits of a batch, of which results, versions, metrics and the dashboard show parts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
        """Rows that reached the partitions. Every store of a partition reports all of them, so that the largest report counts."""
        largest = [max(entry.rows_in for entry in stores) for stores in self._several]
        return sum([entry.rows_in for entry in self._single]) + sum(largest)

    @property
    def rows_late(self) -> int:
        """Late rows among :attr:`rows_in`."""
        largest = [max(entry.rows_late for entry in stores) for stores in self._several]
        return sum([entry.rows_late for entry in self._single]) + sum(largest)

    @property
    def rows_updated(self) -> int:
        """Rows of state that the batch changed, in all stores."""
        return sum([entry.rows_updated for entry in self._entries])

    @property
    def rows_removed(self) -> int:
        """Rows of state that the batch removed, in all stores."""
        return sum([entry.rows_removed for entry in self._entries])

    @property
    def state_rows(self) -> int:
        """Rows of the stores after the batch."""
        return sum([entry.state_rows for entry in self._entries])

    @property
    def state_bytes(self) -> int:
        """Bytes of the stores after the batch."""
        return sum([entry.state_bytes for entry in self._entries])

    @property
    def delta_bytes(self) -> int:
        """Size of the delta files."""
        return sum([entry.file_bytes for entry in self._entries])

    @property
    def apply_ms(self) -> int:
        """Time that the shards worked on rows; commits that were read from the log have none."""
        return sum([entry.apply_ms for entry in self._entries])

    @property
    def write_ms(self) -> int:
        """Time that the shards wrote deltas; commits that were read from the log have none."""
        return sum([entry.write_ms for entry in self._entries])

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
    """The result of a micro-batch for a state, all shards together; the sums have the names of Spark's ``StateOperatorProgress``.

    Attributes
    ----------
    missing
        Shards that have not committed it.
    rows_of
        Of each shard that has, the rows that reached it.
    updates_ms, commit_ms
        Time that all shards worked on rows, and wrote deltas.
    due_ms
        Earliest time at which a row of the state falls due by processing time; None if none does.
    """

    missing: tuple[int, ...]
    rows_of: Mapping[int, int]
    rows_total: int
    rows_updated: int
    rows_removed: int
    rows_late: int
    memory_bytes: int
    delta_bytes: int
    updates_ms: int
    commit_ms: int
    due_ms: int | None

    @property
    def rows_in(self) -> int:
        """Rows that reached the shards."""
        return sum(self.rows_of.values())

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
        return cls(
            missing,
            rows_of={shard: max(entry.rows_in for entry in stores) for shard, stores in shards.items()},
            rows_total=stats.state_rows,
            rows_updated=stats.rows_updated,
            rows_removed=stats.rows_removed,
            rows_late=stats.rows_late,
            memory_bytes=stats.state_bytes,
            delta_bytes=stats.delta_bytes,
            updates_ms=stats.apply_ms,
            commit_ms=stats.write_ms,
            due_ms=stats.due_ms,
        )

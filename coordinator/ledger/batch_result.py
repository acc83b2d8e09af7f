"""What a micro-batch did to a state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.model.commits import CommitEntry

__all__ = ["BatchResult"]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a micro-batch did to a state, all shards together; the figures have the names of Spark's ``StateOperatorProgress``.

    Attributes
    ----------
    missing
        Shards that have not committed it.
    updates_ms, commit_ms
        Time that all shards worked on rows, and wrote deltas.
    due_ms
        Earliest time at which a row of the state falls due by processing time; None if none does.
    """

    missing: tuple[int, ...]
    rows_total: int
    rows_updated: int
    rows_removed: int
    rows_late: int
    rows_in: int
    memory_bytes: int
    delta_bytes: int
    updates_ms: int
    commit_ms: int
    due_ms: int | None

    @classmethod
    def of(cls, missing: tuple[int, ...], entries: Sequence[CommitEntry]) -> BatchResult:
        """The result of the shards that have committed."""

        def total(name: str) -> int:
            return sum(getattr(entry, name) for entry in entries)

        due = [entry.due_ms for entry in entries if entry.due_ms is not None]
        return cls(
            missing,
            rows_total=total("state_rows"),
            rows_updated=total("rows_updated"),
            rows_removed=total("rows_removed"),
            rows_late=total("rows_late"),
            rows_in=total("rows_in"),
            memory_bytes=total("state_bytes"),
            delta_bytes=total("file_bytes"),
            updates_ms=total("apply_ms"),
            commit_ms=total("write_ms"),
            due_ms=min(due, default=None),
        )

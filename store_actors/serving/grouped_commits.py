"""Commits of partitions that are ready at the same time are counted with one call of the coordinator. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.model import CommitEntry, CommitOutcome, PartitionCommit
from coordinator.surroundings import Lock

__all__ = ["GroupedCommits"]


@dataclass(slots=True)
class _Waiting:
    """A commit whose thread waits; what came of it, once that is known."""

    commit: PartitionCommit
    outcome: CommitOutcome | BaseException | None = None


class GroupedCommits:
    """The commits of one process. Thread-safe.

    Nobody waits for company: a commit that finds no call under way goes at once. Those that come while one is under way go together
    with the next.

    Parameters
    ----------
    send
        Has commits counted; returns what came of each, in their order.
    new_lock
        Makes locks.
    """

    def __init__(
        self, send: Callable[[Sequence[PartitionCommit]], Sequence[CommitOutcome]], new_lock: Callable[[], Lock]
    ) -> None:
        self._send = send
        #: Of the list of those that wait.
        self._guard = new_lock()
        #: Held by whoever sends.
        self._turn = new_lock()
        self._waiting: list[_Waiting] = []

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        """See :meth:`CoordinatorRef.commit_all <store_actors.serving.coordinator_ref.CoordinatorRef.commit_all>`."""
        mine = _Waiting((state_name, tuple(entries)))
        with self._guard:
            self._waiting.append(mine)
        with self._turn:
            # Whoever had the turn before may have taken this one along.
            if mine.outcome is None:
                self._send_waiting()
        outcome = mine.outcome
        assert outcome is not None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _send_waiting(self) -> None:
        with self._guard:
            group, self._waiting = self._waiting, []
        try:
            outcomes: Sequence[CommitOutcome | BaseException] = self._send([one.commit for one in group])
        except Exception as error:  # noqa: BLE001 - each of them is told, and raises it in its own thread
            outcomes = [error] * len(group)
        for one, outcome in zip(group, outcomes, strict=True):
            one.outcome = outcome

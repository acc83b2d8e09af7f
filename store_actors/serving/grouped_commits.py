"""Commits of one process on their way to the coordinator: those of a state go together, and bring the leases of the next batch back.

One call of a state is under way at a time. A commit whose delta is stored meanwhile waits, and goes with all others that wait in the
next one. Where a task has several shards, the first one that is there waits for those that are known to come, for as long as half a
call takes: else it would go alone, and all others would wait for its call and then for theirs. So a batch costs a store actor a call or
two, however many shards it has.

A lease that came with a commit is for the same run, the version that the commit made, and nothing else. It says what the coordinator
would say if it were asked before that batch, but for what can only be known later: whether all other shards have the batch before,
which it sees to when it is asked to count the batch itself. Should the shard or the run have got another owner meanwhile, that commit
is refused, too: a lease was never more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import TaskIdentity
from coordinator.runtime.runtime import Clock, Lock

__all__ = ["GroupedCommits"]

#: What the coordinator makes of commits of one state, each by itself.
Send = Callable[[str, Sequence[PartitionCommit]], Sequence[AcceptedCommits | StateStoreError]]

#: How long a commit waits for others that are known to come, as a part of what the last call took, and how often it looks meanwhile.
_MOST_OF_A_CALL = 0.5
_LOOKS = 25


@dataclass(slots=True, eq=False)
class _Waiting:
    """A commit whose outcome is not known yet."""

    commit: PartitionCommit
    outcome: AcceptedCommits | BaseException | None = None


@dataclass(slots=True)
class _Line:
    """Commits of a state; who has the turn sends those that wait.

    Attributes
    ----------
    coming
        Partitions whose commits are being made.
    call_s
        How long the last call took.
    """

    turn: Lock
    waiting: list[_Waiting] = field(default_factory=list)
    coming: set[int] = field(default_factory=set)
    call_s: float = 0.0


class GroupedCommits:
    """Commits of one process. Thread-safe.

    Parameters
    ----------
    send
        Has commits of a state counted; may be repeated.
    new_lock
        Makes locks.
    clock
        By which waits are measured.
    """

    def __init__(self, send: Send, new_lock: Callable[[], Lock], clock: Clock) -> None:
        self._send = send
        self._new_lock = new_lock
        self._clock = clock
        self._guard = new_lock()
        self._lines: dict[str, _Line] = {}
        #: Leases that came with the newest commit of a partition, and those of them that a task was given.
        self._piggybacked: dict[tuple[str, int], LeaseGrant] = {}
        self._given: dict[tuple[str, int], LeaseGrant] = {}

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> tuple[CommitEntry, ...]:
        """Have the commits of all stores of a partition counted together; returns the entries that count.

        Raises
        ------
        StateStoreError
            What the coordinator refused this one with, or why it cannot be asked.
        """
        waiting = _Waiting(PartitionCommit(tuple(entries), self._is_piggybacked(state_name, entries[0])))
        line = self._line(state_name)
        with self._guard:
            line.waiting.append(waiting)
            line.coming.discard(entries[0].partition_id)
        with line.turn:
            if waiting.outcome is None:
                self._await_others(line)
                with self._guard:
                    group, line.waiting = line.waiting, []
                begun_s = self._clock.elapsed_s()
                self._send_all(state_name, group)
                line.call_s = self._clock.elapsed_s() - begun_s
        if not isinstance(waiting.outcome, AcceptedCommits):
            assert waiting.outcome is not None
            raise waiting.outcome
        return waiting.outcome.entries

    def _line(self, state_name: str) -> _Line:
        with self._guard:
            line = self._lines.get(state_name)
            if line is None:
                line = self._lines[state_name] = _Line(self._new_lock())
            return line

    def expect(self, state_name: str, partition_ids: Iterable[int]) -> None:
        """Commits of some partitions are about to come; of one that does not, :meth:`expect_no_more` tells."""
        line = self._line(state_name)
        with self._guard:
            line.coming.update(partition_ids)

    def expect_no_more(self, state_name: str, partition_id: int) -> None:
        """The commit of a partition has come, or will not."""
        line = self._line(state_name)
        with self._guard:
            line.coming.discard(partition_id)

    def _await_others(self, line: _Line) -> None:
        most_s = _MOST_OF_A_CALL * line.call_s
        until_s = self._clock.elapsed_s() + most_s
        while line.coming and self._clock.elapsed_s() < until_s:
            self._clock.sleep(most_s / _LOOKS)

    def _send_all(self, state_name: str, group: Sequence[_Waiting]) -> None:
        try:
            outcomes = self._send(state_name, [waiting.commit for waiting in group])
            for waiting, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, AcceptedCommits):
                    self._keep(state_name, outcome)
                waiting.outcome = outcome
        except BaseException as error:  # noqa: BLE001 - each commit that waits gets it
            # Each of them may have been counted, or not.
            for waiting in group:
                waiting.outcome = waiting.outcome or error

    def _keep(self, state_name: str, counted: AcceptedCommits) -> None:
        partition = state_name, counted.entries[0].partition_id
        with self._guard:
            self._given.pop(partition, None)
            if counted.next_lease is None:
                self._piggybacked.pop(partition, None)
            else:
                self._piggybacked[partition] = counted.next_lease

    def _is_piggybacked(self, state_name: str, entry: CommitEntry) -> bool:
        grant = self._given.get((state_name, entry.partition_id))
        made_under = entry.run_id, entry.epoch, entry.base_version
        return grant is not None and (grant.lease.run_id, grant.lease.epoch, grant.base_version) == made_under

    def piggybacked(self, task: TaskIdentity) -> LeaseGrant | None:
        """The lease of a task, if it came with the commit before; None: the coordinator is to be asked."""
        partition = task.state_name, task.partition_id
        with self._guard:
            grant = self._piggybacked.get(partition)
            if grant is None or (grant.lease.run_id, grant.base_version) != (task.run_id, task.batch_id):
                return None
            self._given[partition] = grant
            return grant

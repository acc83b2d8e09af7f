"""Calls of the coordinator that a store makes: Spark's StateStoreCoordinatorRef. Commits go in groups, and leases come back with them.

A state has at most one call under way. Commits whose deltas are stored meanwhile wait, and the next call sends all of them. Where a
task has several shards, the first commit waits for those that are expected, for at most half the time of the last call. Otherwise it
would be sent alone, and the others would wait for its call before their own. So a batch costs a store actor one or two calls,
regardless of the number of its shards.

A lease in the reply to a commit (a piggybacked lease) is valid for the same run and for the version that was committed. It equals the
lease that the coordinator would grant before the next batch, except that the coordinator has not checked yet whether all other shards
have committed the batch before. It checks that when it accepts the next commit. If the shard or the run has another owner by then, the
commit is refused, as it is with any other lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.model.commits import CommitEntry, PartitionCommit, SnapshotEntry
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import StateStoreId, StateStoreProviderId, TaskIdentity
from coordinator.model.load_plans import InstancePlans, LoadPlans
from coordinator.runtime.runtime import Clock, Lock

#: Sends commits of a state to the coordinator; returns the outcome of each commit.
Send = Callable[[str, Sequence[PartitionCommit]], Sequence[AcceptedCommits | StateStoreError]]
#: Longest time that a commit waits for expected commits, as a fraction of the time of the last call.
_WAIT_FRACTION = 0.5
#: Number of checks during that time.
_CHECKS = 25


class CoordinatorRef(Protocol):
    """The coordinator; each call may be repeated without harm."""

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        """Count the commits of all stores of a partition together; returns the entries that count."""

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        """Return the files that make a version of a partition's stores."""

    def open_instance(
        self,
        provider_id: StateStoreProviderId,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        """Say that this store is about to hold a partition; returns which others to unload, and the files that make the version."""

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        """Count a snapshot; False if its version was superseded meanwhile."""

    def reassigned(self, state_name: str, store_ids: Sequence[StateStoreId]) -> Collection[StateStoreId]:
        """Return those of a state's partitions whose lease another store actor has."""


@dataclass(slots=True, eq=False)
class _Waiting:
    commit: PartitionCommit
    outcome: AcceptedCommits | BaseException | None = None


@dataclass(slots=True)
class _CommitQueue:
    #: Lock of the thread that sends the waiting commits.
    turn: Lock
    waiting: list[_Waiting] = field(default_factory=list)
    expected: set[int] = field(default_factory=set)
    call_s: float = 0.0


class GroupedCommits:
    """Sends the commits of one process to the coordinator, in groups. Thread-safe."""

    def __init__(self, send: Send, new_lock: Callable[[], Lock], clock: Clock) -> None:
        self._send = send
        self._new_lock = new_lock
        self._clock = clock
        self._guard = new_lock()
        self._queues: dict[str, _CommitQueue] = {}
        #: Leases in the reply to the newest commit of each partition, and those of them that a task has used.
        self._piggybacked: dict[tuple[str, int], LeaseGrant] = {}
        self._task_leases: dict[tuple[str, int], LeaseGrant] = {}

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> tuple[CommitEntry, ...]:
        """Commit the entries of all stores of a partition together; return the entries that the coordinator has accepted.

        These are entries of another attempt if that attempt has committed the version first.

        Raises
        ------
        StateStoreError
            The coordinator refused this commit, or cannot be reached.
        """
        waiting = _Waiting(PartitionCommit(tuple(entries), self._is_piggybacked(state_name, entries[0])))
        queue = self._queue(state_name)
        with self._guard:
            queue.waiting.append(waiting)
            queue.expected.discard(entries[0].partition_id)
        with queue.turn:
            if waiting.outcome is None:
                self._await_expected(queue)
                with self._guard:
                    group, queue.waiting = queue.waiting, []
                begun_s = self._clock.elapsed_s()
                self._send_all(state_name, group)
                queue.call_s = self._clock.elapsed_s() - begun_s
        if not isinstance(waiting.outcome, AcceptedCommits):
            assert waiting.outcome is not None
            raise waiting.outcome
        return waiting.outcome.entries

    def _queue(self, state_name: str) -> _CommitQueue:
        with self._guard:
            queue = self._queues.get(state_name)
            if queue is None:
                queue = self._queues[state_name] = _CommitQueue(self._new_lock())
            return queue

    def expect(self, state_name: str, partition_ids: Iterable[int]) -> None:
        """Expect commits of these partitions soon. The caller reports a partition that will not commit to :meth:`expect_no_more`."""
        queue = self._queue(state_name)
        with self._guard:
            queue.expected.update(partition_ids)

    def expect_no_more(self, state_name: str, partition_id: int) -> None:
        """Stop waiting for the commit of a partition, which was sent or will not be."""
        queue = self._queue(state_name)
        with self._guard:
            queue.expected.discard(partition_id)

    def _await_expected(self, queue: _CommitQueue) -> None:
        longest_wait_s = _WAIT_FRACTION * queue.call_s
        until_s = self._clock.elapsed_s() + longest_wait_s
        while queue.expected and self._clock.elapsed_s() < until_s:
            self._clock.sleep(longest_wait_s / _CHECKS)

    def _send_all(self, state_name: str, group: Sequence[_Waiting]) -> None:
        try:
            outcomes = self._send(state_name, [waiting.commit for waiting in group])
            for waiting, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, AcceptedCommits):
                    self._keep(state_name, outcome)
                waiting.outcome = outcome
        except BaseException as error:  # noqa: BLE001 - raised in the thread of each commit
            # Each commit of the group may have been accepted, or not.
            for waiting in group:
                waiting.outcome = waiting.outcome or error

    def _keep(self, state_name: str, accepted: AcceptedCommits) -> None:
        partition = state_name, accepted.entries[0].partition_id
        with self._guard:
            self._task_leases.pop(partition, None)
            if accepted.next_lease is None:
                self._piggybacked.pop(partition, None)
            else:
                self._piggybacked[partition] = accepted.next_lease

    def _is_piggybacked(self, state_name: str, entry: CommitEntry) -> bool:
        grant = self._task_leases.get((state_name, entry.partition_id))
        commit_key = entry.run_id, entry.epoch, entry.base_version
        return grant is not None and (grant.lease.run_id, grant.lease.epoch, grant.base_version) == commit_key

    def piggybacked(self, task: TaskIdentity) -> LeaseGrant | None:
        """Return the lease of a task if the reply to the commit before had it. None: ask the coordinator for a lease."""
        partition = task.state_name, task.partition_id
        with self._guard:
            grant = self._piggybacked.get(partition)
            if grant is None or (grant.lease.run_id, grant.base_version) != (task.run_id, task.batch_id):
                return None
            self._task_leases[partition] = grant
            return grant

"""Commits of one process are sent to the coordinator together, without a timer, and leases come back with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.errors import FencedError, StateStoreError, StoreUnavailableError
from coordinator.model.identities import StateStoreId
from coordinator.model.leases import Lease
from coordinator.runtime.runtime import Clock, Threads
from store_actors.serving.coordinator_ref import GroupedCommits
from tests.clocks import until
from tests.unit.ledger_harness import ROOT, actor, entry, task


def grant_of(shard: int, base: int) -> LeaseGrant:
    return LeaseGrant(Lease(StateStoreId(ROOT, 0, shard), "run-1", 1, actor("a")), base)


def entries_of(shard: int, version: int = 1) -> list[CommitEntry]:
    return [structs.replace(entry(grant_of(shard, version - 1), version), attempt_id=f"{shard}-{version}")]


class GatedCoordinator:
    """A coordinator whose answers wait for `gate`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[PartitionCommit]]] = []
        self.called = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.refused: dict[int, StateStoreError] = {}
        self.fails: Exception | None = None
        self.carries = True

    def commit_partitions(
        self, state_name: str, commits: Sequence[PartitionCommit]
    ) -> Sequence[AcceptedCommits | StateStoreError]:
        self.calls.append((state_name, list(commits)))
        self.called.release()
        assert self.gate.acquire(timeout=30)
        if self.fails is not None:
            raise self.fails
        return [self.outcome(commit.entries) for commit in commits]

    def outcome(self, entries: tuple[CommitEntry, ...]) -> AcceptedCommits | StateStoreError:
        shard = entries[0].partition_id
        next_grant = grant_of(shard, entries[0].version) if self.carries else None
        return self.refused.get(shard) or AcceptedCommits(entries, next_grant)

    def wait_for_call(self) -> None:
        assert self.called.acquire(timeout=30)


def grouped(coordinator: GatedCoordinator) -> GroupedCommits:
    return GroupedCommits(coordinator.commit_partitions, Threads().lock, Clock())


def test_commits_that_wait_while_a_call_is_under_way_are_sent_together_in_the_next_call_and_refused_alone() -> None:
    coordinator = GatedCoordinator()
    commits = grouped(coordinator)
    coordinator.refused[2] = FencedError("no longer yours")
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(commits.commit_all, "s", entries_of(0))
        coordinator.wait_for_call()
        waiting = [pool.submit(commits.commit_all, "s", entries_of(shard)) for shard in range(1, 10)]
        until(lambda: len(commits._queues["s"].waiting) == 9)
        # Commits of another state do not wait for it.
        of_other_state = pool.submit(commits.commit_all, "t", entries_of(0))
        coordinator.wait_for_call()
        coordinator.gate.release(3)
        assert isinstance(waiting.pop(1).exception(30), FencedError)
        expected = [tuple(entries_of(shard)) for shard in (0, 1, *range(3, 10))]
        assert [future.result(30) for future in [first, *waiting]] == expected
        assert of_other_state.result(30) == tuple(entries_of(0))
    assert sorted((state, len(sent)) for state, sent in coordinator.calls) == [("s", 1), ("s", 9), ("t", 1)]


def test_the_first_commit_waits_for_the_expected_ones_and_no_longer_than_half_a_call() -> None:
    coordinator, clock = GatedCoordinator(), Clock()
    commits = grouped(coordinator)
    with ThreadPoolExecutor(16) as pool:
        # The first call shows how long a call takes.
        first = pool.submit(commits.commit_all, "s", entries_of(0))
        coordinator.wait_for_call()
        clock.sleep(1.0)
        coordinator.gate.release()
        first.result(30)
        commits.expect("s", range(5))
        futures = [pool.submit(commits.commit_all, "s", entries_of(shard, 2)) for shard in range(3)]
        # One of them fails before its commit; the last one comes.
        commits.expect_no_more("s", 3)
        futures.append(pool.submit(commits.commit_all, "s", entries_of(4, 2)))
        coordinator.wait_for_call()
        coordinator.gate.release()
        assert [future.result(30) for future in futures] == [tuple(entries_of(shard, 2)) for shard in (0, 1, 2, 4)]
        assert [len(sent) for _, sent in coordinator.calls] == [1, 4]
        # A commit that never comes keeps no other waiting for long.
        commits.expect("s", [0, 1])
        single = pool.submit(commits.commit_all, "s", entries_of(0, 3))
        coordinator.wait_for_call()
        coordinator.gate.release()
        assert single.result(30) == tuple(entries_of(0, 3))


def test_when_a_call_fails_all_its_commits_fail_and_the_next_ones_succeed() -> None:
    coordinator = GatedCoordinator()
    commits = grouped(coordinator)
    coordinator.fails = StoreUnavailableError("the coordinator did not come back")
    coordinator.gate.release(3)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(commits.commit_all, "s", entries_of(shard)) for shard in range(3)]:
            assert isinstance(future.exception(30), StoreUnavailableError)
    coordinator.fails = None
    coordinator.gate.release()
    assert commits.commit_all("s", entries_of(0)) == tuple(entries_of(0))


def test_an_answer_that_is_too_short_leaves_no_caller_waiting() -> None:
    commits = GroupedCommits(lambda _state, _commits: [], Threads().lock, Clock())
    with pytest.raises(ValueError, match="shorter"):
        commits.commit_all("s", entries_of(0))


def test_a_lease_that_came_with_a_commit_is_for_its_run_and_batch_only() -> None:
    coordinator = GatedCoordinator()
    coordinator.gate.release(10)
    commits = grouped(coordinator)
    assert commits.piggybacked(task(batch=1)) is None
    commits.commit_all("clicks", entries_of(0))
    for other_task in (task(batch=0), task(batch=2), task("run-2", 1), task(batch=1, shard=1)):
        assert commits.piggybacked(other_task) is None
    # A repeated task gets the same lease.
    assert commits.piggybacked(task(batch=1)) == commits.piggybacked(task(batch=1)) == grant_of(0, 1)
    commits.commit_all("clicks", entries_of(0, 2))
    assert commits.piggybacked(task(batch=1)) is None
    coordinator.carries = False
    # No task got the lease that came with the second commit.
    commits.commit_all("clicks", entries_of(0, 3))
    assert [commit.is_piggybacked for _, sent in coordinator.calls for commit in sent] == [False, True, False]
    assert commits.piggybacked(task(batch=3)) is None

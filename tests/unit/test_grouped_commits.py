"""Commits of one process go to the coordinator together, without a timer, and leases come back with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.model.commits import CommitEntry, PartitionCommit
from coordinator.model.errors import FencedError, StateStoreError, StoreUnavailableError
from coordinator.model.identities import StateStoreId
from coordinator.model.leases import Lease
from coordinator.runtime.runtime import MachineClock, MachineThreads
from store_actors.serving.grouped_commits import GroupedCommits
from tests.clocks import until
from tests.unit.ledger_harness import actor, entry, task

ROOT = "memory:///clicks"


def grant_of(shard: int, base: int, run: str = "run-1") -> LeaseGrant:
    return LeaseGrant(Lease(StateStoreId(ROOT, 0, shard), run, 1, actor("a")), base)


def made(shard: int, version: int = 1) -> list[CommitEntry]:
    return [replace(entry(grant_of(shard, version - 1), version), attempt_id=f"{shard}-{version}")]


class GatedCoordinator:
    """A coordinator whose answers wait until they are let go."""

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
        return [self.outcome(one.entries) for one in commits]

    def outcome(self, entries: tuple[CommitEntry, ...]) -> AcceptedCommits | StateStoreError:
        shard = entries[0].partition_id
        following = grant_of(shard, entries[0].version) if self.carries else None
        return self.refused.get(shard) or AcceptedCommits(entries, following)

    def wait_for_call(self) -> None:
        assert self.called.acquire(timeout=30)


def grouped(desk: GatedCoordinator) -> GroupedCommits:
    return GroupedCommits(desk.commit_partitions, MachineThreads().lock, MachineClock())


def test_what_waits_while_a_call_is_under_way_goes_together_with_the_next_one() -> None:
    desk = GatedCoordinator()
    commits = grouped(desk)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(commits.commit_all, "s", made(0))
        desk.wait_for_call()
        others = [pool.submit(commits.commit_all, "s", made(shard)) for shard in range(1, 10)]
        until(lambda: len(commits._lines["s"].waiting) == 9)
        # Another state's commits do not wait for it.
        aside = pool.submit(commits.commit_all, "t", made(0))
        desk.wait_for_call()
        desk.gate.release(3)
        assert [one.result(30) for one in [first, *others]] == [tuple(made(shard)) for shard in range(10)]
        assert aside.result(30) == tuple(made(0))
    assert sorted((state, len(some)) for state, some in desk.calls) == [("s", 1), ("s", 9), ("t", 1)]


def test_the_first_one_waits_for_those_that_are_known_to_come_and_no_longer_than_half_a_call() -> None:
    desk, clock = GatedCoordinator(), MachineClock()
    commits = grouped(desk)
    with ThreadPoolExecutor(16) as pool:
        # The first call tells how long one takes.
        first = pool.submit(commits.commit_all, "s", made(0))
        desk.wait_for_call()
        clock.sleep(1.0)
        desk.gate.release()
        first.result(30)
        commits.expect("s", range(5))
        some = [pool.submit(commits.commit_all, "s", made(shard, 2)) for shard in range(3)]
        # One of them fails before its commit; the last one comes.
        commits.expect_no_more("s", 3)
        some.append(pool.submit(commits.commit_all, "s", made(4, 2)))
        desk.wait_for_call()
        desk.gate.release()
        assert [one.result(30) for one in some] == [tuple(made(shard, 2)) for shard in (0, 1, 2, 4)]
        assert [len(told) for _, told in desk.calls] == [1, 4]
        # One that never comes keeps nobody.
        commits.expect("s", [0, 1])
        alone = pool.submit(commits.commit_all, "s", made(0, 3))
        desk.wait_for_call()
        desk.gate.release()
        assert alone.result(30) == tuple(made(0, 3))


def test_a_commit_that_is_refused_is_no_other_commits_matter() -> None:
    desk = GatedCoordinator()
    commits = grouped(desk)
    desk.refused[2] = FencedError("no longer yours")
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(commits.commit_all, "s", made(0))
        desk.wait_for_call()
        others = [pool.submit(commits.commit_all, "s", made(shard)) for shard in (1, 2, 3)]
        until(lambda: len(commits._lines["s"].waiting) == 3)
        desk.gate.release(2)
        assert first.result(30) == tuple(made(0))
        assert [type(one.exception(30)) for one in others] == [type(None), FencedError, type(None)]


def test_when_the_call_fails_all_that_were_in_it_are_told_and_the_next_go_on() -> None:
    desk = GatedCoordinator()
    commits = grouped(desk)
    desk.fails = StoreUnavailableError("the coordinator did not come back")
    desk.gate.release(3)
    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(commits.commit_all, "s", made(shard)) for shard in range(3)]:
            assert isinstance(one.exception(30), StoreUnavailableError)
    desk.fails = None
    desk.gate.release()
    assert commits.commit_all("s", made(0)) == tuple(made(0))


def test_an_answer_that_is_too_short_leaves_nobody_waiting() -> None:
    commits = GroupedCommits(lambda _state, _commits: [], MachineThreads().lock, MachineClock())
    with pytest.raises(ValueError, match="shorter"):
        commits.commit_all("s", made(0))


def test_a_lease_that_came_with_a_commit_is_for_its_run_and_batch_only() -> None:
    desk = GatedCoordinator()
    desk.gate.release(10)
    commits = grouped(desk)
    assert commits.piggybacked(task(batch=1)) is None
    commits.commit_all("clicks", made(0))
    for other in (task(batch=0), task(batch=2), task("run-2", 1), task(batch=1, shard=1)):
        assert commits.piggybacked(other) is None
    # A repeated task is given the same.
    assert commits.piggybacked(task(batch=1)) == commits.piggybacked(task(batch=1)) == grant_of(0, 1)
    commits.commit_all("clicks", made(0, 2))
    assert commits.piggybacked(task(batch=1)) is None
    desk.carries = False
    # Nobody was given the lease that came with the second.
    commits.commit_all("clicks", made(0, 3))
    assert [one.is_piggybacked for _, some in desk.calls for one in some] == [False, True, False]
    assert commits.piggybacked(task(batch=3)) is None

"""Commits that are ready together go with one call, and each learns what came of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from coordinator.errors import FencedError, StoreUnavailableError
from coordinator.model import CommitEntry, CommitOutcome, PartitionCommit
from store_actors.serving.grouped_commits import GroupedCommits
from tests.unit.test_coordinator import Desk, actor, entry, task


class Counting:
    """A coordinator whose first call takes until it is let go."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.is_called, self.may_answer = threading.Event(), threading.Event()
        self.refused: set[int] = set()
        self.is_lost = False

    def commit_many(self, commits: Sequence[PartitionCommit]) -> Sequence[CommitOutcome]:
        self.calls.append([entries[0].partition_id for _, entries in commits])
        self.is_called.set()
        assert self.may_answer.wait(30)
        if self.is_lost:
            raise StoreUnavailableError("the coordinator did not come back")
        return [
            FencedError("another has it") if entries[0].partition_id in self.refused else entries
            for _, entries in commits
        ]


class Shards:
    """Threads of a store actor with a commit each."""

    def __init__(self) -> None:
        self.coordinator = Counting()
        self.grouped = GroupedCommits(self.coordinator.commit_many, threading.RLock)
        self._pool = ThreadPoolExecutor(64)
        grant = Desk().lease(task(), actor("a"))
        self._entry = entry(grant, 1)

    def commit(self, partition: int) -> Future[Sequence[CommitEntry]]:
        return self._pool.submit(self.grouped.commit_all, "clicks", [replace(self._entry, partition_id=partition)])

    def commit_beside(self, count: int) -> list[Future[Any]]:
        """So many commits, all but the first of them while the first is under way."""
        first = self.commit(0)
        assert self.coordinator.is_called.wait(30)
        others = [self.commit(partition) for partition in range(1, count)]
        while len(self.grouped._waiting) < count - 1:
            threading.Event().wait(0.001)
        self.coordinator.may_answer.set()
        return [first, *others]


def test_commits_that_come_while_one_is_under_way_go_together() -> None:
    shards = Shards()
    done = shards.commit_beside(40)
    assert [one.result(30)[0].partition_id for one in done] == list(range(40))
    first, others = shards.coordinator.calls
    assert first == [0]
    assert sorted(others) == list(range(1, 40))


def test_one_that_is_refused_keeps_no_other_from_counting() -> None:
    shards = Shards()
    shards.coordinator.refused = {3, 5}
    for partition, one in enumerate(shards.commit_beside(8)):
        if partition in (3, 5):
            with pytest.raises(FencedError, match="another has it"):
                one.result(30)
        else:
            assert one.result(30)[0].partition_id == partition


def test_all_are_told_of_a_call_that_failed_and_the_next_one_goes_on() -> None:
    shards = Shards()
    shards.coordinator.is_lost = True
    for one in shards.commit_beside(8):
        with pytest.raises(StoreUnavailableError):
            one.result(30)
    shards.coordinator.is_lost = False
    assert shards.commit(9).result(30)[0].partition_id == 9

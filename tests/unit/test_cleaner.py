"""What cleaning may and may not delete when there are two coordinators on one store, and when it looks at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from coordinator.ledger.cleaning_rules import ListingSchedule
from coordinator.ledger.state_ledger import AcceptedCommits, StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import PartitionCommit
from coordinator.model.errors import CommitUnknownError
from coordinator.model.maintenance import Maintenance
from coordinator.service.coordinator import Coordinator
from coordinator.storage.memory import MemoryObjectStore
from coordinator.storage.protocol import ObjectStore
from tests.unit.coordinator_harness import (
    GRACE_S,
    CoordinatorHarness,
    GatedObjectStore,
    two_coordinators,
    wait_for_event,
)


async def read_anew(objects: ObjectStore) -> set[str]:
    ledger = ManifestLog(objects, "s", "reader").load()
    return ledger.referenced_files()


#: How far the clock of a store actor's machine is ahead, in milliseconds.
AHEAD = pytest.mark.parametrize("ahead_ms", [0, 2_000_000, -2_000_000])


@AHEAD
def test_a_commit_counts_whatever_the_clock_of_its_store_actor_shows(ahead_ms: int) -> None:
    async def scenario(
        old: CoordinatorHarness, _: CoordinatorHarness, objects: MemoryObjectStore, __: GatedObjectStore
    ) -> None:
        begun = await old.begin("run-1", 0)
        begun = replace(begun, committed_at_ms=begun.committed_at_ms + ahead_ms)
        objects.put(begun.file, b"delta")
        coordinator = Coordinator("memory://", objects, Maintenance(), "node")
        (outcome,) = await coordinator.commit_partitions("s", [PartitionCommit((begun,))])
        assert isinstance(outcome, AcceptedCommits)
        assert await read_anew(objects) == {begun.file}

    two_coordinators(scenario, "")


@AHEAD
def test_a_commit_that_hangs_on_its_way_to_the_log_is_not_counted_after_its_file_is_cleaned_away(ahead_ms: int) -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, gated: GatedObjectStore
    ) -> None:
        begun = await old.begin("run-1", 0)
        begun = replace(begun, committed_at_ms=begun.committed_at_ms + ahead_ms)
        objects.put(begun.file, b"delta")
        gated.gate.clear()
        counting = asyncio.create_task(old.count(begun))
        await wait_for_event(gated.reached)
        await asyncio.sleep(1.1 * GRACE_S)
        assert await new.clean() == [begun.file]
        gated.gate.set()
        with pytest.raises(CommitUnknownError, match="took too long"):
            await counting
        assert await read_anew(objects) == set()
        # Nor by whoever is told of it later, also by a checkpoint of the log; the task's next attempt is.
        log = ManifestLog(objects, "s", "other")
        ledger = StateLedger.from_json("memory:///s", json.loads(json.dumps(log.load().to_json())))
        with pytest.raises(CommitUnknownError, match="took too long"):
            ledger.decide_commits([begun])
        again = replace(begun, file="s/0/0/1-0a.delta", attempt_id="again")
        objects.put(again.file, b"delta")
        await new.count(again)
        assert await read_anew(objects) == {again.file}
        assert new.keeper.ledger is not None
        assert not new.keeper.ledger.decide_discard([begun.file]), "the shard has gone beyond it"

    two_coordinators(scenario, "put_if_absent")


@pytest.mark.parametrize("hangs", ["list", "delete"])
def test_a_coordinator_that_sleeps_while_it_cleans_deletes_nothing_that_its_successor_counts(hangs: str) -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, gated: GatedObjectStore
    ) -> None:
        objects.put("s/0/0/1-0f.delta", b"of a failed attempt")
        first = await new.begin("run-1", 0)
        objects.put(first.file, b"delta")
        await new.count(first)
        await asyncio.sleep(1.1 * GRACE_S)
        gated.gate.clear()
        cleaning = asyncio.create_task(old.clean())
        await wait_for_event(gated.reached)
        second = await new.begin("run-2", 1)
        objects.put(second.file, b"delta")
        await new.count(second)
        third = await new.begin("run-3", 1)  # replays the batch: the second's file is not needed any more
        objects.put(third.file, b"delta")
        await new.count(third)
        gated.gate.set()
        assert "s/0/0/1-0f.delta" in await cleaning
        kept = {info.path for info in objects.list("s/0")}
        assert await read_anew(objects) == {first.file, third.file}
        assert {first.file, third.file} <= kept

    two_coordinators(scenario, hangs)


def test_a_coordinator_that_was_replaced_unawares_cleans_by_its_successors_log() -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, _: GatedObjectStore
    ) -> None:
        files = []
        for batch in range(3):
            begun = await new.begin(f"run-{batch}", batch)
            objects.put(begun.file, b"delta")
            await new.count(begun)
            files.append(begun.file)
        objects.put("s/0/0/9-0f.delta", b"of a failed attempt")
        await asyncio.sleep(1.1 * GRACE_S)
        assert await old.clean() == ["s/0/0/9-0f.delta"]
        assert [info.path for info in objects.list("s/0")] == files

    two_coordinators(scenario, "")


def test_files_that_may_go_go_together() -> None:
    async def scenario(
        old: CoordinatorHarness, _: CoordinatorHarness, objects: MemoryObjectStore, gated: GatedObjectStore
    ) -> None:
        files = [f"s/0/0/{version}-0f.delta" for version in range(1, 200)]
        for file in files:
            objects.put(file, b"of a failed attempt")
        await asyncio.sleep(1.1 * GRACE_S)
        assert sorted(await old.clean()) == sorted(files)
        assert (gated.deletes, objects.list("s/0")) == (1, [])

    two_coordinators(scenario, "")


def test_nothing_is_deleted_by_a_young_coordinator_and_a_dry_run_always_looks() -> None:
    async def scenario(
        old: CoordinatorHarness, new: CoordinatorHarness, objects: MemoryObjectStore, gated: GatedObjectStore
    ) -> None:
        objects.put("s/0/0/1-0f.delta", b"of a failed attempt")
        objects._modified_s["s/0/0/1-0f.delta"] -= 2 * GRACE_S
        gated.lists = 0
        assert await old.clean() == []
        await old.cleaner.round(old.keeper, "s")
        assert gated.lists == 0
        for lists in (1, 2):
            found = await old.cleaner.clean(old.keeper, "s", dry_run=True)
            assert [file["path"] for file in found["files"]] == ["s/0/0/1-0f.delta"]
            assert gated.lists == lists
        log_size = len(objects.list("s/manifest"))
        await asyncio.sleep(1.1 * GRACE_S)
        await old.cleaner.round(old.keeper, "s")
        assert objects.list("s/0") == []
        assert (gated.lists, len(objects.list("s/manifest"))) == (3, log_size + 1)
        await old.cleaner.round(old.keeper, "s")
        assert gated.lists == 3, "just listed"

    two_coordinators(scenario, "")


# -- when to list ----------------------------------------------------------------------------------------------------


def listings(
    schedule: ListingSchedule, rounds: range, epoch: Callable[[int], int], moved: Callable[[int], bool]
) -> list[int]:
    """Times of the rounds that list."""
    found = []
    for now_s in rounds:
        schedule.observe(now_s, epoch(now_s), moved(now_s))
        if schedule.is_due(now_s):
            schedule.listed(now_s)
            found.append(now_s)
    return found


def test_a_busy_state_is_listed_four_times_in_a_grace_period_whatever_happens() -> None:
    schedule = ListingSchedule(3600, 0)
    times = listings(schedule, range(60, 100_000, 60), lambda now_s: now_s, lambda _: True)
    assert times[0] == 3660, "the first round at which readers from before the start are done"
    assert {later - time for time, later in pairwise(times)} == {900}


def test_a_state_at_rest_is_listed_until_what_it_left_over_is_old_enough_and_then_rarely() -> None:
    schedule = ListingSchedule(3600, 0)
    day = 24 * 3600
    times = listings(schedule, range(60, 3 * day, 60), lambda _: 7, lambda now_s: now_s == 60)
    # The last of the listings close together is later than the change by two grace periods.
    assert times == [3660, 4560, 5460, 6360, 7260, 8160, 8160 + day, 8160 + 2 * day]


@pytest.mark.parametrize("epoch_moves", [True, False])
def test_a_run_a_lease_and_a_truncation_wake_a_state_up(epoch_moves: bool) -> None:
    schedule = ListingSchedule(3600, 0)
    at = 50_040
    times = listings(
        schedule,
        range(60, 60_000, 60),
        lambda now_s: 2 if epoch_moves and now_s >= at else 1,
        lambda now_s: not epoch_moves and now_s == at,
    )
    woken = [time for time in times if time >= at]
    assert woken[0] == at
    assert woken[-1] > at + 2 * 3600
    assert len(woken) <= 10

"""Cleaning by two coordinators on one store: which files may be deleted, and when files are listed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec import structs

from coordinator.ledger.cleaning_rules import ListingSchedule
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CommitUnknownError
from coordinator.storage.protocol import ObjectStore
from tests.unit.service_harness import GRACE_S, QueriedCoordinator, two_coordinators


def read_again(objects: ObjectStore) -> set[str]:
    return ManifestLog(objects, "s", "reader").load().referenced_files()


#: How far the clock of a store actor's machine is ahead, in milliseconds.
AHEAD = pytest.mark.parametrize("ahead_ms", [0, 2_000_000, -2_000_000])


@AHEAD
async def test_a_commit_is_accepted_at_any_clock_of_its_store_actor(ahead_ms: int) -> None:
    old, _, objects, _ = await two_coordinators()
    commit = await old.begin("run-1", 0)
    commit = structs.replace(commit, committed_at_ms=commit.committed_at_ms + ahead_ms)
    await QueriedCoordinator(objects).accept(commit)
    assert read_again(objects) == {commit.file}


@AHEAD
async def test_a_commit_that_hangs_on_its_way_to_the_log_is_not_counted_after_its_file_is_cleaned_away(
    ahead_ms: int,
) -> None:
    old, new, objects, gated = await two_coordinators("put_if_absent")
    commit = await old.begin("run-1", 0)
    commit = structs.replace(commit, committed_at_ms=commit.committed_at_ms + ahead_ms)
    gated.gate.clear()
    counting = asyncio.create_task(old.accept(commit))
    await gated.wait_until_it_hangs()
    await asyncio.sleep(1.1 * GRACE_S)
    assert await new.cleaned() == [commit.file]
    gated.gate.set()
    with pytest.raises(CommitUnknownError, match="took too long"):
        await counting
    assert read_again(objects) == set()
    # A ledger that is read later, also from a checkpoint, refuses the commit too; the task's next attempt is accepted.
    log = ManifestLog(objects, "s", "other")
    ledger = StateLedger.from_json("memory:///s", json.loads(json.dumps(log.load().to_json())))
    with pytest.raises(CommitUnknownError, match="took too long"):
        ledger.decide_commits([commit])
    next_attempt = structs.replace(commit, file="s/0/0/1-0a.delta", attempt_id="again")
    objects.put(next_attempt.file, b"delta")
    await new.accept(next_attempt)
    assert read_again(objects) == {next_attempt.file}
    ledger = (await new.opened()).ledger
    assert ledger is not None
    assert not ledger.decide_discard([commit.file]), "the shard has gone beyond it"


async def test_files_that_may_be_deleted_are_deleted_together() -> None:
    old, _, objects, gated = await two_coordinators()
    files = [f"s/0/0/{version}-0f.delta" for version in range(1, 200)]
    for file in files:
        objects.put(file, b"of a failed attempt")
    await asyncio.sleep(1.1 * GRACE_S)
    assert sorted(await old.cleaned()) == sorted(files)
    assert (gated.count("delete_all"), objects.list("s/0")) == (1, [])


async def test_nothing_is_deleted_by_a_young_coordinator_and_a_dry_run_always_looks() -> None:
    old, _, objects, gated = await two_coordinators()
    objects.put("s/0/0/1-0f.delta", b"of a failed attempt")
    objects._modified_s["s/0/0/1-0f.delta"] -= 2 * GRACE_S

    def listings() -> int:
        # Of the state's files: the coordinator also looks at its log, and asks for the store's time.
        others = ("_probe", "s/manifest", "s/checkpoints", "s/parts")
        return sum(kind == "list" and not path.startswith(others) for kind, path in gated.requests)

    async def regular_round() -> None:
        await old._cleaner.round(await old.opened(), "s")

    gated.requests.clear()
    assert await old.cleaned() == []
    await regular_round()
    assert listings() == 0
    for lists in (1, 2):
        report = await old.clean("s", dry_run=True)
        assert [file["path"] for file in report["files"]] == ["s/0/0/1-0f.delta"]
        assert listings() == lists
    log_size = len(objects.list("s/manifest"))
    await asyncio.sleep(1.1 * GRACE_S)
    await regular_round()
    assert objects.list("s/0") == []
    assert (listings(), len(objects.list("s/manifest"))) == (3, log_size + 1)
    await regular_round()
    assert listings() == 3, "just listed"


# -- when to list ----------------------------------------------------------------------------------------------------


def times_of_listings(
    schedule: ListingSchedule, rounds: range, epoch: Callable[[int], int], moved: Callable[[int], bool]
) -> list[int]:
    """Return the times of the rounds that list."""
    times = []
    for now_s in rounds:
        schedule.observe(now_s, epoch(now_s), moved(now_s))
        if schedule.is_due(now_s):
            schedule.listed(now_s)
            times.append(now_s)
    return times


def test_a_busy_state_is_listed_four_times_in_a_grace_period() -> None:
    schedule = ListingSchedule(3600, 0)
    times = times_of_listings(schedule, range(60, 100_000, 60), lambda now_s: now_s, lambda _: True)
    assert times[0] == 3660, "the first round at which readers from before the start are done"
    assert {later - time for time, later in pairwise(times)} == {900}


def test_a_state_at_rest_is_listed_until_its_leftovers_are_old_enough_and_then_rarely() -> None:
    schedule = ListingSchedule(3600, 0)
    day = 24 * 3600
    times = times_of_listings(schedule, range(60, 3 * day, 60), lambda _: 7, lambda now_s: now_s == 60)
    # The last of the frequent listings is two grace periods after the change.
    assert times == [3660, 4560, 5460, 6360, 7260, 8160, 8160 + day, 8160 + 2 * day]


@pytest.mark.parametrize("epoch_moves", [True, False])
def test_a_run_a_lease_and_a_truncation_wake_a_state_up(epoch_moves: bool) -> None:
    schedule = ListingSchedule(3600, 0)
    at = 50_040
    times = times_of_listings(
        schedule,
        range(60, 60_000, 60),
        lambda now_s: 2 if epoch_moves and now_s >= at else 1,
        lambda now_s: not epoch_moves and now_s == at,
    )
    woken = [time for time in times if time >= at]
    assert woken[0] == at
    assert woken[-1] > at + 2 * 3600
    assert len(woken) <= 10

"""Files that are damaged under a fleet: it goes on from memory, makes further files, and all is read again from storage.

Every kind of file in every way, below a query that goes on, is rescaled, branched or started again. The whole survey is run by
``./run soak``; here is a sample of it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from coordinator.model.errors import StateStoreError
from coordinator.storage.memory import MemoryObjectStore
from statefleet.reads.verify import files_of
from tests.unit.damages import (
    DAMAGES,
    ERROR,
    Damage,
    copied,
    named_by_verify,
    neighbour,
    says_the_same,
    state_in,
    taken_from,
    told,
)
from tests.unit.running_fleet import RunningFleet, RunningQuery

STATE, BRANCH = "s", "what_if"
#: Of the samples in every change's tests.
SAMPLE = 24


def begun(seed: str) -> tuple[RunningFleet, RunningQuery]:
    """A fleet with a query that ran some batches."""
    fleet = RunningFleet(MemoryObjectStore())
    query = RunningQuery(fleet, STATE, "query", "run-1")
    for batch in range(4):
        query.next_batch(seed)
        if batch == 1:
            fleet.shards.partitions.maintain(1)
    fleet.settle()
    return fleet, query


def goes_on(fleet: RunningFleet, query: RunningQuery, told_of: Callable[[RunningQuery], None]) -> None:
    for _ in range(2):
        told_of(query)
    fleet.shards.partitions.maintain(1)
    told_of(query)


def is_rescaled(fleet: RunningFleet, query: RunningQuery, told_of: Callable[..., None]) -> None:
    again = RunningQuery(fleet, STATE, "query", "run-2", query.batch)
    told_of(again, 3)
    fleet.shards.partitions.maintain(1)
    told_of(again)


def is_branched(fleet: RunningFleet, query: RunningQuery, told_of: Callable[[RunningQuery], None]) -> None:
    try:
        fleet.do(fleet.coordinator.branch(STATE, BRANCH, 3))
    except StateStoreError:
        return
    other = RunningQuery(fleet, BRANCH, "another", "run-2", 3)
    for one in (other, query, other):
        told_of(one)
    fleet.shards.partitions.maintain(1)


def is_started_again(fleet: RunningFleet, query: RunningQuery, told_of: Callable[[RunningQuery], None]) -> None:
    told_of(RunningQuery(fleet, STATE, "query", "run-2", query.batch))
    with suppress(StateStoreError):
        fleet.do(fleet.coordinator.clean(STATE, False))


FOLLOWING = {one.__name__: one for one in (goes_on, is_rescaled, is_branched, is_started_again)}


def needed(objects: MemoryObjectStore) -> list[str]:
    """Files that retained versions need, in an order that is the same whatever their ids."""
    return sorted(
        (one.path for one in files_of(objects, STATE).files), key=lambda path: re.sub("-[0-9a-f]{32}", "", path)
    )


def lived(follow: str, damage: Callable[[MemoryObjectStore], object]) -> tuple[MemoryObjectStore, dict[str, str]]:
    """A fleet's life with damage in the middle; returns its files, and what was emitted and read."""
    fleet, query = begun("a")
    damage(fleet.objects)
    found: dict[str, str] = {}

    def told_of(query: RunningQuery, num_shards: int | None = None) -> None:
        name = f"{query.state} emits {query.batch}"
        found[name] = told(lambda: query.next_batch("a", num_shards))

    FOLLOWING[follow](fleet, query, told_of)
    fleet.stop()
    for name in (STATE, BRANCH):
        state = state_in(fleet.objects, name)
        for version in range(1, 9):
            found[f"{name} {version}"] = told(
                lambda version=version, state=state: state.at(version).scan().to_arrow().to_pylist()
            )
    again = RunningFleet(copied(fleet.objects))
    for name in (STATE, BRANCH):
        last = max((int(one[-1]) for one in found if one.startswith(f"{name} emits")), default=-1)
        if last >= 0:
            query = RunningQuery(again, name, "query" if name == STATE else "another", "run-9", last + 1)
            found[f"{name} emits {last + 1}"] = told(lambda query=query: query.next_batch("a"))
    again.stop()
    return fleet.objects, found


@cache
def undamaged(follow: str) -> dict[str, str]:
    return lived(follow, lambda objects: None)[1]


@cache
def damages() -> dict[str, Damage]:
    fleet, _ = begun("b")
    fleet.stop()
    return {**DAMAGES, "another fleet's": taken_from(fleet.objects)}


@cache
def kinds_of_files() -> int:
    fleet, _ = begun("a")
    fleet.stop()
    return len(needed(fleet.objects))


def outcome(follow: str, place: int, kind: str) -> str:
    """What is wrong after a damage to one of the files; empty if nothing is."""
    touched: set[str | None] = set()
    is_newest = False

    def damage(objects: MemoryObjectStore) -> None:
        nonlocal is_newest
        path = needed(objects)[place]
        is_newest = path == max(one.path for one in objects.list(f"{STATE}/manifest"))
        other = neighbour(objects, path) if kind == "swap" else None
        before = objects.get(path)
        is_done = damages()[kind](objects, path, random.Random(f"{place} {kind}"))
        if is_done and (kind == "delete" or not says_the_same(objects.get(path), before)):
            touched.update({path, other} - {None})

    objects, found = lived(follow, damage)
    expected = undamaged(follow)
    wrong = {name: rows for name, rows in found.items() if not rows.startswith(ERROR) and rows != expected[name]}
    if wrong:
        return f"wrong rows after {touched}: {wrong}"
    if not touched:
        return ""
    still = {one.path for one in files_of(objects, STATE).files} & touched
    is_hidden = kind == "delete" and (is_newest or any("/checkpoints/" in str(one) for one in touched))
    named = named_by_verify(objects, (STATE, BRANCH))
    if still and not (touched & named) and not is_hidden:
        return f"verify names {sorted(named)} and not {touched}"
    lost = [name for name, rows in found.items() if rows.startswith(ERROR) and not expected[name].startswith(ERROR)]
    return f"{lost} is lost, and verify names nothing: {found[lost[0]]}" if lost and not named and not is_hidden else ""


def cases() -> list[tuple[str, int, str]]:
    return [(follow, place, kind) for follow in FOLLOWING for place in range(kinds_of_files()) for kind in damages()]


def test_every_kind_of_file_is_there_and_is_read_again_after_all_that_follows() -> None:
    fleet, _ = begun("a")
    fleet.stop()
    paths = needed(fleet.objects)
    assert {Path(path).parent.name for path in paths} == {"s", "manifest", "checkpoints", "parts", "0", "1"}
    assert {Path(path).suffix for path in paths} == {".json", ".delta", ".snapshot"}
    for follow in FOLLOWING:
        expected = undamaged(follow)
        last = max(int(name[-1]) for name in expected if name.startswith(f"{STATE} emits"))
        assert not [name for name, rows in expected.items() if "emits" in name and rows.startswith(ERROR)]
        # The last of them came from storage.
        assert not expected[f"{STATE} {last}"].startswith(ERROR)


def test_no_sampled_damage_under_a_running_fleet_gives_wrong_rows_or_stays_unnamed() -> None:
    sample = random.Random(20261123).sample(cases(), SAMPLE)
    assert {case: found for case in sample if (found := outcome(*case))} == {}


@pytest.mark.soak
@pytest.mark.parametrize("follow", FOLLOWING)
def test_no_damage_under_a_running_fleet_gives_wrong_rows_or_stays_unnamed(follow: str) -> None:
    assert {case: found for case in cases() if case[0] == follow and (found := outcome(*case))} == {}

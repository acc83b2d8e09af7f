"""Files that are damaged under a running fleet, which continues from memory; then everything is read again from storage.

Every kind of file is damaged in every way under a query that continues, is rescaled, branched or restarted. The whole survey is run by
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
    rows_or_error,
    says_the_same,
    state_in,
    taken_from,
)
from tests.unit.running_fleet import RunningFleet, RunningQuery

STATE, BRANCH = "s", "what_if"
#: Size of the sample that is tested with every change.
SAMPLE = 24


def running_query(seed: str) -> tuple[RunningFleet, RunningQuery]:
    """Return a fleet with a query that has run four batches."""
    fleet = RunningFleet(MemoryObjectStore())
    query = RunningQuery(fleet, STATE, "query", "run-1")
    for batch in range(4):
        query.next_batch(seed)
        if batch == 1:
            fleet.shards.partitions.maintain(1)
    fleet.settle()
    return fleet, query


def continues(fleet: RunningFleet, query: RunningQuery, run_batch: Callable[[RunningQuery], None]) -> None:
    for _ in range(2):
        run_batch(query)
    fleet.shards.partitions.maintain(1)
    run_batch(query)


def is_rescaled(fleet: RunningFleet, query: RunningQuery, run_batch: Callable[..., None]) -> None:
    restarted = RunningQuery(fleet, STATE, "query", "run-2", query.batch)
    run_batch(restarted, 3)
    fleet.shards.partitions.maintain(1)
    run_batch(restarted)


def is_branched(fleet: RunningFleet, query: RunningQuery, run_batch: Callable[[RunningQuery], None]) -> None:
    try:
        fleet.do(fleet.coordinator.branch(STATE, BRANCH, 3))
    except StateStoreError:
        return
    branch_query = RunningQuery(fleet, BRANCH, "another", "run-2", 3)
    for next_query in (branch_query, query, branch_query):
        run_batch(next_query)
    fleet.shards.partitions.maintain(1)


def is_started_again(fleet: RunningFleet, query: RunningQuery, run_batch: Callable[[RunningQuery], None]) -> None:
    run_batch(RunningQuery(fleet, STATE, "query", "run-2", query.batch))
    with suppress(StateStoreError):
        fleet.do(fleet.coordinator.clean(STATE, False))


FOLLOWING = {follow.__name__: follow for follow in (continues, is_rescaled, is_branched, is_started_again)}


def needed(objects: MemoryObjectStore) -> list[str]:
    """Return the files that retained versions need, in an order that does not depend on ids."""
    return sorted(
        (file.path for file in files_of(objects, STATE).files), key=lambda path: re.sub("-[0-9a-f]{32}", "", path)
    )


def history_with_damage(
    follow: str, damage: Callable[[MemoryObjectStore], object]
) -> tuple[MemoryObjectStore, dict[str, str]]:
    """Run a fleet with damage in the middle; return its files, and what was emitted and read."""
    fleet, query = running_query("a")
    damage(fleet.objects)
    answers: dict[str, str] = {}

    def run_batch(query: RunningQuery, num_shards: int | None = None) -> None:
        name = f"{query.state} emits {query.batch}"
        answers[name] = rows_or_error(lambda: query.next_batch("a", num_shards))

    FOLLOWING[follow](fleet, query, run_batch)
    fleet.stop()
    for name in (STATE, BRANCH):
        state = state_in(fleet.objects, name)
        for version in range(1, 9):
            answers[f"{name} {version}"] = rows_or_error(
                lambda version=version, state=state: state.at(version).scan().to_arrow().to_pylist()
            )
    restarted = RunningFleet(copied(fleet.objects))
    for name in (STATE, BRANCH):
        last = max(
            (int(name_of_answer[-1]) for name_of_answer in answers if name_of_answer.startswith(f"{name} emits")),
            default=-1,
        )
        if last >= 0:
            query = RunningQuery(restarted, name, "query" if name == STATE else "another", "run-9", last + 1)
            answers[f"{name} emits {last + 1}"] = rows_or_error(lambda query=query: query.next_batch("a"))
    restarted.stop()
    return fleet.objects, answers


@cache
def undamaged(follow: str) -> dict[str, str]:
    return history_with_damage(follow, lambda objects: None)[1]


@cache
def damages() -> dict[str, Damage]:
    fleet, _ = running_query("b")
    fleet.stop()
    return {**DAMAGES, "another fleet's": taken_from(fleet.objects)}


@cache
def kinds_of_files() -> int:
    fleet, _ = running_query("a")
    fleet.stop()
    return len(needed(fleet.objects))


def outcome(follow: str, index: int, kind: str) -> str:
    """Return what is wrong after a damage to the file at an index; empty if nothing is wrong."""
    touched: set[str | None] = set()
    is_newest = False

    def damage(objects: MemoryObjectStore) -> None:
        nonlocal is_newest
        path = needed(objects)[index]
        is_newest = path == max(file.path for file in objects.list(f"{STATE}/manifest"))
        swapped_with = neighbour(objects, path) if kind == "swap" else None
        before = objects.get(path)
        is_done = damages()[kind](objects, path, random.Random(f"{index} {kind}"))
        if is_done and (kind == "delete" or not says_the_same(objects.get(path), before)):
            touched.update({path, swapped_with} - {None})

    objects, answers = history_with_damage(follow, damage)
    expected = undamaged(follow)
    wrong = {name: rows for name, rows in answers.items() if not rows.startswith(ERROR) and rows != expected[name]}
    if wrong:
        return f"wrong rows after {touched}: {wrong}"
    if not touched:
        return ""
    still_needed = {file.path for file in files_of(objects, STATE).files} & touched
    is_hidden = kind == "delete" and (is_newest or any("/checkpoints/" in str(file) for file in touched))
    named = named_by_verify(objects, (STATE, BRANCH))
    if still_needed and not (touched & named) and not is_hidden:
        return f"verify names {sorted(named)} and not {touched}"
    lost = [name for name, rows in answers.items() if rows.startswith(ERROR) and not expected[name].startswith(ERROR)]
    return (
        f"{lost} is lost, and verify names nothing: {answers[lost[0]]}" if lost and not named and not is_hidden else ""
    )


def cases() -> list[tuple[str, int, str]]:
    return [(follow, index, kind) for follow in FOLLOWING for index in range(kinds_of_files()) for kind in damages()]


def test_every_kind_of_file_is_there_and_is_read_again_after_all_that_follows() -> None:
    fleet, _ = running_query("a")
    fleet.stop()
    paths = needed(fleet.objects)
    assert {Path(path).parent.name for path in paths} == {"s", "manifest", "checkpoints", "parts", "0", "1"}
    assert {Path(path).suffix for path in paths} == {".json", ".delta", ".snapshot"}
    for follow in FOLLOWING:
        expected = undamaged(follow)
        last = max(int(name[-1]) for name in expected if name.startswith(f"{STATE} emits"))
        assert not [name for name, rows in expected.items() if "emits" in name and rows.startswith(ERROR)]
        # The last answers came from storage.
        assert not expected[f"{STATE} {last}"].startswith(ERROR)


def test_no_sampled_damage_under_a_running_fleet_gives_wrong_rows_or_stays_unnamed() -> None:
    sample = random.Random(20261123).sample(cases(), SAMPLE)
    assert {case: problem for case in sample if (problem := outcome(*case))} == {}


@pytest.mark.soak
@pytest.mark.parametrize("follow", FOLLOWING)
def test_no_damage_under_a_running_fleet_gives_wrong_rows_or_stays_unnamed(follow: str) -> None:
    assert {case: problem for case in cases() if case[0] == follow and (problem := outcome(*case))} == {}

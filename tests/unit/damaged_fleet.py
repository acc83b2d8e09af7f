"""Files that are damaged under a running fleet, which continues from memory; then everything is read again from storage."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress

from coordinator.model.errors import StateStoreError
from statefleet.reads.verify import files_of
from tests.memory_store import MemoryObjectStore
from tests.unit.damages import (
    DAMAGES,
    ERROR,
    Survey,
    copied,
    named_by_verify,
    neighbour,
    rows_of_versions,
    rows_or_error,
    says_the_same,
    taken_from,
    wrong_rows,
)
from tests.unit.running_fleet import RunningFleet, RunningQuery

STATE, BRANCH = "s", "what_if"
QUERY_IDS = {STATE: "query", BRANCH: "another"}


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


def stopped_files(seed: str) -> MemoryObjectStore:
    fleet, _ = running_query(seed)
    fleet.stop()
    return fleet.objects


def history_with_damage(
    follow: str, damage: Callable[[MemoryObjectStore], object] = id
) -> tuple[MemoryObjectStore, dict[str, str]]:
    """Run a fleet with damage in the middle; return its files, and what was emitted and read."""
    fleet, query = running_query("a")
    damage(fleet.objects)
    answers: dict[str, str] = {}
    next_batches: dict[str, int] = {}

    def run_batch(query: RunningQuery, num_shards: int | None = None) -> None:
        name, next_batches[query.state] = f"{query.state} emits {query.batch}", query.batch + 1
        answers[name] = rows_or_error(lambda: query.next_batch("a", num_shards))

    FOLLOWING[follow](fleet, query, run_batch)
    fleet.stop()
    answers |= rows_of_versions(fleet.objects, QUERY_IDS, range(1, 9))
    restarted = RunningFleet(copied(fleet.objects))
    for name, batch in next_batches.copy().items():
        run_batch(RunningQuery(restarted, name, QUERY_IDS[name], "run-9", batch))
    restarted.stop()
    return fleet.objects, answers


class RunningSurvey(Survey):
    """Files, by their place among those of a state, that are damaged before each of the histories that may follow."""

    def __init__(self) -> None:
        self.damages = {**DAMAGES, "another fleet's": taken_from(stopped_files("b"))}
        self.files = needed(stopped_files("a"))
        self.expected = {follow: history_with_damage(follow)[1] for follow in FOLLOWING}

    def places(self) -> list[tuple[str, int]]:
        """Return what follows, each with the number of each file."""
        return [(follow, index) for follow in FOLLOWING for index in range(len(self.files))]

    def outcome(self, place: tuple[str, int], kind: str, seed: int = 0) -> str:
        follow, index = place
        touched: set[str] = set()
        is_hidden = False

        def damage(objects: MemoryObjectStore) -> None:
            nonlocal is_hidden
            path = needed(objects)[index]
            is_newest = path == max(file.path for file in objects.list(f"{STATE}/manifest"))
            is_hidden = kind == "delete" and (is_newest or "/checkpoints/" in path)
            both = {path, neighbour(objects, path) if kind == "swap" else None}
            before = objects.get(path)
            is_done = self.damages[kind](objects, path, random.Random(f"{index} {kind} {seed}"))
            if is_done and (kind == "delete" or not says_the_same(objects.get(path), before)):
                touched.update(file for file in both if file)

        objects, answers = history_with_damage(follow, damage)
        expected = self.expected[follow]
        if wrong := wrong_rows(answers, expected):
            return f"wrong rows after {touched}: {wrong}"
        if not touched or is_hidden:
            return ""
        named = named_by_verify(objects, QUERY_IDS)
        still_needed = {file.path for file in files_of(objects, STATE).files} & touched
        if still_needed and not touched & named:
            return f"verify names {sorted(named)} and not {touched}"
        lost = [
            name for name, rows in answers.items() if rows.startswith(ERROR) and not expected[name].startswith(ERROR)
        ]
        return f"{lost} is lost, and verify names nothing: {answers[lost[0]]}" if lost and not named else ""

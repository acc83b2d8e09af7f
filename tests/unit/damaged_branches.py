"""A rescaled state and its branch, whose files can be damaged.

Besides the damages of every survey, files are replaced by those of the branch or its parent, and by those of a backup from which the
state continued in another way.
"""

from __future__ import annotations

from functools import cache

from tests.memory_store import MemoryObjectStore
from tests.unit.damages import StoredSurvey, copied, rows_of_versions, rows_or_error, taken_from
from tests.unit.running_fleet import RunningFleet, RunningQuery

PARENT, BRANCH = "s", "what_if"
QUERY_IDS = {PARENT: "query", BRANCH: "another"}
STATES = (PARENT, BRANCH)
#: So many records lead to a checkpoint: the branch has one, and its log from the first record on.
CHECKPOINT_INTERVAL = 8


def batches(fleet: RunningFleet, state: str, run: str, first: int, seeds: list[str], shards: int | None = None) -> None:
    """Run batches of a run, from the batch `first` on, each with a seed."""
    query = RunningQuery(fleet, state, QUERY_IDS[state], run, first)
    for seed in seeds:
        query.next_batch(seed, shards)


def go_on(objects: MemoryObjectStore, seed: str) -> None:
    """Run the second half of the states' history."""
    fleet = RunningFleet(objects, CHECKPOINT_INTERVAL)
    batches(fleet, PARENT, "run-1", 3, [seed] * 2, shards=3)
    fleet.do(fleet.coordinator.branch(PARENT, BRANCH, 4))
    batches(fleet, BRANCH, "run-2", 4, [f"{seed} of the branch"] * 2)
    batches(fleet, PARENT, "run-3", 5, [seed])
    fleet.stop()


def files(seed: str) -> tuple[MemoryObjectStore, MemoryObjectStore]:
    """Return the files of both states, and those at half of their history."""
    fleet = RunningFleet(MemoryObjectStore(), CHECKPOINT_INTERVAL)
    batches(fleet, PARENT, "run-0", 0, [seed] * 3)
    fleet.shards.partitions.maintain(1)
    fleet.stop()
    halfway = copied(fleet.objects)
    go_on(fleet.objects, seed)
    return fleet.objects, halfway


def read(objects: MemoryObjectStore) -> dict[str, str]:
    """Return what readers get of each version of both states, and what the next batch of each query emits."""
    answers = rows_of_versions(objects, STATES, range(1, 7))
    fleet = RunningFleet(copied(objects))
    for name in STATES:
        query = RunningQuery(fleet, name, QUERY_IDS[name], "run-9", 6)
        answers[f"{name} goes on"] = rows_or_error(lambda query=query: query.next_batch("next"))
    fleet.stop()
    return answers


def _sibling(path: str) -> str:
    state, _, file = path.partition("/")
    return f"{STATES[state == PARENT]}/{file}"


@cache
def survey() -> StoredSurvey:
    objects, backup = files("a")
    go_on(backup, "c")
    others = {"another fleet's": files("b")[0], "a backup's": backup}
    further = {name: taken_from(store) for name, store in others.items()}
    return StoredSurvey(objects, STATES, read, {**further, "the other state's": taken_from(objects, _sibling)})

"""A rescaled state and its branch, whose files can be damaged.

Besides the damages of every survey, files are replaced by those of the branch or its parent, and by those of a backup from which the
state continued in another way.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from msgspec import structs

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import MachineClock
from coordinator.service.versions import Branching
from coordinator.storage.memory import MemoryObjectStore
from tests.unit.aggregation_fleet import LocalCoordinator
from tests.unit.damages import StoredSurvey, copied, rows_of_versions, rows_or_error, taken_from
from tests.unit.rescaled_query import SUMS, RescaledQuery, random_sums

PARENT, BRANCH = "s", "what_if"
STATES = (PARENT, BRANCH)
CREATED = StateMetadata(PARENT, "query", 2, "update", SUMS)


class BranchCoordinator(LocalCoordinator):
    """A coordinator of a state that writes checkpoints often, in small parts."""

    def __init__(self, objects: Any, state: str) -> None:
        created = CREATED if state == PARENT else None
        super().__init__(objects, created, state, checkpoint_interval=8, part_records=3)

    def branch(self, version: int) -> None:
        self._do(Branching(self.open, MachineClock()).make(CREATED, version, BRANCH))


class BranchQuery(RescaledQuery):
    """A query of a state that may exist already."""

    def __init__(self, objects: Any, state: str, batch: int, run: str) -> None:
        super().__init__(SUMS, 2)
        self.state_name = state
        self.fleet.objects = objects
        self.fleet.coordinator = BranchCoordinator(objects, state)
        self.batch, self.run = batch, run
        self.layout = self.fleet.coordinator.read(lambda ledger: ledger.layouts.newest(ShardLayout(2)))

    def task(self, partition: int) -> TaskIdentity:
        return structs.replace(
            super().task(partition), state_name=self.state_name, query_id=f"query of {self.state_name}"
        )

    def batches(self, count: int, seed: str) -> list[str]:
        """Run batches and return what they emit."""
        store, chance = self.fleet.new_store(), random.Random(f"{seed} {self.batch}")
        return [repr(sorted(self.apply(random_sums(chance, self.batch), 0, store).items())) for _ in range(count)]


def go_on(objects: MemoryObjectStore, seed: str) -> None:
    """Run the second half of the states' history."""
    query = BranchQuery(objects, PARENT, 3, "run-1")
    query.rescale(3)
    query.batches(2, seed)
    query.fleet.coordinator.branch(4)
    BranchQuery(objects, BRANCH, 4, "run-2").batches(2, seed)
    query = BranchQuery(objects, PARENT, 5, "run-3")
    query.batches(1, seed)


def files(seed: str) -> tuple[MemoryObjectStore, MemoryObjectStore]:
    """Return the files of both states, and those at half of their history."""
    objects = MemoryObjectStore()
    query = BranchQuery(objects, PARENT, 0, "run-0")
    store, chance = query.fleet.new_store(), random.Random(seed)
    for _ in range(3):
        query.apply(random_sums(chance, query.batch), 0, store)
    store.partitions.maintain(1)
    halfway = copied(objects)
    go_on(objects, seed)
    return objects, halfway


def read(objects: MemoryObjectStore) -> dict[str, str]:
    """Return what readers get of each version of both states, and what the next batch of each query emits."""
    answers = rows_of_versions(objects, STATES, range(1, 7))
    objects_of_queries = copied(objects)
    for name in STATES:
        answers[f"{name} goes on"] = rows_or_error(
            lambda name=name: BranchQuery(objects_of_queries, name, 6, "run-9").batches(1, "next")
        )
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

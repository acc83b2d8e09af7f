"""Damage to files of a rescaled state and of its branch, as readers of both and the queries that continue from them see it.

Besides the damages of :mod:`tests.unit.test_damage_survey`, files are replaced by those of the branch or its parent, and by those of
a backup from which the state continued in another way. The whole survey is run by ``./run soak``; here is a sample of it.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import MachineClock
from coordinator.service.branching import Branching
from coordinator.storage.memory import MemoryObjectStore
from statefleet.reads.verify import files_of
from store_actors.serving.files import decode_file
from tests.unit.aggregation_fleet import LocalCoordinator
from tests.unit.damages import DAMAGES, ERROR, Survey, copied, counterpart, rows_or_error, state_in, taken_from
from tests.unit.rescaled_query import SUMS, RescaledQuery, random_sums

PARENT, BRANCH = "s", "what_if"
STATES = (PARENT, BRANCH)
CREATED = StateMetadata(PARENT, "query", 2, "update", SUMS)
#: Size of the sample that is tested with every change.
SAMPLE = 12


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
        self.layout = self.submit(lambda ledger: ([], ledger.layouts.newest(ShardLayout(2))))

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


def files(seed: str, backup: MemoryObjectStore | None = None) -> MemoryObjectStore:
    """Return the files of both states; the files at half of their history are copied to `backup`."""
    objects = MemoryObjectStore()
    query = BranchQuery(objects, PARENT, 0, "run-0")
    store, chance = query.fleet.new_store(), random.Random(seed)
    for _ in range(3):
        query.apply(random_sums(chance, query.batch), 0, store)
    store.partitions.maintain(1)
    for info in objects.list("") if backup is not None else ():
        backup.put(info.path, objects.get(info.path))
    go_on(objects, seed)
    return objects


def read(objects: MemoryObjectStore) -> dict[str, str]:
    """Return what readers get of each version of both states, and what the next batch of each query emits."""
    answers = {}
    for name in STATES:
        state = state_in(objects, name)
        for version in range(1, 7):
            answers[f"{name} {version}"] = rows_or_error(
                lambda version=version, state=state: state.at(version).scan().to_arrow().to_pylist()
            )
    objects_of_queries = copied(objects)
    for name in STATES:
        answers[f"{name} goes on"] = rows_or_error(
            lambda name=name: BranchQuery(objects_of_queries, name, 6, "run-9").batches(1, "next")
        )
    return answers


def _sibling(path: str) -> str:
    state, _, file = path.partition("/")
    return f"{STATES[state == PARENT]}/{file}"


@pytest.fixture(scope="module")
def survey() -> Survey:
    backup = MemoryObjectStore()
    objects = files("a", backup)
    go_on(backup, "c")
    damages = {
        **DAMAGES,
        "another fleet's": taken_from(files("b")),
        "a backup's": taken_from(backup),
        "the other state's": taken_from(objects, _sibling),
    }
    return Survey(objects, STATES, read, damages)


def test_the_undamaged_states_have_the_expected_rows_and_files(survey: Survey) -> None:
    expected = survey.expected
    assert not [name for name, rows in expected.items() if rows.startswith(ERROR) and name[-1] not in "123"]
    assert expected[f"{PARENT} 4"] == expected[f"{BRANCH} 4"] != expected[f"{PARENT} 6"]
    kinds = {(path.partition("/")[0], Path(path).parent.name) for path in survey.needed()}
    assert {folder for state, folder in kinds if state == PARENT} >= {"manifest", "checkpoints", "parts", "0", "4"}
    assert {folder for state, folder in kinds if state == BRANCH} >= {"manifest", "checkpoints", "2", "4"}


@pytest.mark.parametrize("kind", ["delete", "a backup's"])
def test_the_first_record_of_a_branch_is_checked(survey: Survey, kind: str) -> None:
    assert survey.outcome(f"{BRANCH}/manifest/{1:020d}.json", kind) == ""


def test_a_file_of_rows_of_another_fleet_is_refused_by_the_log_and_by_its_own_fields(survey: Survey) -> None:
    """Files of the shards of both layouts of a state, and of its branch, which shares a part of them."""
    other_fleet, dice, refused = files("b"), random.Random(0), set()
    needed = {
        file.path: file for name in STATES for file in files_of(survey.objects, name).files if file.entry is not None
    }
    for path, file in needed.items():
        assert file.entry is not None
        other_path = counterpart(other_fleet, path, dice)
        assert other_path is not None
        data = other_fleet.get(other_path)
        with pytest.raises(CorruptStateError, match="its size or checksum differs"):
            decode_file(data, file.entry, file.piece)
        agreeing = structs.replace(file.entry, file_bytes=len(data), checksum=zlib.crc32(data))
        with pytest.raises(CorruptStateError, match=r"not the one that belongs in its place.*field=`attempt`"):
            decode_file(data, agreeing)
        refused.add((path.partition("/")[0], file.entry.partition_id, Path(path).suffix))
    shards = {(state, partition) for state, partition, _ in refused}
    assert shards >= {(PARENT, 0), (PARENT, 2), (BRANCH, 2)}
    assert {suffix for _, _, suffix in refused} == {".delta", ".snapshot"}


def test_no_sampled_damage_of_branches_gives_wrong_rows_or_stays_unnamed(survey: Survey) -> None:
    assert survey.sampled(SAMPLE) == {}


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*DAMAGES, "another fleet's", "a backup's", "the other state's"])
def test_no_damage_of_branches_gives_wrong_rows_or_stays_unnamed(survey: Survey, kind: str) -> None:
    assert survey.outcomes(survey.cases([kind])) == {}

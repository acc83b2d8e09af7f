"""Damage to files of a state that was rescaled, and of a branch of it: readers of both, and the queries that go on from them.

Beside what :mod:`tests.unit.test_damage_survey` does to files, they are taken from the branch or from its parent, and from a backup
from which the state had gone on in another way. The whole survey is run by ``./run soak``; here is a sample of it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.branching import Branching
from coordinator.errors import StateStoreError
from coordinator.generations import Generation
from coordinator.ledger_keeper import LedgerKeeper
from coordinator.manifest_log import ManifestLog
from coordinator.model import StateMetadata, TaskIdentity
from coordinator.storage.local import LocalObjectStore
from coordinator.storage.memory import MemoryObjectStore
from coordinator.surroundings import MachineClock
from store_actors.live.fleet import attach
from store_actors.live.verify import check_files, files_of
from tests.unit.test_damage_survey import DAMAGES, Damage, Place
from tests.unit.test_operator_shards import Coordinator
from tests.unit.test_rescale_shards import SUMS, Query, sums

PARENT, BRANCH = "s", "what_if"
STATES = (PARENT, BRANCH)
CREATED = StateMetadata(PARENT, "query", 2, "update", SUMS.to_json())
#: Of the samples in every change's tests.
SAMPLE = 12


class LogOf(Coordinator):
    """A coordinator of a state that writes checkpoints often, in small parts."""

    def __init__(self, objects: Any, state: str) -> None:
        self._state = state
        super().__init__(objects)

    def restart(self) -> None:
        self._keeper = self._do(self.keeper(self._state))
        if self._state == PARENT:
            self._do(self._keeper.create_metadata(CREATED))

    async def keeper(self, state: str) -> LedgerKeeper:
        keeper = LedgerKeeper(ManifestLog(self._objects, state, "writer", checkpoint_interval=8, part_records=3))
        await keeper.open()
        return keeper

    def branch(self, version: int) -> None:
        self._do(Branching(self.keeper, MachineClock()).make(CREATED, version, BRANCH))


class QueryOf(Query):
    """A query of a state that may be there."""

    def __init__(self, objects: Any, state: str, batch: int, run: str) -> None:
        super().__init__(SUMS, 2)
        self.state_name = state
        self.fleet.objects = objects
        self.fleet.coordinator = LogOf(objects, state)
        self.batch, self.run = batch, run
        self.generation = self.submit(lambda ledger: ([], ledger.generations.newest(Generation(2))))

    def task(self, partition: int) -> TaskIdentity:
        return replace(super().task(partition), state_name=self.state_name, query_id=f"query of {self.state_name}")

    def batches(self, count: int, seed: str) -> list[str]:
        """What some batches emit."""
        store, chance = self.fleet.new_store(), random.Random(f"{seed} {self.batch}")
        return [repr(sorted(self.apply(sums(chance, self.batch), 0, store).items())) for _ in range(count)]


def written(objects: MemoryObjectStore, folder: Path) -> None:
    for info in objects.list(""):
        file = folder / info.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(objects.get(info.path))


def go_on(objects: MemoryObjectStore, seed: str) -> None:
    """The second half of what happens to the states."""
    query = QueryOf(objects, PARENT, 3, "run-1")
    query.rescale(3)
    query.batches(2, seed)
    query.fleet.coordinator.branch(4)
    QueryOf(objects, BRANCH, 4, "run-2").batches(2, seed)
    query = QueryOf(objects, PARENT, 5, "run-3")
    query.batches(1, seed)


def made(folder: Path, seed: str) -> MemoryObjectStore:
    """Write both states; returns what a backup has that was made in between."""
    objects = MemoryObjectStore()
    query = QueryOf(objects, PARENT, 0, "run-0")
    store, chance = query.fleet.new_store(), random.Random(seed)
    for _ in range(3):
        query.apply(sums(chance, query.batch), 0, store)
    store.maintain(1)
    backup = MemoryObjectStore()
    for info in objects.list(""):
        backup.put(info.path, objects.get(info.path))
    go_on(objects, seed)
    written(objects, folder)
    return backup


def read(folder: Path) -> dict[str, str]:
    """What readers are given of each version of both states, and what the queries go on with: rows, or an error."""
    told = {}
    for name in STATES:
        state = attach(f"file://{folder}", offline=True).state(name, consistency="committed")
        for version in range(1, 7):
            try:
                rows = sorted(map(repr, state.at(version).scan().to_arrow().to_pylist()))
                told[f"{name} {version}"] = "\n".join(rows)
            except StateStoreError as error:
                told[f"{name} {version}"] = f"error: {error}"
    objects = MemoryObjectStore()
    for file in folder.rglob("*"):
        if file.is_file():
            objects.put(str(file.relative_to(folder)), file.read_bytes())
    for name in STATES:
        try:
            told[f"{name} goes on"] = "\n".join(QueryOf(objects, name, 6, "run-9").batches(1, "next"))
        except StateStoreError as error:
            told[f"{name} goes on"] = f"error: {error}"
    return told


@dataclass(frozen=True)
class Both(Place):
    """A folder with both states; expected is what :func:`read` gives."""

    fork: Path
    told: dict[str, str]

    def needed(self) -> list[str]:
        objects = LocalObjectStore(self.folder)
        return sorted({one.path for name in STATES for one in files_of(objects, name).files})


def taken(folder_of: Callable[[Both, str], Path], place: Place, path: str, dice: random.Random) -> bool:
    """Put a file of the same kind and number, or with none a random one, in the place of another."""
    assert isinstance(place, Both)
    there = folder_of(place, path)
    files = sorted(file for file in there.parent.glob(f"*{Path(path).suffix}") if file.is_file())
    if files:
        number = Path(path).name.partition("-")[0]
        same = [file for file in files if file.name.partition("-")[0] == number]
        shutil.copy(same[0] if same else dice.choice(files), place.folder / path)
    return bool(files)


def _sibling(place: Both, path: str) -> Path:
    state, _, rest = path.partition("/")
    return place.folder / STATES[state == PARENT] / rest


ALL_DAMAGES: dict[str, Damage] = {
    **{kind: damage for kind, damage in DAMAGES.items() if kind != "another fleet's"},
    "another fleet's": partial(taken, lambda place, path: place.other / path),
    "a backup's": partial(taken, lambda place, path: place.fork / path),
    "the other state's": partial(taken, _sibling),
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Both:
    root = tmp_path_factory.mktemp("branches")
    backup = made(root / "own", "a")
    made(root / "other", "b")
    go_on(backup, "c")
    written(backup, root / "fork")
    return Both(root / "own", root / "other", {}, root / "fork", read(root / "own"))


def outcome(fresh: Both, folder: Path, path: str, kind: str, seed: int) -> str:
    """What is wrong after a damage; empty if nothing is."""
    shutil.copytree(fresh.folder, folder)
    before = (folder / path).read_bytes()
    dice = random.Random(f"{path} {kind} {seed}")
    if not ALL_DAMAGES[kind](replace(fresh, folder=folder), path, dice):
        return ""
    if (folder / path).exists() and (folder / path).read_bytes() == before:
        return ""
    is_newest = path == max(one for one in fresh.needed() if one.startswith(f"{path.partition('/')[0]}/manifest/"))
    if kind == "delete" and ("/checkpoints/" in path or is_newest):
        return ""  # nothing tells that it was there
    told = read(folder)
    wrong = [name for name, rows in told.items() if not rows.startswith("error: ") and rows != fresh.told[name]]
    if wrong:
        return f"wrong rows of {wrong}"
    objects = LocalObjectStore(folder)
    damages = [
        one for name in STATES for one in check_files(objects, files_of(objects, name), lambda size: None).damages
    ]
    named = {word.strip(",:") for one in damages for word in (one.file, *one.problem.split())}
    touched = {path}
    if kind == "swap":
        touched.add(str(fresh.neighbour(path)).removeprefix(f"{fresh.folder}/"))
    return "" if touched & named else f"verify names {sorted(named)}"


def survey(fresh: Both, root: Path, cases: list[tuple[str, str]], seed: int) -> dict[tuple[str, str], str]:
    outcomes = {}
    for number, (path, kind) in enumerate(cases):
        found = outcome(fresh, root / str(number), path, kind, seed)
        shutil.rmtree(root / str(number))
        if found:
            outcomes[path, kind] = found
    return outcomes


def cases_of(fresh: Both) -> list[tuple[str, str]]:
    return [(path, kind) for path in fresh.needed() for kind in ALL_DAMAGES]


def test_nothing_is_wrong_with_what_is_damaged(fresh: Both) -> None:
    assert not [name for name, rows in fresh.told.items() if rows.startswith("error: ") and name[-1] not in "123"]
    assert fresh.told[f"{PARENT} 4"] == fresh.told[f"{BRANCH} 4"] != fresh.told[f"{PARENT} 6"]
    kinds = {(path.partition("/")[0], Path(path).parent.name) for path in fresh.needed()}
    assert {folder for state, folder in kinds if state == PARENT} >= {"manifest", "checkpoints", "parts", "0", "4"}
    assert {folder for state, folder in kinds if state == BRANCH} >= {"manifest", "checkpoints", "2", "4"}


@pytest.mark.parametrize("kind", ["delete", "a backup's"])
def test_the_first_record_of_a_branch_is_checked(fresh: Both, tmp_path: Path, kind: str) -> None:
    assert outcome(fresh, tmp_path / "case", f"{BRANCH}/manifest/{1:020d}.json", kind, 0) == ""


def test_no_sampled_damage_of_branches_gives_wrong_rows_or_stays_unnamed(fresh: Both, tmp_path: Path) -> None:
    dice = random.Random(20261123)
    assert survey(fresh, tmp_path, dice.sample(cases_of(fresh), SAMPLE), 0) == {}


@pytest.mark.soak
@pytest.mark.parametrize("kind", ALL_DAMAGES)
def test_no_damage_of_branches_gives_wrong_rows_or_stays_unnamed(fresh: Both, tmp_path: Path, kind: str) -> None:
    assert survey(fresh, tmp_path, [case for case in cases_of(fresh) if case[1] == kind], 0) == {}

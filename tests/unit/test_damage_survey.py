"""Every kind of damage to every kind of file: whoever reads gets the right rows or an error that says why, and `verify` names the file.

A state with two checkpoints in parts, deltas and snapshots, beside a state of the same name in another fleet. The whole survey is run
by ``./run soak``; here is a sample of it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.errors import StateStoreError
from coordinator.ledger_keeper import LedgerKeeper
from coordinator.manifest_log import ManifestLog
from coordinator.model import StateMetadata
from coordinator.storage.local import LocalObjectStore
from store_actors.live.fleet import attach
from store_actors.live.verify import check_files, files_of
from tests.unit.test_operator_shards import SCHEMA, Coordinator, Fleet

BATCHES = 14
#: Of the samples in every change's tests.
SAMPLE = 60


class SmallLogs(Coordinator):
    """A coordinator that writes checkpoints often, in small parts."""

    def restart(self) -> None:
        log = ManifestLog(self._objects, "s", "writer", checkpoint_interval=6, part_records=3)
        self._keeper = LedgerKeeper(log)
        self._do(self._keeper.open())
        self._do(self._keeper.create_metadata(StateMetadata("s", "query", 1, "update", SCHEMA.to_json())))


def made(folder: Path, letter: str) -> dict[int, dict[str, int]]:
    """Write a state ``s`` that counts a letter; returns the rows of its versions."""
    fleet = Fleet()
    fleet.coordinator = SmallLogs(fleet.objects)
    fleet.store = fleet.new_store()
    expected: dict[int, dict[str, int]] = {0: {}}
    for batch in range(BATCHES):
        fleet.apply(batch, letter + "xy"[batch % 2])
        if batch + 1 in (4, 9):
            fleet.store.maintain(1)
        expected[batch + 1] = {letter: batch + 1, "x": batch // 2 + 1, **({"y": (batch + 1) // 2} if batch else {})}
    for info in fleet.objects.list(""):
        file = folder / info.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(fleet.objects.get(info.path))
    return expected


@dataclass(frozen=True)
class Place:
    """A fleet's folder with a state ``s``, another fleet's, and what every version of the first has."""

    folder: Path
    other: Path
    expected: dict[int, dict[str, int]]

    def needed(self) -> list[str]:
        """Files that retained versions need, in an order of kind and place."""
        return sorted(one.path for one in files_of(LocalObjectStore(self.folder), "s").files)

    def neighbour(self, path: str) -> Path | None:
        """The next file of the same kind."""
        kind = Path(path).suffix
        folder = (self.folder / path).parent
        files = sorted(file for file in folder.iterdir() if file.suffix == kind)
        return None if len(files) < 2 else files[(files.index(self.folder / path) + 1) % len(files)]

    def elsewhere(self, path: str) -> Path:
        """The file of the same place in the other fleet."""
        own, folder = sorted((self.folder / path).parent.iterdir()), (self.other / path).parent
        return sorted(folder.iterdir())[own.index(self.folder / path)]


Damage = Callable[[Place, str, random.Random], bool]


def rewritten(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    def damage(place: Place, path: str, dice: random.Random) -> bool:
        file = place.folder / path
        file.write_bytes(change(file.read_bytes(), dice))
        return True

    return damage


def flipped(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ dice.randrange(1, 256)]) + data[at + 1 :]


def zeroed(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :]


def deleted(place: Place, path: str, dice: random.Random) -> bool:
    (place.folder / path).unlink()
    return True


def copied_over(place: Place, path: str, dice: random.Random) -> bool:
    neighbour = place.neighbour(path)
    if neighbour is not None:
        shutil.copy(neighbour, place.folder / path)
    return neighbour is not None


def swapped(place: Place, path: str, dice: random.Random) -> bool:
    neighbour, file = place.neighbour(path), place.folder / path
    if neighbour is None:
        return False
    own, others = file.read_bytes(), neighbour.read_bytes()
    file.write_bytes(others)
    neighbour.write_bytes(own)
    return True


def of_another_fleet(place: Place, path: str, dice: random.Random) -> bool:
    shutil.copy(place.elsewhere(path), place.folder / path)
    return True


DAMAGES: dict[str, Damage] = {
    "flip": rewritten(flipped),
    "cut": rewritten(lambda data, dice: data[: dice.randrange(len(data))]),
    "zero": rewritten(zeroed),
    "empty": rewritten(lambda data, dice: b""),
    "delete": deleted,
    "copy over": copied_over,
    "swap": swapped,
    "another fleet's": of_another_fleet,
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("survey")
    made(root / "other", "b")
    return Place(root / "own", root / "other", made(root / "own", "a"))


def rows_of(folder: Path) -> Iterator[tuple[int, dict[str, int] | str]]:
    """What a reader is given of each version: its rows, or an error."""
    state = attach(f"file://{folder}", offline=True).state("s", consistency="committed")
    try:
        versions = state.versions()
    except StateStoreError as error:
        yield from ((version, str(error)) for version in range(BATCHES + 1))
        return
    for version in versions:
        try:
            rows = state.at(version).scan().to_arrow().to_pylist()
        except StateStoreError as error:
            yield version, str(error)
        else:
            yield version, {row["v"]: row["n"] for row in rows}


def silent(fresh: Place, folder: Path, path: str, kind: str, seed: int) -> str:
    """What is wrong after a damage: wrong rows, or damage that nobody names; empty if nothing is."""
    shutil.copytree(fresh.folder, folder)
    place = Place(folder, fresh.other, fresh.expected)
    before = (folder / path).read_bytes()
    if not DAMAGES[kind](place, path, random.Random(f"{path} {kind} {seed}")):
        return ""
    if kind == "delete" and path == max(one for one in fresh.needed() if "/manifest/" in one):
        return ""  # the log ends before it, as if it had never been; a query's checkpoint is ahead then, and the query is refused
    if (folder / path).exists() and (folder / path).read_bytes() == before:
        return ""
    told = dict(rows_of(folder))
    wrong = {
        version: rows for version, rows in told.items() if isinstance(rows, dict) and rows != place.expected[version]
    }
    objects = LocalObjectStore(folder)
    damages = check_files(objects, files_of(objects, "s"), lambda size: None).damages
    if wrong:
        return f"wrong rows: {wrong}"
    if kind == "delete" and "/checkpoints/" in path:
        return (
            "" if told == place.expected else f"without a checkpoint: {told}"
        )  # nothing tells that it was there, and the log says the same
    named = {word.strip(",") for one in damages for word in (one.file, *one.problem.split())}
    neighbour = None if kind != "swap" else fresh.neighbour(path)
    touched = {path} if neighbour is None else {path, str(neighbour.relative_to(fresh.folder))}
    return "" if touched & named else f"verify names {sorted(named)}"


def survey(fresh: Place, root: Path, cases: list[tuple[str, str]], seed: int) -> dict[tuple[str, str], str]:
    outcomes = {}
    for number, (path, kind) in enumerate(cases):
        folder = root / str(number)
        outcome = silent(fresh, folder, path, kind, seed)
        shutil.rmtree(folder)
        if outcome:
            outcomes[path, kind] = outcome
    return outcomes


def cases_of(fresh: Place) -> list[tuple[str, str]]:
    return [(path, kind) for path in fresh.needed() for kind in DAMAGES]


def test_every_kind_of_file_is_there(fresh: Place) -> None:
    kinds = {Path(path).parent.name for path in fresh.needed()}
    assert kinds == {"s", "manifest", "checkpoints", "parts", "0"}
    assert {Path(path).suffix for path in fresh.needed()} == {".json", ".delta", ".snapshot"}
    assert dict(rows_of(fresh.folder)) == fresh.expected
    objects = LocalObjectStore(fresh.folder)
    assert check_files(objects, files_of(objects, "s"), lambda size: None).damages == ()


def test_no_sampled_damage_gives_wrong_rows_or_stays_unnamed(fresh: Place, tmp_path: Path) -> None:
    dice = random.Random(20261123)
    assert survey(fresh, tmp_path, dice.sample(cases_of(fresh), SAMPLE), 0) == {}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_no_damage_gives_wrong_rows_or_stays_unnamed(fresh: Place, tmp_path: Path, seed: int) -> None:
    assert survey(fresh, tmp_path, cases_of(fresh), seed) == {}

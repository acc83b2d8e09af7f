"""Kinds of damage to files of states, and surveys that damage each file in each way and look at what readers get."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from coordinator.model.errors import StateStoreError
from coordinator.runtime.runtime import Runtime
from statefleet.reads.fleet import LiveFleet
from statefleet.reads.state import LiveState
from statefleet.reads.stored import StoredSource
from statefleet.reads.verify import check_files, files_of
from tests.memory_store import MemoryObjectStore

#: Begins the text that stands for an error instead of rows.
ERROR = "error: "
#: Damages the file at a path of a store, with random choices; returns False if there was nothing to damage.
Damage = Callable[[MemoryObjectStore, str, random.Random], bool]


def copied(objects: MemoryObjectStore) -> MemoryObjectStore:
    """Return another store with the same files."""
    copy = MemoryObjectStore()
    for info in objects.list(""):
        copy.put(info.path, objects.get(info.path))
    return copy


def state_in(objects: MemoryObjectStore, name: str, part: str = "", consistency: str = "committed") -> LiveState:
    """Return a state as a program reads it from storage, without a fleet."""
    runtime = Runtime()
    fleet = LiveFleet(StoredSource(objects, runtime), _no_fleet, runtime)
    return fleet.state(name, part, consistency=consistency)


def _no_fleet() -> LiveFleet:
    raise AssertionError("no other process has these files")


def rows_or_error(look: Callable[[], Iterable[object]]) -> str:
    """Return rows in sorted order, a line each, or the error that was raised instead of them."""
    try:
        return "\n".join(sorted(map(repr, look())))
    except StateStoreError as error:
        return f"{ERROR}{error}"


def rows_of_versions(objects: MemoryObjectStore, states: Iterable[str], versions: Iterable[int]) -> dict[str, str]:
    """Return what a reader gets of versions of states, by the state's name and the version."""
    answers = {}
    for name in states:
        state = state_in(objects, name)
        for version in versions:
            answers[f"{name} {version}"] = rows_or_error(
                lambda version=version, state=state: state.at(version).scan().to_arrow().to_pylist()
            )
    return answers


def named_by_verify(objects: MemoryObjectStore, states: Iterable[str]) -> set[str]:
    """Return the files that ``statefleet verify`` names."""
    damages = [
        damage for name in states for damage in check_files(objects, files_of(objects, name), lambda size: None).damages
    ]
    return {word.strip(",:") for damage in damages for word in (damage.file, *damage.problem.split())}


def says_the_same(data: bytes, other_data: bytes) -> bool:
    """Return whether files are equal, except for spaces of JSON that became line breaks."""
    try:
        return data == other_data or json.loads(data) == json.loads(other_data)
    except ValueError:
        return False


def rewritten(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    def damage(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
        objects.put(path, change(objects.get(path), dice))
        return True

    return damage


def flipped(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ dice.randrange(1, 256)]) + data[at + 1 :]


def inserted(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([dice.randrange(256)]) + data[at:]


def zeroed(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :]


def deleted(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
    objects.delete(path)
    return True


def alike(objects: MemoryObjectStore, folder: str, path: str) -> list[str]:
    """Return the files in a folder that are of the kind of a file."""
    paths = (info.path for info in objects.list(folder))
    return [other for other in paths if other.rpartition("/")[0] == folder and Path(other).suffix == Path(path).suffix]


def neighbour(objects: MemoryObjectStore, path: str) -> str | None:
    """Return the next file of the same kind in the folder of a file."""
    files = alike(objects, path.rpartition("/")[0], path)
    return None if len(files) < 2 else files[(files.index(path) + 1) % len(files)]


def copied_over(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
    source = neighbour(objects, path)
    if source is not None:
        objects.put(path, objects.get(source))
    return source is not None


def swapped(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
    other_path = neighbour(objects, path)
    if other_path is None:
        return False
    data, other_data = objects.get(path), objects.get(other_path)
    objects.put(path, other_data)
    objects.put(other_path, data)
    return True


def counterpart(other_store: MemoryObjectStore, path: str, dice: random.Random) -> str | None:
    """Return the file of the same kind and number in another store, else a random file of the kind; None if there is none."""
    folder, _, name = path.rpartition("/")
    number, files = name.partition("-")[0], alike(other_store, folder, path)
    with_number = [file for file in files if Path(file).name.partition("-")[0] == number]
    if not files:
        return None
    return with_number[0] if with_number else dice.choice(files)


def taken_from(other_store: MemoryObjectStore, path_there: Callable[[str], str] = str) -> Damage:
    """Return the damage that replaces a file by one of another store; `path_there` returns the file's path in that store."""

    def damage(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
        source = counterpart(other_store, path_there(path), dice)
        if source is not None:
            objects.put(path, other_store.get(source))
        return source is not None

    return damage


def wrong_rows(answers: Mapping[str, str], expected: Mapping[str, str]) -> dict[str, str]:
    """Return the answers that are neither the expected rows nor an error."""
    return {name: rows for name, rows in answers.items() if not rows.startswith(ERROR) and rows != expected[name]}


#: The kinds of damage that need only the store's files.
DAMAGES: dict[str, Damage] = {
    "flip": rewritten(flipped),
    "cut": rewritten(lambda data, dice: data[: dice.randrange(len(data))]),
    "insert": rewritten(inserted),
    "zero": rewritten(zeroed),
    "empty": rewritten(lambda data, dice: b""),
    "delete": deleted,
    "copy over": copied_over,
    "swap": swapped,
}


class Survey(ABC):
    """Files of a kind of state, kinds of damage to them, and what is expected of who reads them.

    Attributes
    ----------
    damages
        The kinds of damage by name.
    """

    damages: Mapping[str, Damage]

    @abstractmethod
    def places(self) -> list[Any]:
        """Return what can be damaged."""

    @abstractmethod
    def outcome(self, place: Any, kind: str, seed: int = 0) -> str:
        """Return what is wrong after a damage: wrong rows, or a damage that no error names; empty if nothing is wrong."""

    def cases(self, kinds: Iterable[str] = ()) -> list[tuple[Any, str]]:
        """Return all places, each with each kind of damage."""
        return [(place, kind) for place in self.places() for kind in kinds or self.damages]

    def sample(self, count: int) -> list[tuple[Any, str]]:
        """Return some of the cases, which depend only on their number."""
        return random.Random(20261123).sample(self.cases(), count)

    def outcomes(self, cases: Iterable[tuple[Any, str]], seed: int = 0) -> dict[tuple[Any, str], str]:
        """Return what is wrong, by case; empty if nothing is wrong."""
        return {case: outcome for case in cases if (outcome := self.outcome(*case, seed))}


class StoredSurvey(Survey):
    """Files that are damaged while no fleet runs.

    Parameters
    ----------
    objects
        The files.
    states
        The names of their states.
    read
        Return what readers get from files: rows or an error (:func:`rows_or_error`) by the name of what was read.
    further
        Kinds of damage beside :data:`DAMAGES`.
    """

    def __init__(
        self,
        objects: MemoryObjectStore,
        states: tuple[str, ...],
        read: Callable[[MemoryObjectStore], dict[str, str]],
        further: Mapping[str, Damage],
    ) -> None:
        self.objects, self.states, self._read = objects, states, read
        self.damages = {**DAMAGES, **further}
        self.expected = read(copied(objects))

    def places(self) -> list[str]:
        """Return the files that retained versions need, sorted by path."""
        return sorted({file.path for name in self.states for file in files_of(self.objects, name).files})

    def outcome(self, path: str, kind: str, seed: int = 0) -> str:
        objects = copied(self.objects)
        if not self.damages[kind](objects, path, random.Random(f"{path} {kind} {seed}")):
            return ""
        if kind != "delete" and says_the_same(objects.get(path), self.objects.get(path)):
            return ""
        state = path.partition("/")[0]
        newest = max(info.path for info in self.objects.list(f"{state}/manifest"))
        if kind == "delete" and path == newest:
            # The log ends before the file, as if it had never been written. A query whose checkpoint is ahead is refused.
            return ""
        answers = self._read(objects)
        if wrong := wrong_rows(answers, self.expected):
            return f"wrong rows: {wrong}"
        if kind == "delete" and "/checkpoints/" in path:
            # Nothing shows that the checkpoint was there, and the log has the same content.
            return "" if answers == self.expected else f"without a checkpoint: {answers}"
        named = named_by_verify(objects, self.states)
        touched = {path, neighbour(self.objects, path)} if kind == "swap" else {path}
        return "" if touched & named else f"verify names {sorted(named)}"

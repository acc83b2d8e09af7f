"""What is done to files of states, and a survey of it: each file in each way, and what whoever reads them is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.model.errors import StateStoreError
from coordinator.runtime.runtime import Runtime
from coordinator.storage.memory import MemoryObjectStore
from statefleet.reads.fleet import LiveFleet
from statefleet.reads.portable import Opened
from statefleet.reads.state import LiveState
from statefleet.reads.stored import StoredSource
from statefleet.reads.verify import check_files, files_of

#: Told in place of rows.
ERROR = "error: "
#: From a store of files, a path in it, and chance: whether there was anything to do.
Damage = Callable[[MemoryObjectStore, str, random.Random], bool]


def copied(objects: MemoryObjectStore) -> MemoryObjectStore:
    """Another store with the same files."""
    other = MemoryObjectStore()
    for info in objects.list(""):
        other.put(info.path, objects.get(info.path))
    return other


def state_in(objects: MemoryObjectStore, name: str, part: str = "") -> LiveState:
    """What a program is given that reads a state from storage, without a fleet."""
    runtime = Runtime()
    fleet = LiveFleet(StoredSource(objects, runtime), Opened(_elsewhere, {}), runtime)
    return fleet.state(name, part, consistency="committed")


def _elsewhere(**_: object) -> LiveFleet:
    raise AssertionError("no other process has these files")


def told(look: Callable[[], Iterable[object]]) -> str:
    """Rows in an order, a line each, or the error that came instead of them."""
    try:
        return "\n".join(sorted(map(repr, look())))
    except StateStoreError as error:
        return f"{ERROR}{error}"


def named_by_verify(objects: MemoryObjectStore, states: Iterable[str]) -> set[str]:
    """Files that ``statefleet verify`` names."""
    damages = [
        one for name in states for one in check_files(objects, files_of(objects, name), lambda size: None).damages
    ]
    return {word.strip(",:") for one in damages for word in (one.file, *one.problem.split())}


def says_the_same(data: bytes, other: bytes) -> bool:
    """Whether files are equal, but for spaces of JSON that became line breaks."""
    try:
        return data == other or json.loads(data) == json.loads(other)
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


def zeroed(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes(len(data[at : at + 64])) + data[at + 64 :]


def deleted(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
    objects.delete(path)
    return True


def neighbour(objects: MemoryObjectStore, path: str) -> str | None:
    """The next file of the same kind in its folder."""
    folder = path.rpartition("/")[0]
    kind = Path(path).suffix
    files = [
        one.path for one in objects.list(folder) if one.path.rpartition("/")[0] == folder and one.path.endswith(kind)
    ]
    return None if len(files) < 2 else files[(files.index(path) + 1) % len(files)]


def copied_over(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
    other = neighbour(objects, path)
    if other is not None:
        objects.put(path, objects.get(other))
    return other is not None


def swapped(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
    other = neighbour(objects, path)
    if other is None:
        return False
    own, others = objects.get(path), objects.get(other)
    objects.put(path, others)
    objects.put(other, own)
    return True


def counterpart(elsewhere: MemoryObjectStore, path: str, dice: random.Random) -> str | None:
    """The file of the same kind and number in another store, or with none a random one of the kind; None if there is none."""
    folder, _, name = path.rpartition("/")
    kind, number = Path(path).suffix, name.partition("-")[0]
    files = [
        one.path for one in elsewhere.list(folder) if one.path.rpartition("/")[0] == folder and one.path.endswith(kind)
    ]
    same = [file for file in files if Path(file).name.partition("-")[0] == number]
    if not files:
        return None
    return same[0] if same else dice.choice(files)


def taken_from(elsewhere: MemoryObjectStore, place: Callable[[str], str] = str) -> Damage:
    """Put a file from another store in the place of one; `place` says under which path that has it."""

    def damage(objects: MemoryObjectStore, path: str, dice: random.Random) -> bool:
        other = counterpart(elsewhere, place(path), dice)
        if other is not None:
            objects.put(path, elsewhere.get(other))
        return other is not None

    return damage


#: What needs no other files than the store's own.
DAMAGES: dict[str, Damage] = {
    "flip": rewritten(flipped),
    "cut": rewritten(lambda data, dice: data[: dice.randrange(len(data))]),
    "zero": rewritten(zeroed),
    "empty": rewritten(lambda data, dice: b""),
    "delete": deleted,
    "copy over": copied_over,
    "swap": swapped,
}


@dataclass(frozen=True)
class Survey:
    """States without damage, what may be done to their files, and what readers are to be told.

    Attributes
    ----------
    objects
        Their files.
    states
        Their names.
    read
        What readers are told of files: rows, or an error (:func:`told`), by what they look at.
    """

    objects: MemoryObjectStore
    states: tuple[str, ...]
    read: Callable[[MemoryObjectStore], dict[str, str]]
    damages: Mapping[str, Damage] = field(default_factory=lambda: DAMAGES)
    expected: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.expected.update(self.read(copied(self.objects)))

    def needed(self) -> list[str]:
        """Files that retained versions need, in an order of kind and place."""
        return sorted({one.path for name in self.states for one in files_of(self.objects, name).files})

    def cases(self, kinds: Iterable[str] = ()) -> list[tuple[str, str]]:
        """Paths, each with each kind of damage."""
        return [(path, kind) for path in self.needed() for kind in kinds or self.damages]

    def outcome(self, path: str, kind: str, seed: int = 0) -> str:
        """What is wrong after a damage: wrong rows, or damage that nobody names; empty if nothing is."""
        objects = copied(self.objects)
        if not self.damages[kind](objects, path, random.Random(f"{path} {kind} {seed}")):
            return ""
        if kind != "delete" and says_the_same(objects.get(path), self.objects.get(path)):
            return ""
        state = path.partition("/")[0]
        newest = max(one.path for one in self.objects.list(f"{state}/manifest"))
        if kind == "delete" and path == newest:
            # The log ends before it, as if it had never been; a query's checkpoint is ahead then, and the query is refused.
            return ""
        found = self.read(objects)
        wrong = {
            name: rows for name, rows in found.items() if not rows.startswith(ERROR) and rows != self.expected[name]
        }
        if wrong:
            return f"wrong rows: {wrong}"
        if kind == "delete" and "/checkpoints/" in path:
            # Nothing tells that it was there, and the log says the same.
            return "" if found == self.expected else f"without a checkpoint: {found}"
        named = named_by_verify(objects, self.states)
        touched = {path, neighbour(self.objects, path)} if kind == "swap" else {path}
        return "" if touched & named else f"verify names {sorted(named)}"

    def outcomes(self, cases: Iterable[tuple[str, str]], seed: int = 0) -> dict[tuple[str, str], str]:
        """What is wrong, by case; empty if nothing is."""
        found = {case: self.outcome(*case, seed) for case in cases}
        return {case: outcome for case, outcome in found.items() if outcome}

    def sampled(self, count: int) -> dict[tuple[str, str], str]:
        """:meth:`outcomes` of some of the cases, always the same ones as long as there are as many."""
        return self.outcomes(random.Random(20261123).sample(self.cases(), count))

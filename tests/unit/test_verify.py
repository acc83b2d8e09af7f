"""Checks of states' files: every damage is found, and the versions reported as lost are those that cannot be read."""

from __future__ import annotations

import shutil
from itertools import cycle
from pathlib import Path

import pytest

from coordinator.log.log_end import seq_of
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CorruptStateError
from coordinator.model.state_metadata import StateMetadata
from coordinator.storage.local import LocalObjectStore
from statefleet.reads.fleet import attach
from statefleet.reads.verify import StateCheck, check_files, files_of, state_names
from tests.stored_shards import STORED
from tests.unit.aggregation_fleet import filled

DATA_FILES = sorted(
    str(file.relative_to(STORED)) for file in STORED.rglob("*") if file.suffix in (".delta", ".snapshot")
)
#: Damages of a file by name.
DAMAGES = {
    "gone": lambda file: file.unlink(),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "flipped": lambda file: file.write_bytes(file.read_bytes()[:-9] + b"x" + file.read_bytes()[-8:]),
}
#: States in the folder, and their parts.
PARTS = {"clicks": ("",), "profiles": ("default", "seen")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a fleet's folder with two states, for the test to damage."""
    return Path(shutil.copytree(STORED, tmp_path / "fleet"))


def checked(folder: Path, name: str) -> StateCheck:
    objects = LocalObjectStore(folder)
    return check_files(objects, files_of(objects, name), lambda size: None)


def test_states_that_are_whole_have_no_damage(folder: Path) -> None:
    objects = LocalObjectStore(folder)
    for name in PARTS:
        sizes: list[int] = []
        files = files_of(objects, name)
        check = check_files(objects, files, sizes.append)
        assert (check.damages, check.files) == ((), len(files.files))
        assert (len(sizes), sizes[-1]) == (len(files.files), files.size)
        # Both checkpoints, the log since the older one, metadata, and data.
        paths = {file.path for file in files.files}
        assert {path for path in DATA_FILES if path.startswith(name)} <= paths
        assert f"{name}/metadata.json" in paths


@pytest.mark.parametrize(("path", "kind"), zip(DATA_FILES, cycle(DAMAGES), strict=False))
def test_versions_that_a_damaged_file_costs_are_those_that_cannot_be_read(folder: Path, path: str, kind: str) -> None:
    name, _, shard, *store, file = path.split("/")
    DAMAGES[kind](folder / path)
    (damage,) = checked(folder, name).damages
    assert (damage.file, damage.kind) == (path, file.rpartition(".")[2])
    assert (damage.state, damage.shard, damage.version) == (name, int(shard), int(file.split("-")[0]))
    assert damage.store == (store[0] if store else "default")
    assert {"gone": "missing", "cut": "bytes instead of", "flipped": "checksum"}[kind] in damage.problem
    readable = readable_versions(folder, name)
    assert unreadable(folder, name) == set(damage.unreadable) & set(readable)
    assert ("restore" in damage.advice) == bool(damage.unreadable)


def readable_versions(folder: Path, name: str) -> range:
    """Return the versions that every shard has."""
    return attach(f"file://{folder}", offline=True).state(name, PARTS[name][0]).versions()


def unreadable(folder: Path, name: str) -> set[int]:
    """Return the versions that cannot be read."""
    versions = set()
    for part in PARTS[name]:
        for version in readable_versions(folder, name):
            # A new source each time, since a source keeps loaded files.
            try:
                state = attach(f"file://{folder}", offline=True).state(name, part)
                state.at(version).scan().to_arrow()
            except CorruptStateError:
                versions.add(version)
    return versions


def test_a_snapshot_that_deltas_can_replace_costs_nothing(tmp_path: Path) -> None:
    fleet = filled(5, (2, 4))
    ManifestLog(fleet.objects, "s", "writer").create_metadata(StateMetadata("s", "q", 4, "update"))
    for path in [info.path for info in fleet.objects.list("s") if info.path.endswith(".snapshot")]:
        fleet.objects.put(path, b"nothing")
    damages = check_files(fleet.objects, files_of(fleet.objects, "s"), lambda size: None).damages
    assert [(damage.version, damage.unreadable) for damage in damages] == [(2, ()), (4, ())]
    assert all("every version can be read" in damage.advice for damage in damages)


def test_a_file_that_is_cleaned_meanwhile_is_no_damage() -> None:
    fleet = filled(6, (2, 5))
    ManifestLog(fleet.objects, "s", "writer").create_metadata(StateMetadata("s", "q", 4, "update"))
    files = files_of(fleet.objects, "s")
    fleet.coordinator.truncate(1)
    cleaned = {file.path for file in files.files if file.entry is not None} - fleet.coordinator.referenced()
    assert cleaned
    fleet.objects.delete_all(sorted(cleaned))
    assert check_files(fleet.objects, files, lambda size: None).damages == ()


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("which", ["manifest", "checkpoints", "metadata.json"])
def test_damage_of_the_log_is_named(folder: Path, which: str, kind: str) -> None:
    files = sorted((folder / "clicks").glob(which if which.endswith(".json") else f"{which}/*.json"))
    together, alone = [], files
    if which == "manifest":
        # The log is read without what the newest checkpoint has, so each of these is named, though all are damaged at once.
        newest = max(seq_of(file.name) for file in (folder / "clicks" / "checkpoints").iterdir())
        together = [file for file in files if seq_of(file.name) <= newest]
        alone = [file for file in files if file not in together]
        assert together
        assert alone
    if kind == "gone":
        # No file refers to them: the log ends before its last record, and does not need a checkpoint.
        alone = {"manifest": alone[:-1], "checkpoints": []}.get(which, alone)
    for group in filter(None, (together, *([file] for file in alone))):
        contents = {file: file.read_bytes() for file in group}
        for file in group:
            DAMAGES[kind](file)
        damages = {damage.file: damage for damage in checked(folder, "clicks").damages}
        for file, content in contents.items():
            assert damages[str(file.relative_to(folder))].advice
            file.write_bytes(content)
    assert checked(folder, "clicks").damages == ()


def test_folders_that_are_no_states_are_left_alone(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("mine")
    assert state_names(LocalObjectStore(folder)) == ["clicks", "profiles"]
    (folder / "clicks" / "metadata.json").unlink()
    assert state_names(LocalObjectStore(folder)) == ["clicks", "profiles"], (
        "a state without its metadata is damaged, not missing"
    )


def test_without_a_record_of_the_log_nothing_can_be_trusted(folder: Path) -> None:
    newest = sorted((folder / "clicks" / "manifest").glob("*.json"))[-3]
    newest.write_bytes(b"{}")
    (damage,) = checked(folder, "clicks").damages
    assert (damage.file, damage.kind) == (str(newest.relative_to(folder)), "log record")
    assert "no version of the state can be trusted" in damage.advice

"""Files of a later format are refused by name, and a state that was replaced by another one is read again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from coordinator.ledger.records import Committed
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.log_end import seal, seq_of, unseal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import CorruptStateError, InvalidRequestError, NewerFormatError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.stored_json import FORMAT
from coordinator.storage.uris import open_object_store
from statefleet.reads.fleet import attach
from statefleet.reads.verify import check_files, files_of, state_names
from store_actors.engine.versions import Change
from store_actors.serving.files import decode_file, encode_delta, identity_in_state
from tests.memory_store import MemoryObjectStore
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, LocalCoordinator, counts, filled
from tests.unit.damages import copied
from tests.unit.running_fleet import RunningFleet, RunningQuery


def checkpointing_fleet(objects: MemoryObjectStore) -> AggregationFleet:
    """Return a fleet whose coordinator writes checkpoints often, in small parts."""
    fleet = AggregationFleet(objects)
    created = StateMetadata("s", "query", 1, "update", SCHEMA)
    fleet.coordinator = LocalCoordinator(objects, created, checkpoint_interval=6, part_records=3)
    fleet.store = fleet.new_store()
    return fleet


def write_files(objects: MemoryObjectStore, folder: Path) -> None:
    """Write files to a folder."""
    for info in objects.list(""):
        file = folder / info.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(objects.get(info.path))


def write_state(folder: Path, letter: str) -> None:
    """Write a state ``s`` that counts a letter, and whose log has several checkpoints."""
    fleet = checkpointing_fleet(MemoryObjectStore())
    for batch in range(14):
        fleet.apply(batch, letter + "xy"[batch % 2])
        if batch + 1 in (4, 9):
            fleet.store.partitions.maintain(1)
    write_files(fleet.objects, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_state(tmp_path / "fleet", "a")
    return tmp_path / "fleet"


KINDS = pytest.mark.parametrize("kind", ["metadata.json", "manifest/*", "checkpoints/*", "parts/*"])


def with_format(state: Path, kind: str, number: int | None) -> Path:
    """Give the newest file of a kind another number of its format, or none."""
    file = sorted(state.glob(kind))[-1]
    body, field = unseal(file.read_bytes()), "format_version" if kind == "metadata.json" else "format"
    del body[field]
    file.write_bytes(seal(body if number is None else {**body, field: number, "unheard": "of"}))
    return file


@KINDS
def test_a_file_of_a_later_format_is_refused_by_name(folder: Path, kind: str) -> None:
    file = with_format(folder / "s", kind, FORMAT + 1)
    with pytest.raises(NewerFormatError, match=f"later release.*{file.name}.*format=`{FORMAT + 1}`"):
        attach(f"file://{folder}", offline=True).state("s").versions()


@KINDS
@pytest.mark.parametrize("number", [FORMAT - 1, 0, None])
def test_a_file_of_an_earlier_format_is_refused_by_name(folder: Path, kind: str, number: int | None) -> None:
    file, objects = with_format(folder / "s", kind, number), open_object_store(f"file://{folder}")
    says = f"before its first release.*{file.name}.*format=`{1 if number is None else number}` known=`{FORMAT}`"
    with pytest.raises(CorruptStateError, match=says):
        ManifestLog(objects, "s", "reader").check_file(str(file.relative_to(folder)))
    damages = check_files(objects, files_of(objects, "s"), lambda size: None).damages
    assert any("which no release wrote" in damage.problem for damage in damages), damages


def _copied_by_hand(folder: Path) -> None:
    shutil.rmtree(folder / "bad")
    shutil.copytree(folder / "s", folder / "bad")


def _cut_metadata(folder: Path) -> None:
    file = folder / "bad/metadata.json"
    file.write_bytes(file.read_bytes()[:20])


def _without_a_record(folder: Path) -> None:
    sorted((folder / "bad/manifest").iterdir())[-2].unlink()


def _of_a_later_format(folder: Path) -> None:
    with_format(folder / "bad", "metadata.json", FORMAT + 1)


def _nothing_but_cut_metadata(folder: Path) -> None:
    shutil.rmtree(folder / "bad/manifest")
    _cut_metadata(folder)


@pytest.mark.parametrize(
    "damage", [_copied_by_hand, _cut_metadata, _without_a_record, _of_a_later_format, _nothing_but_cut_metadata]
)
def test_a_state_that_cannot_be_read_keeps_no_other_from_being_read(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    running = RunningFleet(MemoryObjectStore())
    # Of one query, whose states are read as of one version.
    queries = [RunningQuery(running, name, "query", "run-1") for name in ("s", "bad")]
    for query in queries * 3:
        query.next_batch("a")
    running.stop()
    write_files(running.objects, tmp_path)
    expected = attach(f"file://{tmp_path}", offline=True).state("s").scan().to_arrow().to_pylist()
    assert expected
    damage(tmp_path)
    fleet = attach(f"file://{tmp_path}", offline=True)
    assert fleet.state("s").scan().to_arrow().to_pylist() == expected
    assert fleet.sql("select * from s").num_rows == len(expected)
    assert sorted(fleet.states()) == ["bad", "s"]
    assert set(fleet.state_metadata()["stateName"].to_pylist()) == {"s"}
    assert {record.state for record in caplog.records} == {"bad"}
    for look in (lambda: fleet.state("bad").version, lambda: fleet.state_metadata("bad")):
        with pytest.raises((CorruptStateError, NewerFormatError), match="bad/"):
            look()
    objects = open_object_store(f"file://{tmp_path}")
    checks = [check_files(objects, files_of(objects, name), lambda size: None) for name in state_names(objects)]
    assert {check.name: bool(check.damages) for check in checks} == {"bad": True, "s": False}


def test_a_delta_of_a_later_format_is_refused_by_name() -> None:
    fleet = AggregationFleet()
    fleet.apply(0, "a")
    (entry,) = fleet.coordinator.plan(1).deltas
    rows = decode_file(fleet.objects.get(entry.file), entry)
    change = Change(1, 0, rows, 1, 0, 1, 0, 0)
    identity = {**identity_in_state(StateStoreId("memory:///s", 0, 0), entry.attempt_id), "format": FORMAT + 1}
    data, checksum = encode_delta(change, SCHEMA, identity)
    with pytest.raises(NewerFormatError, match=entry.file):
        decode_file(data, structs.replace(entry, file_bytes=len(data), checksum=checksum))


def test_a_file_of_another_shard_is_not_read_though_its_checksum_is_right() -> None:
    fleet = filled(2, (1,))
    plan = fleet.coordinator.plan(2)
    for entry in (*plan.snapshots, *plan.deltas):
        data = fleet.objects.get(entry.file)
        assert decode_file(data, entry).num_rows
        for field, value in (("partition_id", 1), ("version", 3), ("attempt_id", "another"), ("store_name", "other")):
            with pytest.raises(CorruptStateError, match="not the one that belongs in its place"):
                decode_file(data, structs.replace(entry, **{field: value}))
        elsewhere = entry.file.replace("s/", "t/", 1)
        with pytest.raises(CorruptStateError, match="says=`s` expected=`t`"):
            decode_file(data, structs.replace(entry, file=elsewhere))
        with pytest.raises(CorruptStateError, match="its size or checksum differs"):
            decode_file(data, structs.replace(entry, checksum=entry.checksum ^ 1))
    assert {type(entry) for entry in (*plan.snapshots, *plan.deltas)} == {SnapshotEntry, CommitEntry}


def test_a_commit_that_the_log_lacks_is_noticed_at_a_later_commit_based_on_it() -> None:
    fleet = AggregationFleet()
    for batch in range(3):
        fleet.apply(batch, "a")
    first, second, third = fleet.coordinator.plan(3).deltas
    ledger = StateLedger("memory:///s")
    for entry in (first, third):
        ledger.fold(Committed(entry))
    with pytest.raises(CorruptStateError, match=r"lacks a commit.*missing=`2`"):
        ledger.load_plans(0, 3)
    assert isinstance(ledger.load_plans(0, 1).plans["default"], LoadPlan)
    assert second.version == 2


def test_a_checkpoint_of_a_backup_from_which_the_state_continued_differently_is_refused() -> None:
    backup = checkpointing_fleet(MemoryObjectStore())
    for batch in range(4):
        backup.apply(batch, "x")
    objects, other_objects = copied(backup.objects), copied(backup.objects)
    for store, letter in ((objects, "a"), (other_objects, "b")):
        fleet = checkpointing_fleet(store)
        # Until its log ends with the second checkpoint.
        for batch in range(4, 11):
            fleet.apply(batch, letter, letter)
    newest = objects.list("s/checkpoints")[-1].path
    assert other_objects.list("s/checkpoints")[-1].path == newest
    # Later records are deleted, so that a reader has only the checkpoint.
    for info in objects.list("s/manifest"):
        if seq_of(info.path) > seq_of(newest):
            objects.delete(info.path)
    expected = ManifestLog(objects, "s", "reader").load().to_json()
    objects.put(newest, other_objects.get(newest))
    for info in other_objects.list("s/parts"):
        objects.put(info.path, other_objects.get(info.path))
    assert ManifestLog(objects, "s", "reader").load().to_json() == expected
    damages = check_files(objects, files_of(objects, "s"), lambda size: None).damages
    assert [(damage.file, "its record_id is" in damage.problem) for damage in damages] == [(newest, True)]


def replaced_by_another(folder: Path, other_folder: Path) -> None:
    shutil.rmtree(folder / "s")
    shutil.copytree(other_folder / "s", folder / "s")


def put_back(folder: Path, other_folder: Path) -> None:
    for file in sorted((folder / "s" / "manifest").iterdir())[-4:]:
        file.unlink()


@pytest.mark.parametrize("change", [replaced_by_another, put_back])
def test_an_open_reader_reads_a_replaced_state_again(
    folder: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    write_state(tmp_path / "other", "b")
    state = attach(f"file://{folder}", offline=True).state("s", consistency="committed")
    before = counts(state.scan().to_arrow())
    assert "a" in before
    change(folder, tmp_path / "other")
    assert state.version  # asks the log, where a scan may use the version of a second ago
    after = counts(state.scan().to_arrow())
    fresh = attach(f"file://{folder}", offline=True).state("s", consistency="committed")
    assert after == counts(fresh.scan().to_arrow()) != before


def test_an_open_reader_gets_an_error_when_its_state_is_gone(folder: Path) -> None:
    state = attach(f"file://{folder}", offline=True).state("s", consistency="committed")
    assert state.scan().to_arrow().num_rows
    shutil.rmtree(folder / "s")
    with pytest.raises(InvalidRequestError, match="no such state"):
        state.scan().to_arrow()

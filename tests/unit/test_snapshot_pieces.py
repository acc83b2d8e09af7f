"""Snapshots of several files: no second copy of the state is needed in memory, and each file is checked by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs, to_builtins

from coordinator.model.commits import SnapshotEntry, StoredFile
from coordinator.model.errors import CorruptStateError, StorageUnavailableError
from coordinator.model.identities import StateStoreId
from coordinator.model.stored_json import from_json
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.stored_shards import stored_rows
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, counts
from tests.unit.keyed_fleet import COUNTS, NAMES, KeyedFleet
from tests.unit.observed_objects import ObservedObjectStore
from tests.unit.shard_machine import tables_of

SHARD = StateStoreId("memory:///s", 0, 0)
LETTERS = "".join(map(chr, range(200, 300)))


class PiecesFleet(AggregationFleet):
    """A fleet whose snapshots have a file for every few rows."""

    def __init__(self) -> None:
        self.stored = ObservedObjectStore()
        super().__init__(self.stored)

    def new_store(self) -> OperatorShards:
        return OperatorShards(Partitions(self.objects, self.coordinator, piece_bytes=1))

    def snapshot(self) -> None:
        for partition in [partition for _, partition in self.store.partitions.cache.items()]:
            (table,) = tables_of(partition.stores["default"])
            table.snapshot_bytes = 8 * 16
        self.store.partitions.maintain(1)

    def snapshots(self) -> list[str]:
        return [info.path for info in self.objects.list("s/0") if info.path.endswith(".snapshot")]


def test_a_snapshot_of_several_files_is_loaded_whole() -> None:
    fleet = PiecesFleet()
    fleet.apply(0, LETTERS)
    fleet.snapshot()
    (entry,) = fleet.coordinator.plan(1).snapshots
    assert len(entry.files) > 10
    assert sorted(entry.files) == fleet.snapshots()
    assert set(entry.files) <= fleet.coordinator.referenced()
    assert entry.rows == 100
    for path in fleet.deltas():
        fleet.objects.delete(path)
    fleet.store = fleet.new_store()
    assert fleet.apply(1, LETTERS[:3]) == dict.fromkeys(LETTERS[:3], 2)
    assert counts(stored_rows(fleet.store, SHARD, 1, SCHEMA)) == dict.fromkeys(LETTERS, 1)
    assert fleet.store.metrics.snapshots_loaded == 2


def test_a_snapshot_is_of_its_version_though_batches_run_while_it_is_written() -> None:
    fleet, batches = PiecesFleet(), iter(range(1, 1000))
    fleet.apply(0, LETTERS)

    def apply_a_batch(operation: str, path: str) -> None:
        if operation == "put" and path.endswith(".snapshot"):
            batch = next(batches)
            fleet.apply(batch, LETTERS[batch % 50 :: 7] + chr(1000 + batch))

    fleet.stored.before = apply_a_batch
    fleet.snapshot()
    fleet.stored.before = lambda operation, path: None
    (entry,) = fleet.coordinator.plan(1).snapshots
    newest = next(batches)
    assert newest > 10
    assert entry.version == 1
    fleet.objects.delete(next(path for path in fleet.deltas() if path.split("/")[-1].startswith("1-")))
    assert counts(stored_rows(fleet.new_store(), SHARD, 1, SCHEMA)) == dict.fromkeys(LETTERS, 1)
    whole = stored_rows(fleet.store, SHARD, newest, SCHEMA)
    ((_, partition),) = fleet.store.partitions.cache.items()
    assert counts(whole) == counts(partition.stores["default"].snapshot())


@pytest.mark.parametrize("piece", [0, 1, -1])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_file_is_named(piece: int, damage: str) -> None:
    fleet = PiecesFleet()
    fleet.apply(0, LETTERS)
    fleet.apply(1, LETTERS)
    fleet.snapshot()
    file = fleet.coordinator.plan(2).snapshots[0].files[piece]
    data = fleet.objects.get(file)
    if damage == "missing":
        fleet.objects.delete(file)
    else:
        fleet.objects.put(file, data[:-1] if damage == "cut" else data[:40] + bytes([data[40] ^ 1]) + data[41:])
    assert counts(stored_rows(fleet.new_store(), SHARD, 2, SCHEMA)) == dict.fromkeys(LETTERS, 2), "deltas give the same"
    fleet.apply(2, "a")
    assert fleet.coordinator.truncate(1)
    with pytest.raises(CorruptStateError) as failure:
        stored_rows(fleet.new_store(), SHARD, 2, SCHEMA)
    assert failure.value.context["file"] == file
    assert (failure.value.context["partition"], failure.value.context["version"]) == (0, 2)


def test_files_of_a_snapshot_that_fails_are_removed_and_nothing_is_counted() -> None:
    fleet, puts = PiecesFleet(), iter(range(1000))
    fleet.apply(0, LETTERS)

    def fail(operation: str, path: str) -> None:
        if operation == "put" and path.endswith(".snapshot") and next(puts) == 5:
            raise StorageUnavailableError("the disk is full")

    fleet.stored.before = fail
    fleet.snapshot()
    assert fleet.store.metrics.maintenance_failures == 1
    assert (fleet.snapshots(), fleet.coordinator.plan(1).snapshots) == ([], ())
    ((_, partition),) = fleet.store.partitions.cache.items()
    assert not any(table.is_frozen for table in tables_of(partition.stores["default"]))
    fleet.snapshot()
    assert fleet.store.metrics.snapshots_written == 1


def test_files_of_a_snapshot_that_does_not_count_are_removed() -> None:
    fleet = PiecesFleet()
    fleet.apply(0, LETTERS)
    # Another run makes the version again, from its own process, while the snapshot is written.
    second = fleet.new_store()

    def overtake(operation: str, path: str) -> None:
        if operation == "put" and path.endswith(".snapshot"):
            fleet.stored.before = lambda operation, path: None
            first, fleet.store = fleet.store, second
            fleet.apply(0, "z", "run-2")
            fleet.store = first

    fleet.stored.before = overtake
    fleet.snapshot()
    assert fleet.snapshots() == []
    assert fleet.store.metrics.snapshots_written == 0


def test_keyed_stores_are_snapshotted_in_pieces_without_uncommitted_writes() -> None:
    fleet = KeyedFleet()
    fleet.stores = KeyedStores(Partitions(fleet.objects, fleet.coordinator, fleet.metrics, piece_bytes=1))
    session = fleet.open(0, "run-1", 0, COUNTS, NAMES)
    fleet.put(session, **dict.fromkeys("abcdefghijklmnop", 1))
    fleet.call(session, "put_row", {"id": 7, "name": "seven"}, store="names")
    fleet.stores.commit(session)
    session = fleet.open(1, "run-1", 0, COUNTS, NAMES)
    fleet.put(session, a=2, z=3)
    assert fleet.call(session, "remove_key", ("b",)) == 1
    for store in [
        store for _, partition in fleet.stores.partitions.cache.items() for store in partition.stores.values()
    ]:
        store._table.table.snapshot_bytes = 8 * 16
    for least_deltas, written in ((2, 0), (1, 2), (1, 2)):
        fleet.stores.partitions.maintain(least_deltas)
        assert fleet.metrics.snapshots_written == written
    fleet.stores.commit(session)
    (entry,) = fleet.coordinator.plan(1).snapshots
    assert len(entry.files) > 2
    fleet.objects.delete(next(delta.file for delta in fleet.coordinator.plan(2).deltas if delta.version == 1))
    fleet.stores = fleet.new_stores()
    assert fleet.read(1) == [{"k": letter, "n": 1} for letter in "abcdefghijklmnop"]
    assert {row["k"]: row["n"] for row in fleet.read(2)} == {
        "a": 2, "z": 3, **dict.fromkeys("cdefghijklmnop", 1)
    }  # fmt: skip
    assert fleet.read(1, NAMES) == [{"id": 7, "name": "seven"}]
    assert fleet.metrics.snapshots_loaded == 3


def test_an_entry_of_one_file_is_read_as_before() -> None:
    entry = SnapshotEntry(0, 3, "a", "s/0/0/3-a.snapshot", 10, 7, 2, 0, 0)
    data = to_builtins(entry)
    assert from_json({name: value for name, value in data.items() if name != "further"}, SnapshotEntry) == entry
    several = structs.replace(entry, further=(StoredFile("s/0/0/3-a-1.snapshot", 11, 8),))
    assert from_json(to_builtins(several), SnapshotEntry) == several
    assert several.files == ("s/0/0/3-a.snapshot", "s/0/0/3-a-1.snapshot")


_MEASURED = Path(__file__).with_name("snapshot_memory.py")


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports the peak memory of a process"
)
def test_neither_writing_nor_loading_a_snapshot_needs_the_state_again(tmp_path: Path) -> None:
    """The peak memory of a process that does either is compared with the size of its state."""
    figures: list[dict[str, Any]] = []
    for action in ("write", "load"):
        ended = subprocess.run(
            [sys.executable, "-m", "tests.unit.snapshot_memory", action, str(tmp_path)],
            cwd=_MEASURED.parents[2], capture_output=True, text=True, check=True,
        )  # fmt: skip
        figures.append(dict(part.split("=") for part in ended.stdout.split()))
    for of_action in figures:
        assert int(of_action["peak"]) < 1.3 * int(of_action["state"]), figures

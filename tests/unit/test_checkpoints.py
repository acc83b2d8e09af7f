"""Checkpoints of large ledgers: parts are written once, and a failed write loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from coordinator.ledger.cleaning_rules import prunable_records
from coordinator.ledger.records import Committed, Record, RunStarted, ShardsAssigned, SnapshotAdded, Truncated
from coordinator.ledger.state_ledger import LeaseGrant, StateLedger
from coordinator.log.log_end import seal, unseal
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CorruptStateError, StorageUnavailableError
from coordinator.model.identities import StateStoreId
from coordinator.model.leases import Lease
from coordinator.runtime.runtime import Threads
from coordinator.storage.protocol import ObjectInfo
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import ROOT, actor, data_of, entry, snapshot_of
from tests.unit.observed_objects import ObservedObjectStore

SHARDS, PART = 8, 16


class LogObjects(ObservedObjectStore):
    """Objects whose puts outside the manifest may fail."""

    def __init__(self) -> None:
        super().__init__(self._fail_in_time)
        self.fails_after = 1_000_000

    def _fail_in_time(self, operation: str, path: str) -> None:
        if operation in ("put", "put_if_absent") and "/manifest/" not in path:
            if self.fails_after == 0:
                raise StorageUnavailableError("simulated: the store is away")
            self.fails_after -= 1

    def parts_put(self) -> list[str]:
        """Return the parts that were put since the last call."""
        parts = [path for operation, path in self.requests if operation.startswith("put") and "/parts/" in path]
        self.requests.clear()
        return parts


class LogWriter:
    """Commits on all shards, and checkpoints when asked."""

    def __init__(self, objects: LogObjects) -> None:
        self.objects = objects
        self.log = ManifestLog(objects, "clicks", "w", part_records=PART)
        self.ledger = self.log.load()
        self.version = self.ledger.newest_version(0)
        if not self.ledger.run_id:
            self.append([RunStarted("run-1", "query", 0, 1)])
            self.append([ShardsAssigned(shard, 2 + shard, actor("a"), "spread") for shard in range(SHARDS)])

    def append(self, records: list[Record]) -> None:
        self.log.append(records)
        for record in records:
            self.ledger.fold(record)

    def batches(self, count: int, shards: int = SHARDS) -> None:
        """Commit the next versions of the first shards."""
        for _ in range(count):
            self.version += 1
            self.append([self.commit(shard) for shard in range(shards)])

    def commit(self, shard: int) -> Committed:
        store_id = StateStoreId(ROOT, 0, shard)
        grant = LeaseGrant(Lease(store_id, "run-1", self.ledger.epoch, actor("a")), self.version - 1)
        return Committed(structs.replace(entry(grant, self.version), file=f"{shard}/{self.version}", rows_late=1))

    def cut(self, *shards: int, version: int | None = None) -> None:
        """Add snapshots of a version (default: the newest) of shards (default: all), and truncate the shards there."""
        for shard in shards or range(SHARDS):
            commit = self.ledger.entry_of(version or self.ledger.newest_version(shard), shard)
            assert commit is not None
            snapshot = snapshot_of(commit, f"{shard}/{commit.version}.s")
            self.append([SnapshotAdded(snapshot), Truncated(shard, "default", commit.version)])

    def checkpoint(self) -> dict[str, Any]:
        """Write a checkpoint, check that another coordinator reads the same ledger, and return the checkpoint's body."""
        self.log.write_checkpoint(self.log.plan_checkpoint(self.ledger))
        self.check()
        return unseal(self.objects.get(self.objects.list("clicks/checkpoints")[-1].path))

    def clean(self) -> set[str]:
        """Delete the records and parts that are not needed, and return their paths."""
        infos = self.objects.list("clicks")
        needed = self.log.needed(infos)
        pruned = {old.path for old in prunable_records(infos, needed.seq, needed.parts, math.inf, 0)}
        self.objects.delete_all(sorted(pruned))
        return pruned

    def check(self) -> None:
        for readers in (None, Threads().pool(4, "test")):
            log = ManifestLog(self.objects, "clicks", "r", part_records=PART, readers=readers)
            assert data_of(log.load()) == data_of(self.ledger)


def test_a_small_ledger_is_one_file() -> None:
    writer = LogWriter(LogObjects())
    writer.batches(1)
    body = writer.checkpoint()
    assert set(body) == {"format", "state", "state_id", "seq", "record_id", "folded"}
    assert len(body["folded"]["entries"]) == SHARDS
    assert writer.objects.list("clicks/parts") == []


def test_a_checkpoint_writes_only_new_records() -> None:
    writer = LogWriter(LogObjects())
    writer.batches(10)
    body = writer.checkpoint()
    assert [part["records"] for part in body["parts"]] == [PART] * 5
    assert (len(writer.objects.parts_put()), len(body["folded"]["entries"])) == (5, 0)
    writer.batches(3)
    next_body = writer.checkpoint()
    # Three batches of eight are a part and a half.
    assert next_body["parts"][:5] == body["parts"]
    assert (len(writer.objects.parts_put()), len(next_body["folded"]["entries"])) == (1, 8)
    # A successor keeps using the same parts.
    successor = LogWriter(writer.objects)
    successor.batches(1)
    assert successor.checkpoint()["parts"][:6] == next_body["parts"]
    assert len(writer.objects.parts_put()) == 1


def test_parts_are_dropped_from_the_front_once_all_their_versions_are_truncated() -> None:
    writer = LogWriter(LogObjects())
    writer.batches(10)
    first = writer.checkpoint()["parts"]
    writer.cut(*range(SHARDS - 1), version=6)
    assert writer.checkpoint()["parts"] == first
    writer.cut(SHARDS - 1, version=5)
    # A part has two versions: the parts of 1 and 2, and of 3 and 4, are not needed any more.
    assert writer.checkpoint()["parts"][:3] == first[2:]


def test_a_shard_without_new_versions_does_not_keep_all_records() -> None:
    writer = LogWriter(LogObjects())
    writer.batches(1)
    for _ in range(60):
        # The last shard gets no more versions, and its only version needs the first part.
        writer.batches(1, SHARDS - 1)
        writer.cut(*range(SHARDS - 1))
        body = writer.checkpoint()
        stored_records = sum(part["records"] for part in body.get("parts", ())) + len(body["folded"]["entries"])
        assert stored_records <= 2 * writer.ledger.size() + 2 * PART


@pytest.mark.parametrize("fails_after", range(8))
def test_a_checkpoint_that_fails_leaves_the_log_and_the_next_one_is_whole(fails_after: int) -> None:
    objects = LogObjects()
    writer = LogWriter(objects)
    writer.batches(4)
    writer.checkpoint()
    writer.batches(8)
    objects.fails_after = fails_after
    writer.log.write_checkpoint(writer.log.plan_checkpoint(writer.ledger))
    writer.check()
    objects.fails_after = 1_000_000
    writer.batches(1)
    body = writer.checkpoint()
    stored = {info.path for info in objects.list("clicks/parts")}
    assert {part["file"] for part in body["parts"]} <= stored


def test_without_a_part_the_checkpoint_before_is_read_and_records_after_it_are_not_pruned() -> None:
    writer = LogWriter(LogObjects())
    writer.batches(4)
    seqs = []
    for _ in range(3):
        writer.batches(4)
        writer.checkpoint()
        seqs.append(writer.log.seq)
    assert writer.log.needed(writer.objects.list("clicks")).seq == seqs[1]
    # As if a coordinator had slept before it wrote the checkpoint, and its parts were cleaned meanwhile.
    newest = unseal(writer.objects.get(f"clicks/checkpoints/{seqs[2]:020d}.json"))["parts"]
    writer.objects.delete(newest[-1]["file"])
    writer.check()
    assert writer.log.needed(writer.objects.list("clicks")).seq == seqs[0]
    writer.clean()
    writer.check()
    # Without the records either, the log is reported as corrupt.
    for info in writer.objects.list("clicks/manifest"):
        writer.objects.delete(info.path)
    with pytest.raises(CorruptStateError, match="parts/"):
        ManifestLog(writer.objects, "clicks", "r").load()


def test_parts_that_no_checkpoint_names_are_pruned_and_no_others() -> None:
    writer = LogWriter(LogObjects())
    for _ in range(6):
        writer.batches(4)
        writer.cut()
        writer.checkpoint()
    writer.objects.put("clicks/parts/00000000000000000001-x.json", b"of a coordinator that was killed")
    assert "clicks/parts/00000000000000000001-x.json" in writer.clean()
    writer.check()


OTHER_PARTS = [
    seal({"seq": 3, "ledger": StateLedger(ROOT).to_json(), "parts": parts}) for parts in (7, "text", [7], None, [{}])
]


@pytest.mark.parametrize("content", [*OTHER_PARTS, b"{"])
def test_a_checkpoint_without_usable_parts_or_json_is_named(content: bytes) -> None:
    store = MemoryObjectStore()
    path = "clicks/checkpoints/00000000000000000003.json"
    store.put(path, content)
    with pytest.raises(CorruptStateError, match=path):
        ManifestLog(store, "clicks", "w").load()


class CleansMeanwhile(LogObjects):
    """Objects of which another process deletes what is not needed any more, right after the records were listed."""

    def __init__(self) -> None:
        super().__init__()
        self.clean: Callable[[], None] | None = None

    def list(self, prefix: str) -> list[ObjectInfo]:
        infos = super().list(prefix)
        if prefix.endswith("manifest") and self.clean is not None:
            clean, self.clean = self.clean, None
            clean()
        return infos


def test_a_reader_that_is_overtaken_by_cleaning_reads_from_the_newer_checkpoint() -> None:
    objects = CleansMeanwhile()
    writer = LogWriter(objects)
    writer.batches(4)
    writer.checkpoint()

    def go_on_and_clean() -> None:
        for _ in range(2):
            writer.batches(1)
            writer.checkpoint()
        writer.clean()

    writer.batches(1)
    objects.clean = go_on_and_clean
    slow = ManifestLog(objects, "clicks", "r", part_records=PART)
    assert data_of(slow.load()) == data_of(writer.ledger)
    # A record that is missing without a newer checkpoint is an error.
    writer.batches(1)
    deleted = f"clicks/manifest/{writer.log.seq:020d}.json"
    writer.batches(1)
    objects.delete(deleted)
    with pytest.raises(CorruptStateError, match="manifest/"):
        slow.load()

"""Checkpoints of large ledgers: parts that are written once, and what is left when something of them fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.ledger.cleaning_rules import prunable_records
from coordinator.ledger.records import Committed, Record, RunStarted, ShardsAssigned, SnapshotAdded, Truncated
from coordinator.ledger.state_ledger import LeaseGrant, StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.log.sealed_json import seal, unseal
from coordinator.model.commits import SnapshotEntry
from coordinator.model.errors import CorruptStateError, StorageUnavailableError
from coordinator.model.identities import StateStoreId
from coordinator.model.leases import Lease
from coordinator.runtime.runtime import MachineThreads
from coordinator.storage.memory import MemoryObjectStore
from coordinator.storage.protocol import ObjectInfo
from tests.unit.ledger_harness import ROOT, actor, data_of, entry
from tests.unit.observed_objects import ObservedObjectStore

SHARDS, PART = 8, 16


class LogObjects(ObservedObjectStore):
    """LogObjects whose puts outside the manifest may fail."""

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

    def batch(self, shards: int = SHARDS, *, again: bool = False, run: str = "run-1") -> None:
        """A version of some shards, perhaps of that which is there."""
        self.version += not again
        self.append([self.commit(shard, run) for shard in range(shards)])

    def commit(self, shard: int, run: str) -> Committed:
        store_id = StateStoreId(ROOT, 0, shard)
        grant = LeaseGrant(Lease(store_id, run, self.ledger.epoch, actor("a")), self.version - 1)
        return Committed(replace(entry(grant, self.version), file=f"{shard}/{self.version}-{run}", rows_late=1))

    def cut(self, *shards: int, version: int | None = None) -> None:
        """A snapshot of a version of some shards (by default of the newest, and all), and nothing before it is retained."""
        for shard in shards or range(SHARDS):
            made = self.ledger.entry_of(version or self.ledger.newest_version(shard), shard)
            assert made is not None
            snapshot = SnapshotEntry(shard, made.version, made.attempt_id, f"{shard}/{made.version}.s", 1, 1, 1, 0, 0)
            self.append([SnapshotAdded(snapshot), Truncated(shard, "default", made.version)])

    def checkpoint(self) -> dict[str, Any]:
        """Write one, and read all back by another coordinator."""
        self.log.write_checkpoint(self.log.plan_checkpoint(self.ledger))
        self.check()
        return unseal(self.objects.get(self.objects.list("clicks/checkpoints")[-1].path))

    def check(self) -> None:
        for readers in (None, MachineThreads().pool(4, "test")):
            log = ManifestLog(self.objects, "clicks", "r", part_records=PART, readers=readers)
            assert data_of(log.load()) == data_of(self.ledger)


def test_a_small_ledger_is_one_file() -> None:
    writer = LogWriter(LogObjects())
    writer.batch()
    body = writer.checkpoint()
    assert set(body) == {"format", "state", "state_id", "seq", "record_id", "folded"}
    assert len(body["folded"]["entries"]) == SHARDS
    assert writer.objects.list("clicks/parts") == []


def test_a_checkpoint_writes_what_is_new_only() -> None:
    writer = LogWriter(LogObjects())
    for _ in range(10):
        writer.batch()
    body = writer.checkpoint()
    assert [part["records"] for part in body["parts"]] == [PART] * 5
    assert (len(writer.objects.parts_put()), len(body["folded"]["entries"])) == (5, 0)
    for _ in range(3):
        writer.batch()
    again = writer.checkpoint()
    # Three batches of eight are a part and a half.
    assert again["parts"][:5] == body["parts"]
    assert (len(writer.objects.parts_put()), len(again["folded"]["entries"])) == (1, 8)
    # Whoever takes over goes on with the same parts.
    successor = LogWriter(writer.objects)
    successor.batch()
    assert successor.checkpoint()["parts"][:6] == again["parts"]
    assert len(writer.objects.parts_put()) == 1


def test_parts_go_from_the_front_once_all_of_them_is_below_the_floors() -> None:
    writer = LogWriter(LogObjects())
    for _ in range(10):
        writer.batch()
    first = writer.checkpoint()["parts"]
    writer.cut(*range(SHARDS - 1), version=6)
    assert writer.checkpoint()["parts"] == first
    writer.cut(SHARDS - 1, version=5)
    # A part has two versions: those of 1 and 2, and of 3 and 4, are of no use any more.
    assert writer.checkpoint()["parts"][:3] == first[2:]


def test_what_was_superseded_does_not_come_back_from_a_part() -> None:
    writer = LogWriter(LogObjects())
    for _ in range(6):
        writer.batch()
    writer.cut()
    writer.checkpoint()
    # A new run replays the newest version of some shards; then of the others, after another checkpoint.
    writer.append([RunStarted("run-2", "query", 5, writer.ledger.epoch + 1)])
    writer.append([writer.commit(shard, "run-2") for shard in range(3)])
    writer.checkpoint()
    writer.append([writer.commit(shard, "run-2") for shard in range(3, SHARDS)])
    body = writer.checkpoint()
    counted = {writer.ledger.newest(shard).run_id for shard in range(SHARDS)}  # type: ignore[union-attr]
    assert counted == {"run-2"}
    assert set(writer.ledger.referenced_files()) == {f"{shard}/6-run-2" for shard in range(SHARDS)}
    assert "parts" not in body


def test_a_shard_that_stands_still_does_not_keep_all_that_was_ever_written() -> None:
    writer = LogWriter(LogObjects())
    writer.batch()
    for _ in range(60):
        # The last shard has no more versions, and its only one holds the first part.
        writer.batch(SHARDS - 1)
        writer.cut(*range(SHARDS - 1))
        body = writer.checkpoint()
        held = sum(part["records"] for part in body.get("parts", ())) + len(body["folded"]["entries"])
        assert held <= 2 * writer.ledger.size() + 2 * PART


@pytest.mark.parametrize("fails_after", range(8))
def test_a_checkpoint_that_fails_leaves_the_log_and_the_next_one_is_whole(fails_after: int) -> None:
    objects = LogObjects()
    writer = LogWriter(objects)
    for _ in range(4):
        writer.batch()
    writer.checkpoint()
    for _ in range(8):
        writer.batch()
    objects.fails_after = fails_after
    writer.log.write_checkpoint(writer.log.plan_checkpoint(writer.ledger))
    writer.check()
    objects.fails_after = 1_000_000
    writer.batch()
    body = writer.checkpoint()
    there = {info.path for info in objects.list("clicks/parts")}
    assert {part["file"] for part in body["parts"]} <= there


def test_without_a_part_the_checkpoint_before_is_read_and_records_after_it_are_not_pruned() -> None:
    writer = LogWriter(LogObjects())
    for _ in range(4):
        writer.batch()
    seqs = []
    for _ in range(3):
        for _ in range(4):
            writer.batch()
        writer.checkpoint()
        seqs.append(writer.log.seq)
    infos = writer.objects.list("clicks")
    assert writer.log.needed(infos).seq == seqs[1]
    # As if a coordinator had slept before it named its parts, which were cleaned away meanwhile.
    newest = unseal(writer.objects.get(f"clicks/checkpoints/{seqs[2]:020d}.json"))["parts"]
    writer.objects.delete(newest[-1]["file"])
    writer.check()
    infos = writer.objects.list("clicks")
    needed = writer.log.needed(infos)
    assert needed.seq == seqs[0]
    for old in prunable_records(infos, needed.seq, needed.parts, math.inf, 0):
        writer.objects.delete(old.path)
    writer.check()
    # Without the records either, nobody makes up what was there.
    for info in writer.objects.list("clicks/manifest"):
        writer.objects.delete(info.path)
    with pytest.raises(CorruptStateError, match="parts/"):
        ManifestLog(writer.objects, "clicks", "r").load()


def test_parts_that_no_checkpoint_names_are_pruned_and_no_others() -> None:
    writer = LogWriter(LogObjects())
    for _ in range(6):
        for _ in range(4):
            writer.batch()
        writer.cut()
        writer.checkpoint()
    writer.objects.put("clicks/parts/00000000000000000001-x.json", b"of a coordinator that was killed")
    infos = writer.objects.list("clicks")
    needed = writer.log.needed(infos)
    gone = {one.path for one in prunable_records(infos, needed.seq, needed.parts, math.inf, 0)}
    assert "clicks/parts/00000000000000000001-x.json" in gone
    for path in gone:
        writer.objects.delete(path)
    writer.check()


def test_a_checkpoint_that_was_on_its_way_when_the_log_was_read_anew_does_no_harm() -> None:
    objects = LogObjects()
    writer = LogWriter(objects)
    for _ in range(4):
        writer.batch()
    plan = writer.log.plan_checkpoint(writer.ledger)
    writer.batch()
    # Another coordinator's record made this one read the log again, while its checkpoint was still being written.
    writer.ledger = writer.log.load()
    writer.log.write_checkpoint(plan)
    for _ in range(3):
        writer.batch()
    writer.checkpoint()


def test_a_checkpoint_of_another_coordinator_at_the_same_place_is_left_as_it_is() -> None:
    objects = LogObjects()
    first, second = LogWriter(objects), None
    for _ in range(4):
        first.batch()
    second = LogWriter(objects)
    first.checkpoint()
    body = second.checkpoint()
    for one in (first, second):
        assert data_of(one.ledger) == data_of(first.ledger)
    assert {part["file"] for part in body["parts"]} <= set(objects.parts_put())
    first.batch()
    first.checkpoint()


@pytest.mark.parametrize("damage", [7, "text", [7], None, [{}]])
def test_parts_that_are_none_are_named(damage: object) -> None:
    store = MemoryObjectStore()
    path = "clicks/checkpoints/00000000000000000003.json"
    store.put(path, seal({"seq": 3, "ledger": StateLedger(ROOT).to_json(), "parts": damage}))
    with pytest.raises(CorruptStateError, match=path):
        ManifestLog(store, "clicks", "w").load()


class CleansMeanwhile(LogObjects):
    """LogObjects of which others clean away what is needed no more, once somebody has listed the records."""

    def __init__(self) -> None:
        super().__init__()
        self.clean: Callable[[], None] | None = None

    def list(self, prefix: str) -> list[ObjectInfo]:
        found = super().list(prefix)
        if prefix.endswith("manifest") and self.clean is not None:
            clean, self.clean = self.clean, None
            clean()
        return found


def test_a_reader_that_is_overtaken_by_cleaning_reads_from_the_newer_checkpoint() -> None:
    objects = CleansMeanwhile()
    writer = LogWriter(objects)
    for _ in range(4):
        writer.batch()
    writer.checkpoint()

    def go_on_and_clean() -> None:
        for _ in range(2):
            writer.batch()
            writer.checkpoint()
        infos = objects.list("clicks")
        needed = writer.log.needed(infos)
        for old in prunable_records(infos, needed.seq, needed.parts, math.inf, 0):
            objects.delete(old.path)

    writer.batch()
    objects.clean = go_on_and_clean
    slow = ManifestLog(objects, "clicks", "r", part_records=PART)
    assert data_of(slow.load()) == data_of(writer.ledger)
    # What is missing though nobody has gone on is missing.
    writer.batch()
    lost = f"clicks/manifest/{writer.log.seq:020d}.json"
    writer.batch()
    objects.delete(lost)
    with pytest.raises(CorruptStateError, match="manifest/"):
        slow.load()

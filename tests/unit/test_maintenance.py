"""Snapshots, retention, recovery and cleaning, on a real ledger and store over objects in memory; no Ray."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coordinator.ledger.cleaning_rules import orphans, prunable_records
from coordinator.ledger.records import Record, RunStarted
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.cleaner import Cleaner
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import SnapshotEntry
from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan, LoadPlans
from coordinator.model.maintenance import Maintenance
from coordinator.storage.protocol import ObjectInfo
from tests.clocks import LaterClock
from tests.memory_store import MemoryObjectStore
from tests.stored_shards import stored_rows
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, counts, filled

SHARD = StateStoreId("memory:///s", 0, 0)


def files(fleet: AggregationFleet, suffix: str) -> list[str]:
    return [info.path for info in fleet.objects.list("s/0") if info.path.endswith(suffix)]


def restarted(fleet: AggregationFleet) -> AggregationFleet:
    fleet.store = fleet.new_store()
    return fleet


def test_a_snapshot_is_written_once_enough_deltas_have_piled_up() -> None:
    fleet = AggregationFleet()
    for batch in range(7):
        fleet.apply(batch, "a")
        fleet.store.partitions.maintain(3)
    assert [int(path.split("/")[-1].split("-")[0]) for path in files(fleet, ".snapshot")] == [3, 6]
    assert restarted(fleet).apply(7, "a") == {"a": 8}
    assert (fleet.store.metrics.snapshots_loaded, fleet.store.metrics.deltas_loaded) == (1, 1)


def test_a_damaged_delta_is_named_with_what_can_still_be_read() -> None:
    fleet = filled(6, (2,))
    (delta,) = [path for path in files(fleet, ".delta") if "/4-" in path]
    fleet.objects.put(delta, b"PAR1" + fleet.objects.get(delta)[4:])
    with pytest.raises(CorruptStateError, match=rf"{delta}.*partition=`0` version=`4` readable_up_to_version=`3`"):
        stored_rows(fleet.store, SHARD, 6, SCHEMA)
    assert counts(stored_rows(fleet.store, SHARD, 3, SCHEMA)) == {"a": 3, "b": 1}


def test_a_shard_whose_snapshot_fails_by_any_error_is_reported_and_the_others_get_theirs() -> None:
    fleet = AggregationFleet()
    for shard in range(3):
        fleet.apply(0, "a", shard=shard)
    (_, (_, broken), _) = fleet.store.partitions.cache.items()
    shard = broken.stores["default"]
    frozen, shard.frozen = shard.frozen, unforeseen  # type: ignore[method-assign]
    fleet.store.partitions.maintain(1)
    assert [path.split("/")[2] for path in files(fleet, ".snapshot")] == ["0", "2"]
    assert fleet.store.metrics.maintenance_failures == 1
    assert fleet.store.metrics.failing == {"s/0/1": "ZeroDivisionError: unforeseen"}
    shard.frozen = frozen  # type: ignore[method-assign]
    fleet.store.partitions.maintain(1)
    assert [path.split("/")[2] for path in files(fleet, ".snapshot")] == ["0", "1", "2"]
    assert fleet.store.metrics.failing == {}


def unforeseen() -> Any:
    raise ZeroDivisionError("unforeseen")


def test_the_location_of_a_states_shards_is_requested_once_a_round() -> None:
    fleet = AggregationFleet()
    for shard in range(5):
        fleet.apply(0, "a", shard=shard)
    fleet.store.partitions.maintain(99)
    assert fleet.coordinator.calls["reassigned"] == 1
    fleet.coordinator.is_elsewhere = True
    fleet.store.partitions.maintain(99)
    assert (fleet.store.loaded(), fleet.coordinator.calls["reassigned"]) == ([], 2)


# -- cleaning ------------------------------------------------------------------------------------------------------


def info(path: str, age_s: float) -> ObjectInfo:
    return ObjectInfo(path, 1, 10_000 - age_s)


def test_only_old_unneeded_data_files_are_orphans() -> None:
    infos = [
        info("s/0/1/3-aa.delta", 500),
        info("s/0/1/3-bb.delta", 500),
        info("s/0/1/names/3-bb.snapshot", 500),
        info("s/0/1/4-cc.delta", 5),
        info("s/0/1/5-dd.snapshot", 500),
        info("s/metadata.json", 500),
        info("s/notes-of-a-user.txt", 500),
    ]
    orphaned = orphans(infos, {"s/0/1/3-aa.delta", "s/0/1/5-dd.snapshot"}, 10_000, 100)
    assert [file.path for file in orphaned] == ["s/0/1/3-bb.delta", "s/0/1/names/3-bb.snapshot"]


def test_records_are_needed_from_the_second_newest_checkpoint_on() -> None:
    infos = [info(f"s/manifest/{seq:020d}.json", 500) for seq in range(1, 200)]
    infos += [info(f"s/parts/{64:020d}-{name}.json", age) for name, age in (("a", 500), ("b", 500), ("c", 5))]
    checkpoints = [info(f"s/checkpoints/{seq:020d}.json", 500) for seq in (64, 128, 192)]
    kept = {f"s/parts/{64:020d}-a.json"}
    pruned_paths = {file.path for file in prunable_records([*infos, *checkpoints], 128, kept, 10_000, 100)}
    assert pruned_paths == {file.path for file in infos[:128]} | {checkpoints[0].path, f"s/parts/{64:020d}-b.json"}
    assert prunable_records([*infos, *checkpoints], 128, kept, 10_000, 1000) == []
    assert prunable_records([*infos, *checkpoints], 0, {file.path for file in infos}, 10_000, 100) == []


def pruned(store: MemoryObjectStore) -> list[ObjectInfo]:
    """Return the files of a state's log that cleaning would remove if all of it were old."""
    infos = store.list("s")
    needed = ManifestLog(store, "s", "cleaner").needed(infos)
    return prunable_records(infos, needed.seq, needed.parts, time.time(), 0)


# -- a coordinator that slept --------------------------------------------------------------------------------------


def test_pinned_files_are_let_go_after_their_time() -> None:
    async def nothing(_: str) -> Any:
        raise AssertionError("no state is looked at")

    clock = LaterClock()
    cleaner = Cleaner(MemoryObjectStore(), Maintenance(grace_s=60), clock, nothing, nothing)
    for file, at_s in (("a", 100), ("b", 130)):
        clock.later_s = at_s
        snapshot = SnapshotEntry(0, 1, "attempt", file, 1, 0, 1, 0, 0)
        cleaner.pin(LoadPlans("attempt", {"default": LoadPlan((snapshot,), (), 1)}))
    clock.later_s = 150
    assert cleaner._pinned() == {"a", "b"}
    clock.later_s = 170
    assert cleaner._pinned() == {"b"}


async def test_a_coordinator_that_slept_reads_the_log_before_it_answers_or_appends() -> None:
    store = MemoryObjectStore()
    clock = LaterClock()

    def bump(ledger: StateLedger) -> tuple[list[Record], int]:
        return [RunStarted(f"r{ledger.epoch}", "q", 0, ledger.epoch + 1)], ledger.epoch + 1

    sleeper = LedgerWriter(ManifestLog(store, "s", "sleeper"), max_age_s=100, clock=clock)
    await sleeper.open()
    assert await sleeper.decide(bump) == 1
    successor = LedgerWriter(ManifestLog(store, "s", "successor"), max_age_s=100, clock=clock)
    await successor.open()
    for _ in range(130):
        await successor.decide(bump)
    # An answer without an append is current, too.
    assert await sleeper.read(lambda ledger: ledger.epoch) == 131
    for _ in range(130):
        await successor.decide(bump)
    clock.later_s = 1000.0
    # Its next sequence number was used and cleaned: a record appended there would be accepted and never read.
    for old in pruned(store):
        store.delete(old.path)
    assert await sleeper.decide(bump) == 262
    fresh = LedgerWriter(ManifestLog(store, "s", "fresh"), clock=clock)
    await fresh.open()
    assert fresh.ledger is not None
    assert fresh.ledger.epoch == 262


class Slow(MemoryObjectStore):
    """Every record that is read takes 10 s of a clock's time."""

    def __init__(self, clock: LaterClock) -> None:
        super().__init__()
        self._clock, self.lists = clock, 0

    def get(self, path: str) -> bytes:
        self._clock.later_s += 10
        return super().get(path)

    def list(self, prefix: str) -> list[ObjectInfo]:
        self.lists += prefix == "s/manifest"
        return super().list(prefix)


async def test_a_log_that_takes_longer_to_read_than_a_ledger_may_be_old_is_read_once() -> None:
    clock = LaterClock()
    store = Slow(clock)

    def bump(ledger: StateLedger) -> tuple[list[Record], int]:
        return [RunStarted(f"r{ledger.epoch}", "q", 0, ledger.epoch + 1)], ledger.epoch + 1

    writer = LedgerWriter(ManifestLog(store, "s", "writer"), max_age_s=100, clock=clock)
    await writer.open()
    for _ in range(20):
        await writer.decide(bump)
    slow = LedgerWriter(ManifestLog(store, "s", "slow"), max_age_s=100, clock=clock)
    store.lists = 0
    assert await slow.decide(bump) == 21
    assert await slow.read(lambda ledger: ledger.epoch) == 21
    assert store.lists == 1
    # A ledger that fell behind the cleaned log is read again before an append or an answer.
    for _ in range(120):
        await writer.decide(bump)
    clock.later_s += 1000
    for old in pruned(store):
        store.delete(old.path)
    assert await slow.read(lambda ledger: ledger.epoch) == 141

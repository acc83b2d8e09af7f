"""A ledger that carries out its decisions at once, and builders of leases and commits for its tests."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import structs

from coordinator.ledger.records import Record, recorded
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import LeaseGrant, StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.stored_json import from_json
from coordinator.placement.lease_plans import stay_else_local
from tests.memory_store import MemoryObjectStore

ROOT = "memory:///clicks"
#: Shards of a query (:class:`LedgerQuery`).
SHARDS = 3


def actor(name: str, life: str = "1") -> ActorLocation:
    return ActorLocation(name, f"{name}-{life}", f"node-{name}", "host", 1)


def task(run: str = "run-1", batch: int = 0, shard: int = 0, query: str = "query") -> TaskIdentity:
    return TaskIdentity("clicks", query, run, batch, shard, 0, "executor")


def entry(grant: LeaseGrant, version: int, attempt: str = "attempt") -> CommitEntry:
    return CommitEntry(
        partition_id=grant.lease.store_id.partition_id,
        version=version,
        base_version=grant.base_version,
        epoch=grant.lease.epoch,
        run_id=grant.lease.run_id,
        attempt_id=f"{attempt}-{grant.lease.run_id}-{version}",
        file=f"file-{version}",
        file_bytes=1,
        checksum=2,
        delta_rows=3,
        rows_updated=3,
        rows_removed=0,
        state_rows=3,
        state_bytes=4,
        rows_in=5,
        rows_late=0,
        watermark_ms=0,
        committed_at_ms=version,
    )


def snapshot_of(commit: CommitEntry, file: str) -> SnapshotEntry:
    return SnapshotEntry(
        commit.partition_id,
        commit.version,
        commit.attempt_id,
        file,
        1,
        2,
        3,
        0,
        commit.committed_at_ms,
        commit.store_name,
    )


def through_json(record: Record) -> Record:
    """Return a record as the log gives it back, by way of JSON."""
    return from_json(json.loads(msgspec.json.encode(recorded(record))), Record)


class FakeFleetView:
    """A fleet that only knows which store actors are lost."""

    def __init__(self, lost: Collection[str] = ()) -> None:
        self._lost = lost

    def is_alive(self, location: ActorLocation) -> bool:
        return location.instance_id not in self._lost

    def actors(self) -> Collection[ActorLocation]:
        raise AssertionError("today's rule does not ask")

    def load(self, location: ActorLocation) -> int:
        raise AssertionError("today's rule does not ask")


class LedgerHarness:
    """A ledger whose decisions are carried out at once."""

    def __init__(self) -> None:
        self.ledger = StateLedger(ROOT)
        self.lost: set[str] = set()

    def lease(self, identity: TaskIdentity, local: ActorLocation) -> LeaseGrant:
        records, grant = self.ledger.decide_lease(identity, local, FakeFleetView(self.lost), stay_else_local)
        for record in records:
            self.ledger.fold(through_json(record))
        return grant

    def commit(self, committed: CommitEntry) -> CommitEntry:
        records, (accepted,) = self.ledger.decide_commits([committed])
        for record in records:
            self.ledger.fold(through_json(record))
        return accepted


class LedgerQuery(LedgerHarness):
    """A query of three shards; batch `b` is planned at time ``100 + b`` of its own history."""

    def __init__(self, begins_ms: int = 100) -> None:
        super().__init__()
        self.begins_ms = begins_ms

    def task(self, batch: int, shard: int, run: str = "run-1", begins_ms: int | None = None) -> TaskIdentity:
        begin_ms = self.begins_ms if begins_ms is None else begins_ms
        previous_ms = begin_ms + batch - 1 if batch else None
        return structs.replace(task(run, batch, shard), batch_time_ms=begin_ms + batch, former_time_ms=previous_ms)

    def begin(self, identity: TaskIdentity) -> None:
        self.ledger.check_whole(identity, ShardLayout(SHARDS))

    def run(self, batch: int, shards: list[int], run: str = "run-1") -> None:
        for shard in shards:
            identity = self.task(batch, shard, run)
            self.begin(identity)
            commit = entry(self.lease(identity, actor("a")), batch + 1)
            self.commit(structs.replace(commit, batch_time_ms=identity.batch_time_ms))


async def open_writer(store: MemoryObjectStore, writer: str = "w") -> LedgerWriter:
    ledger_writer = LedgerWriter(ManifestLog(store, "clicks", writer))
    await ledger_writer.open()
    return ledger_writer


def data_of(ledger: StateLedger) -> dict[str, Any]:
    """Return a ledger as JSON data, with the shards in a fixed order."""
    data = json.loads(json.dumps(ledger.to_json()))
    for name in ("entries", "snapshots"):
        data[name].sort(key=lambda entry: (entry["partition_id"], entry["store_name"]))
    for name in ("floors", "late_before"):
        data[name].sort()
    return data


ENTRY = CommitEntry(0, 1, 0, 1, "run", "attempt", "file", 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0)

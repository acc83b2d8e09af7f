"""A ledger that carries out its decisions at once, and builders of leases and commits for its tests."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec

from coordinator.ledger.records import Record, recorded
from coordinator.ledger.state_ledger import LeaseGrant, StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry
from coordinator.model.identities import ActorLocation, TaskIdentity
from coordinator.model.stored_json import from_json
from coordinator.placement.lease_placer import stay_else_local
from coordinator.storage.memory import MemoryObjectStore

ROOT = "memory:///clicks"


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

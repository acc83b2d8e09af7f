"""Requests of one state that tests of the coordinator make."""

from __future__ import annotations

from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.commits import CommitEntry
from coordinator.model.state_metadata import StateMetadata
from coordinator.runtime.runtime import MachineClock, now_ms
from coordinator.service.coordinator import Coordinator
from tests.unit.ledger_harness import actor, entry, task

SHARDS = 4
METADATA = StateMetadata("clicks", "query", SHARDS, "keyed")


def commit_of(grant: LeaseGrant, version: int) -> CommitEntry:
    name = f"attempt-{grant.lease.store_id.partition_id}"
    return structs.replace(entry(grant, version, name), committed_at_ms=now_ms(MachineClock()))


async def lease_all_shards(coordinator: Coordinator, run_id: str = "run-1", batch: int = 0) -> list[LeaseGrant]:
    """Return the leases of the tasks of all shards."""
    return [
        await coordinator.attach_and_lease(task(run_id, batch, shard=shard), METADATA, actor("a"))
        for shard in range(SHARDS)
    ]

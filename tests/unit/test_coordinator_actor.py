"""The coordinator's shell without Ray: what it makes of several calls, and what a restart forgets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator.actor import Coordinator
from coordinator.model import Maintenance, StateMetadata, StateStoreProviderId
from coordinator.storage.memory import MemoryObjectStore
from coordinator.surroundings import MachineClock, now_ms
from tests.unit.test_coordinator import actor, entry, task

METADATA = StateMetadata("clicks", "query", 4, "keyed", {})


def coordinator_over(store: MemoryObjectStore) -> Coordinator:
    return Coordinator("memory://", store, Maintenance(), "node")


async def leased(coordinator: Coordinator, partition: int, name: str) -> StateStoreProviderId:
    """A shard that a store actor was given, and has committed."""
    grant = await coordinator.attach_and_lease(task(shard=partition), METADATA, actor(name))
    await coordinator.commit_all(
        "clicks", [replace(entry(grant, 1, f"attempt-{partition}"), committed_at_ms=now_ms(MachineClock()))]
    )
    return StateStoreProviderId(grant.lease.store_id, "run-1")


def test_a_restarted_coordinator_has_no_shard_unloaded_that_is_still_leased_to_who_reports_it() -> None:
    store = MemoryObjectStore()

    async def scenario() -> None:
        first = coordinator_over(store)
        mine = [await leased(first, partition, "a") for partition in (0, 1)]
        other = await leased(first, 2, "b")
        arriving = await leased(first, 3, "a")
        # Who reported what is forgotten; whom shards are leased to is in the log.
        again = coordinator_over(store)
        opened = await again.open_instance(arriving, actor("a"), [*mine, other], 1, ["default"])
        assert opened.stale == (other,)
        assert await again.verify_if_instance_active(mine[0], actor("a"))
        # A run that has ended needs its shards no more.
        ended = coordinator_over(store)
        await ended.deactivate_instances("run-1")
        assert (await ended.open_instance(arriving, actor("a"), mine, 1, ["default"])).stale == tuple(mine)

    asyncio.run(scenario())

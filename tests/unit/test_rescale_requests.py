"""The coordinator's answers about rescales: shards of batches, shard numbers and partition ids, and its state after a restart."""

from __future__ import annotations

import pytest
from msgspec import structs

from coordinator.ledger.state_ledger import AcceptedCommits
from coordinator.model.commits import PartitionCommit
from coordinator.model.errors import FencedError, InvalidRequestError
from coordinator.model.maintenance import Maintenance
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.policies import ActorSlot
from coordinator.runtime.runtime import MachineClock, now_ms
from coordinator.service.coordinator import Coordinator
from coordinator.storage.memory import MemoryObjectStore
from tests.unit.ledger_harness import actor, entry, task

SCHEMA = StateSchema((Field("k0", "string"),), (), (), None, None, "update")
METADATA = StateMetadata("clicks", "query", 2, "update", SCHEMA)


class RescaleHarness:
    """A coordinator, and a query whose batches all run on store actor ``a``."""

    def __init__(self) -> None:
        self.store = MemoryObjectStore()
        self.coordinator = self.restarted()

    def restarted(self) -> Coordinator:
        self.coordinator = Coordinator("memory://", self.store, Maintenance(), "node")
        return self.coordinator

    async def commit(self, run: str, batch: int, partition: int) -> None:
        grant = await self.coordinator.attach_and_lease(task(run, batch, partition), METADATA, actor("a"))
        commit = entry(grant, batch + 1, f"attempt-{partition}")
        commit = structs.replace(commit, committed_at_ms=now_ms(MachineClock()))
        (outcome,) = await self.coordinator.commit_partitions("clicks", [PartitionCommit((commit,))])
        assert isinstance(outcome, AcceptedCommits)

    async def batch(self, run: str, batch: int, shards: range) -> range:
        for partition in shards:
            await self.commit(run, batch, partition)
        result, placement, next_shards = await self.coordinator.batch_result(task(run, batch), shards)
        assert result.missing == ()
        assert len(placement.holders) == len(shards)
        return next_shards


async def test_a_state_that_does_not_exist_yet_has_the_shards_of_its_query() -> None:
    harness = RescaleHarness()
    assert await harness.coordinator.begin_batch(task(), 7, None) == range(7)
    assert await harness.coordinator.begin_batch(task(), 7, 7) == range(7)
    with pytest.raises(InvalidRequestError, match="no such state"):
        await harness.coordinator.rescale("clicks", 4, False)


async def test_a_run_begins_with_the_shards_that_it_requests_and_a_repeated_request_gets_the_same() -> None:
    harness = RescaleHarness()
    await harness.batch("run-1", 0, range(2))
    assert await harness.coordinator.begin_batch(task("run-2", 1), 2, None) == range(2)
    rescaled = await harness.coordinator.begin_batch(task("run-2", 1), 2, 3)
    assert rescaled == range(2, 5)
    assert await harness.coordinator.begin_batch(task("run-2", 1), 2, 3) == rescaled
    assert await harness.restarted().begin_batch(task("run-2", 1), 2, 3) == rescaled
    # Another run is not bound by it, nor does it get its partitions.
    assert await harness.coordinator.begin_batch(task("run-3", 1), 2, None) == range(2)
    assert await harness.coordinator.begin_batch(task("run-3", 1), 2, 3) == range(5, 8)
    assert (await harness.coordinator.describe_state("clicks")).num_shards == 2  # type: ignore[union-attr]
    assert await harness.batch("run-2", 1, rescaled) == rescaled
    assert (await harness.coordinator.describe_state("clicks")).num_shards == 3  # type: ignore[union-attr]
    with pytest.raises(FencedError, match="planned for other shards"):
        await harness.commit("run-2", 2, 0)


async def test_a_rescale_is_requested_during_a_run_and_outlives_the_coordinator() -> None:
    harness = RescaleHarness()
    first = range(2)
    await harness.batch("run-1", 0, first)
    for wrong, message in ((3, "by a factor"), (0, "from 1 to"), (1 << 16, "from 1 to")):
        with pytest.raises(InvalidRequestError, match=message):
            await harness.coordinator.rescale("clicks", wrong, False)
    plan = await harness.coordinator.rescale("clicks", 6, True)
    assert plan.sources == ((0,), (1,), (0,), (1,), (0,), (1,))
    assert await harness.batch("run-1", 1, first) == first, "it was a dry run"
    await harness.coordinator.rescale("clicks", 6, False)
    harness.restarted()
    next_shards = await harness.batch("run-1", 2, first)
    assert next_shards == range(2, 8)
    assert await harness.restarted().begin_batch(task("run-1", 3), 2, 2) == next_shards, (
        "the program's number only counts at its start"
    )
    assert await harness.batch("run-1", 3, next_shards) == next_shards
    await harness.coordinator.deactivate_instances("run-1")
    with pytest.raises(InvalidRequestError, match="no run of the state's query goes on"):
        await harness.coordinator.rescale("clicks", 3, False)


async def test_shards_are_reported_by_number_and_old_shards_are_unloaded_once_the_new_ones_have_committed() -> None:
    harness = RescaleHarness()
    await harness.batch("run-1", 0, range(2))
    shards = await harness.coordinator.begin_batch(task("run-2", 1), 2, 4)
    slots = [ActorSlot(actor(name), 2) for name in "ab"]
    for name in "ab":
        await harness.coordinator.report_store_actor(actor(name))
    placed = await harness.coordinator.place_shards("clicks", "query", shards, slots)
    assert sorted(holder.node_id for holder in placed.holders if holder) == ["node-a", "node-a", "node-b", "node-b"]
    assert placed.moves == ()
    for partition in (2, 3, 4):
        await harness.commit("run-2", 1, partition)
    assert await harness.coordinator.reassigned("clicks", "a", [0, 1]) == []
    await harness.commit("run-2", 1, 5)
    assert await harness.coordinator.reassigned("clicks", "a", [0, 1]) == [0, 1]
    located = await harness.coordinator.locate("clicks", 3)
    assert (located.store_id.partition_id, located.newest_version) == (5, 2)
    # A shard of an earlier version has the partition of that version's layout.
    assert (await harness.coordinator.locate("clicks", 1, 0)).store_id.partition_id == 1
    assert (await harness.coordinator.explain_placement("clicks", 3)).location is not None
    for wrong in (-1, 4):
        with pytest.raises(InvalidRequestError, match="no such shard"):
            await harness.coordinator.explain_placement("clicks", wrong)
    (query,) = (await harness.coordinator.status())["queries"]
    assert [shard["partition_id"] for shard in query["shards"]] == [0, 1, 2, 3]
    assert (query["num_shards"], query["version"]) == (4, 2)


async def test_moves_that_restore_a_plan_are_given_out_though_the_batch_rescales_the_state() -> None:
    harness = RescaleHarness()
    coordinator, shards = harness.coordinator, range(2)
    await coordinator.place_shards("clicks", "query", shards, [ActorSlot(actor(name), 1) for name in "ab"])
    await harness.batch("run", 0, shards)
    # A store actor is lost, its shard goes where its task runs, and then the store actor is back.
    await coordinator.report_store_actor_lost(actor("b").instance_id)
    for partition in shards:
        await harness.commit("run", 1, partition)
    await coordinator.report_store_actor(actor("b", life=2))
    await coordinator.rescale("clicks", 4, False)
    _, placement, next_shards = await coordinator.batch_result(task("run", 1), shards)
    assert len(next_shards) == 4
    assert [move.target for move in placement.moves] == [actor("b", life=2)]


async def test_a_state_without_keys_is_not_rescaled() -> None:
    harness = RescaleHarness()
    keyless = structs.replace(METADATA, num_shards=1, schema=structs.replace(SCHEMA, keys=()))
    grant = await harness.coordinator.attach_and_lease(task(), keyless, actor("a"))
    commit = structs.replace(entry(grant, 1), committed_at_ms=now_ms(MachineClock()))
    await harness.coordinator.commit_partitions("clicks", [PartitionCommit((commit,))])
    with pytest.raises(InvalidRequestError, match="one shard by nature"):
        await harness.coordinator.rescale("clicks", 2, False)
    assert await harness.coordinator.begin_batch(task("run-2", 1), 2, 2) == range(1)

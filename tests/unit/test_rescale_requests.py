"""The coordinator's answers about rescales: shards of batches, shard numbers and partition ids, and its state after a restart."""

from __future__ import annotations

import pytest
from msgspec import structs

from coordinator.model.errors import FencedError, InvalidRequestError
from coordinator.model.schema import Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.policies import ActorSlot
from tests.unit.ledger_harness import actor, task
from tests.unit.service_harness import QueriedCoordinator

SCHEMA = StateSchema((Field("k0", "string"),), (), (), None, None, "update")
METADATA = StateMetadata("clicks", "query", 2, "update", SCHEMA)


class RescaledCoordinator(QueriedCoordinator):
    """A coordinator, and a query whose batches all run on one store actor."""

    async def batch(self, run: str, batch: int, shards: range) -> range:
        for partition in shards:
            await self.commit(run, batch, shard=partition)
        result, placement, next_shards = await self.batch_result(task(run, batch), shards)
        assert result.missing == ()
        assert len(placement.holders) == len(shards)
        return next_shards


@pytest.fixture
def coordinator() -> RescaledCoordinator:
    return RescaledCoordinator(created=METADATA)


async def test_a_state_that_does_not_exist_yet_has_the_shards_of_its_query(coordinator: RescaledCoordinator) -> None:
    assert await coordinator.begin_batch(task(), 7, None) == range(7)
    assert await coordinator.begin_batch(task(), 7, 7) == range(7)
    with pytest.raises(InvalidRequestError, match="no such state"):
        await coordinator.rescale("clicks", 4, False)


async def test_a_run_begins_with_the_shards_that_it_requests_and_a_repeated_request_gets_the_same(
    coordinator: RescaledCoordinator,
) -> None:
    await coordinator.batch("run-1", 0, range(2))
    assert await coordinator.begin_batch(task("run-2", 1), 2, None) == range(2)
    rescaled = await coordinator.begin_batch(task("run-2", 1), 2, 3)
    assert rescaled == range(2, 5)
    assert await coordinator.begin_batch(task("run-2", 1), 2, 3) == rescaled
    coordinator = coordinator.restarted()
    assert await coordinator.begin_batch(task("run-2", 1), 2, 3) == rescaled
    # Another run is not bound by it, nor does it get its partitions.
    assert await coordinator.begin_batch(task("run-3", 1), 2, None) == range(2)
    assert await coordinator.begin_batch(task("run-3", 1), 2, 3) == range(5, 8)
    assert (await coordinator.describe_state("clicks")).num_shards == 2  # type: ignore[union-attr]
    assert await coordinator.batch("run-2", 1, rescaled) == rescaled
    assert (await coordinator.describe_state("clicks")).num_shards == 3  # type: ignore[union-attr]
    with pytest.raises(FencedError, match="planned for other shards"):
        await coordinator.commit("run-2", 2, shard=0)


async def test_a_rescale_is_requested_during_a_run_and_outlives_the_coordinator(
    coordinator: RescaledCoordinator,
) -> None:
    first = range(2)
    await coordinator.batch("run-1", 0, first)
    for wrong, message in ((3, "by a factor"), (0, "from 1 to"), (1 << 16, "from 1 to")):
        with pytest.raises(InvalidRequestError, match=message):
            await coordinator.rescale("clicks", wrong, False)
    plan = await coordinator.rescale("clicks", 6, True)
    assert plan.sources == ((0,), (1,), (0,), (1,), (0,), (1,))
    assert await coordinator.batch("run-1", 1, first) == first, "it was a dry run"
    await coordinator.rescale("clicks", 6, False)
    coordinator = coordinator.restarted()
    next_shards = await coordinator.batch("run-1", 2, first)
    assert next_shards == range(2, 8)
    coordinator = coordinator.restarted()
    assert await coordinator.begin_batch(task("run-1", 3), 2, 2) == next_shards, (
        "the program's number only counts at its start"
    )
    assert await coordinator.batch("run-1", 3, next_shards) == next_shards
    await coordinator.deactivate_instances("run-1")
    with pytest.raises(InvalidRequestError, match="no run of the state's query goes on"):
        await coordinator.rescale("clicks", 3, False)


async def test_shards_are_reported_by_number_and_old_shards_are_unloaded_once_the_new_ones_have_committed(
    coordinator: RescaledCoordinator,
) -> None:
    await coordinator.batch("run-1", 0, range(2))
    shards = await coordinator.begin_batch(task("run-2", 1), 2, 4)
    slots = [ActorSlot(actor(name), 2) for name in "ab"]
    for name in "ab":
        await coordinator.report_store_actor(actor(name))
    placed = await coordinator.place_shards("clicks", "query", shards, slots)
    assert sorted(holder.node_id for holder in placed.holders if holder) == ["node-a", "node-a", "node-b", "node-b"]
    assert placed.moves == ()
    for partition in (2, 3, 4):
        await coordinator.commit("run-2", 1, shard=partition)
    assert await coordinator.reassigned("clicks", "a", [0, 1]) == []
    await coordinator.commit("run-2", 1, shard=5)
    assert await coordinator.reassigned("clicks", "a", [0, 1]) == [0, 1]
    located = await coordinator.locate("clicks", 3)
    assert (located.store_id.partition_id, located.newest_version) == (5, 2)
    # A shard of an earlier version has the partition of that version's layout.
    assert (await coordinator.locate("clicks", 1, 0)).store_id.partition_id == 1
    assert (await coordinator.explain_placement("clicks", 3)).location is not None
    for wrong in (-1, 4):
        with pytest.raises(InvalidRequestError, match="no such shard"):
            await coordinator.explain_placement("clicks", wrong)
    (query,) = (await coordinator.status())["queries"]
    assert [shard["partition_id"] for shard in query["shards"]] == [0, 1, 2, 3]
    assert (query["num_shards"], query["version"]) == (4, 2)


async def test_moves_that_restore_a_plan_are_given_out_though_the_batch_rescales_the_state(
    coordinator: RescaledCoordinator,
) -> None:
    shards = range(2)
    await coordinator.place_shards("clicks", "query", shards, [ActorSlot(actor(name), 1) for name in "ab"])
    await coordinator.batch("run", 0, shards)
    # A store actor is lost, its shard goes where its task runs, and then the store actor is back.
    await coordinator.report_store_actor_lost(actor("b").instance_id)
    for partition in shards:
        await coordinator.commit("run", 1, shard=partition)
    await coordinator.report_store_actor(actor("b", life=2))
    await coordinator.rescale("clicks", 4, False)
    _, placement, next_shards = await coordinator.batch_result(task("run", 1), shards)
    assert len(next_shards) == 4
    assert [move.target for move in placement.moves] == [actor("b", life=2)]


async def test_a_state_without_keys_is_not_rescaled(coordinator: RescaledCoordinator) -> None:
    keyless = structs.replace(METADATA, num_shards=1, schema=structs.replace(SCHEMA, keys=()))
    await coordinator.commit(created=keyless)
    with pytest.raises(InvalidRequestError, match="one shard by nature"):
        await coordinator.rescale("clicks", 2, False)
    assert await coordinator.begin_batch(task("run-2", 1), 2, 2) == range(1)

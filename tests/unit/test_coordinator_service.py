"""The coordinator's service without Ray: answers to several calls, and what a restart forgets."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from msgspec import structs

from coordinator.model.errors import CorruptStateError, InvalidRequestError
from coordinator.model.identities import StateStoreId, StateStoreProviderId
from coordinator.model.maintenance import Maintenance
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.policies import ActorSlot
from coordinator.telemetry.drivers import DriverReport, ExecutorState, LongBatch
from tests.memory_store import MemoryObjectStore
from tests.unit.ledger_harness import ROOT, actor
from tests.unit.observed_objects import ObservedObjectStore
from tests.unit.service_harness import METADATA, QueriedCoordinator


def coordinator_over(objects: MemoryObjectStore) -> QueriedCoordinator:
    return QueriedCoordinator(objects, created=METADATA)


@pytest.fixture
def coordinator() -> QueriedCoordinator:
    return coordinator_over(MemoryObjectStore())


async def leased(coordinator: QueriedCoordinator, partition: int, name: str) -> StateStoreProviderId:
    """Lease a shard to a store actor, commit its first version, and return its provider id."""
    await coordinator.commit(shard=partition, at=actor(name))
    return StateStoreProviderId(StateStoreId(ROOT, 0, partition), "run-1")


async def test_a_restarted_coordinator_unloads_no_shard_that_is_still_leased_to_the_reporting_actor(
    coordinator: QueriedCoordinator,
) -> None:
    reported = [await leased(coordinator, partition, "a") for partition in (0, 1)]
    of_another_actor = await leased(coordinator, 2, "b")
    arriving = await leased(coordinator, 3, "a")
    # A restart forgets who reported what; the leases of shards are in the log.
    restarted = coordinator.restarted()
    opened = await restarted.open_instance(arriving, actor("a"), [*reported, of_another_actor], 1, ["default"])
    assert opened.stale == (of_another_actor,)
    assert restarted._instances.location(reported[0]) == actor("a")
    # A run that has ended does not need its shards any more.
    ended = coordinator.restarted()
    await ended.deactivate_instances("run-1")
    assert (await ended.open_instance(arriving, actor("a"), reported, 1, ["default"])).stale == tuple(reported)


async def test_a_driver_reports_executors_and_a_long_batch_and_both_are_shown_until_they_are_over(
    coordinator: QueriedCoordinator,
) -> None:
    for shard in range(4):
        await leased(coordinator, shard, "a")
    lost = ExecutorState("2", "10.0.0.7", 1, "killed")
    report = DriverReport("app", (lost,), ("run-1",), (LongBatch("run-1", 1, 5000, "2 tasks run"),), (("run-1", 300),))
    await coordinator.report_driver(report)
    status, watched = await coordinator.status(), await coordinator.status_details()
    assert [(executor["executor_id"], executor["alive"]) for executor in status["executors"]] == [("2", False)]
    assert watched["executors"] == status["executors"]
    running = watched["running"]["clicks"]
    assert status["queries"][0]["running_batch"] == running
    said = "executor 2 on 10.0.0.7 was lost at 00:00:00 UTC; 2 tasks run; not committed yet by 4 of 4 shards"
    assert said in running["text"]
    names = {sample.name: sample.value for sample in await coordinator.samples()}
    assert (names["statefleet_executors_lost_total"], names["statefleet_batch_overdue_seconds"]) == (1, 0)
    assert names["statefleet_behind_records"] == status["queries"][0]["behind_records"] == 300
    assert watched["behind_records"] == {"clicks": 300}
    await coordinator.report_driver(replace(report, batches=(), behind=()))
    watched = await coordinator.status_details()
    assert (watched["running"], watched["behind_records"]) == ({}, {})
    assert "statefleet_behind_records" not in {sample.name for sample in await coordinator.samples()}


async def test_a_node_that_is_drained_is_the_reason_and_not_that_it_has_no_executor(
    coordinator: QueriedCoordinator,
) -> None:
    for shard, name in enumerate("aabb"):
        await coordinator.report_store_actor(actor(name))
        await leased(coordinator, shard, name)
    moves = await coordinator.drain(actor("a").node_id, True)
    assert {move.reason for move in moves} == {"the node that had it is drained"}
    assert len(moves) == 2


async def test_partitions_that_are_leased_to_another_store_actor_are_returned_in_one_answer(
    coordinator: QueriedCoordinator,
) -> None:
    for partition, name in ((0, "a"), (1, "b"), (2, "b")):
        await leased(coordinator, partition, name)
    assert await coordinator.reassigned("clicks", "a", [0, 1, 2, 3]) == [1, 2]
    assert await coordinator.reassigned("clicks", "b", [0, 1]) == [0]


async def test_instances_of_a_killed_drivers_run_are_forgotten_once_another_run_has_the_state(
    coordinator: QueriedCoordinator,
) -> None:
    killed = await leased(coordinator, 0, "a")
    await coordinator._instances.report(killed, actor("a"), [])
    await coordinator.lease("run-2")
    assert coordinator._instances.location(killed) is None
    # Also when its instance is checked: the shard is leased to the same store actor, but for the new run.
    new_instance = structs.replace(killed, query_run_id="run-2")
    assert await coordinator._instances.report(new_instance, actor("a"), [killed]) == [killed]
    assert coordinator._instances.location(killed) is None


async def test_a_state_that_is_slow_to_open_keeps_no_other_waiting() -> None:
    gate, reached = threading.Event(), threading.Event()

    def hold_slow(operation: str, path: str) -> None:
        if operation == "get" and path.startswith("slow/"):
            reached.set()
            assert gate.wait(30)

    store = ObservedObjectStore(hold_slow)
    coordinator = coordinator_over(store)
    opening = [asyncio.create_task(coordinator.locate("slow", 0)) for _ in range(2)]
    await asyncio.to_thread(reached.wait, 30)
    try:
        await asyncio.wait_for(leased(coordinator, 0, "a"), 20)
        assert not any(waiting_call.done() for waiting_call in opening)
    finally:
        gate.set()
    assert [(await waiting_call).newest_version for waiting_call in opening] == [0, 0]


async def test_a_broken_state_is_opened_again_for_each_waiting_caller() -> None:
    store = MemoryObjectStore()
    store.put("broken/manifest/00000000000000000001.json", b"{")
    coordinator = coordinator_over(store)
    failed = await asyncio.gather(*(coordinator.locate("broken", 0) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [CorruptStateError] * 3
    store.delete("broken/manifest/00000000000000000001.json")
    assert (await coordinator.locate("broken", 0)).newest_version == 0


async def test_rounds_of_maintenance_continue_after_an_unexpected_error() -> None:
    """The second round comes in time: waiting for it does not raise."""
    coordinator = QueriedCoordinator(maintenance=Maintenance(interval_s=0.001))
    rounds, cleaned = iter(range(100)), asyncio.Event()

    async def fails_first(writer: object, state_name: str) -> None:
        if next(rounds) == 0:
            raise KeyError(state_name)
        cleaned.set()

    coordinator._cleaner.round = fails_first  # type: ignore[method-assign, assignment]
    await coordinator.locate("clicks", 0)
    await asyncio.wait_for(cleaned.wait(), 20)


async def test_all_states_are_found_without_a_listing_of_their_files() -> None:
    store = ObservedObjectStore()
    await leased(coordinator_over(store), 0, "a")
    store.put("notes/of-a-user.txt", b"no state")
    store.put("not a state!/metadata.json", b"{}")
    store.requests.clear()
    coordinator = coordinator_over(store)
    assert await coordinator.load_all_states() == ["clicks"]
    assert [query["name"] for query in (await coordinator.status())["queries"]] == ["clicks"]
    listed = {path for operation, path in store.requests if operation == "list"}
    assert listed == {"clicks/checkpoints", "clicks/manifest", "notes/manifest"}


async def started(store: MemoryObjectStore) -> QueriedCoordinator:
    """Start a coordinator: it knows the stored state and the reports of store actors, one on each of three nodes."""
    coordinator = coordinator_over(store)
    await coordinator.open()
    for name in "abc":
        await coordinator.report_store_actor(actor(name))
    return coordinator


async def test_a_drain_survives_the_coordinator_until_it_is_undone() -> None:
    coordinator = await started(store := MemoryObjectStore())
    await leased(coordinator, 0, "a")
    (planned,) = await coordinator.drain("node-a", True)
    coordinator = await started(store)
    assert await coordinator.plan_rebalance(["clicks"]) != (planned,), "a dry run changes nothing"
    assert planned in await coordinator.drain("node-a", False)
    coordinator = await started(store)
    assert all(move.target.node_id != "node-a" for move in await coordinator.plan_rebalance(["clicks"]))
    assert planned in await coordinator.plan_rebalance(["clicks"]), "what did not happen yet is planned again"
    await coordinator.undrain("node-a")
    coordinator = await started(store)
    slots = [ActorSlot(actor(name), 1) for name in "abc"]
    for _ in range(2):
        placed = await coordinator.place_shards("other", "query", range(3), slots)
    assert {slot.location for slot in slots} <= set(placed.holders), "the node is one of those again"


async def test_a_drain_that_cannot_read_a_state_changes_nothing() -> None:
    coordinator = await started(store := MemoryObjectStore())
    await leased(coordinator, 0, "a")
    before = {info.path for info in store.list("clicks/manifest")}
    # Another coordinator appends what this one cannot read.
    await leased(coordinator_over(store), 1, "b")
    store.put(min({info.path for info in store.list("clicks/manifest")} - before), b"damaged")
    with pytest.raises(CorruptStateError):
        await coordinator.drain("node-a", False)
    assert not list(store.list("_drained"))
    assert not coordinator._placement.leases.drained


async def test_the_log_says_which_move_failed_and_why() -> None:
    coordinator = await started(store := MemoryObjectStore())
    await leased(coordinator, 0, "a")
    (move,) = await coordinator.plan_move("clicks", 0, "node-b")
    await coordinator.move_failed(move, "RayActorError: it died")
    coordinator = await started(store)
    explained = await coordinator.explain_placement("clicks", 0)
    assert explained.location == actor("a")
    last_move = explained.moves[-1]
    assert (last_move.former, last_move.location, last_move.version) == (actor("a"), actor("b"), 1)
    assert (last_move.reason, last_move.error) == (move.reason, "RayActorError: it died")
    assert explained.moves[0].error == ""


async def test_an_invalid_id_of_a_node_is_not_drained() -> None:
    coordinator = await started(store := MemoryObjectStore())
    await leased(coordinator, 0, "a")
    with pytest.raises(InvalidRequestError, match="no id of a Ray node"):
        await coordinator.drain("../clicks/metadata.json", False)
    assert not [info for info in store.list("") if "drained" in info.path]


# -- incarnations of a store actor -----------------------------------------------------------------------------------

FIRST, SECOND = actor("a", "1"), actor("a", "2")


def test_a_new_incarnation_ends_the_previous_one_and_is_not_ended_by_a_worker_that_remembers_it() -> None:
    registry = ActorRegistry()
    registry.started(FIRST)
    assert not registry.is_dead(FIRST)
    registry.started(SECOND)
    assert registry.newest(FIRST) == SECOND
    assert registry.is_dead(FIRST)
    assert not registry.is_dead(SECOND)
    assert list(registry.all()) == [SECOND]


def test_a_restarted_registry_takes_the_incarnation_that_a_worker_remembers() -> None:
    registry = ActorRegistry()  # the coordinator has just restarted
    assert registry.newest(FIRST) == FIRST
    assert not registry.is_dead(FIRST)
    registry.started(SECOND)
    assert registry.newest(FIRST) == SECOND


def test_an_incarnation_that_a_worker_reports_follows_one_that_was_lost() -> None:
    registry = ActorRegistry()
    registry.started(FIRST)
    registry.lost(FIRST.instance_id)
    assert registry.newest(FIRST) == FIRST
    assert registry.is_dead(FIRST)
    assert registry.newest(SECOND) == SECOND
    assert registry.is_dead(FIRST)
    assert not registry.is_dead(SECOND)

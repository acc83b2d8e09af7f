"""Planned locations of shards: placed at once, moved by live migration, and repaired after a loss. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from msgspec import structs

from coordinator.ledger.records import RunStarted, ShardsAssigned
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.identities import ActorLocation
from coordinator.model.leases import CopyResult
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import LeaseRequest, MovePlanner, PlannedLeases, PlannedMove
from coordinator.placement.policies import ActorSlot, Choice, PlacementPolicy, PlacementRequest, balance, stay
from coordinator.service.placement_service import KnownFleet
from coordinator.telemetry.state_stats import ELSEWHERE, LOCAL, MOVED, NO_EXECUTOR, UNPLACED, TaskLocality
from tests.unit.ledger_harness import actor

SHARDS = 6


class PlannerHarness:
    """Store actors, and the locations of one state's shards."""

    def __init__(self, *names: str) -> None:
        self.store_actors = {name: actor(name) for name in names}
        self.dead: set[str] = set()
        self.leases, self.locality = PlannedLeases(), TaskLocality()
        self.planner = MovePlanner(self.leases, self)
        self.assigned: dict[int, ActorLocation] = {}

    def is_alive(self, location: ActorLocation) -> bool:
        return location.instance_id not in self.dead

    def newest(self, location: ActorLocation) -> ActorLocation:
        return next(
            (known for known in self.store_actors.values() if known.actor_name == location.actor_name), location
        )

    def actors(self) -> list[ActorLocation]:
        return [location for location in self.store_actors.values() if self.is_alive(location)]

    def load(self, location: ActorLocation) -> None:
        raise AssertionError("no policy asks for loads")

    def plan(self, *names: str, standbys: int = 0, policy: PlacementPolicy = balance) -> tuple[PlannedMove, ...]:
        slots = [ActorSlot(self.store_actors[name], 2) for name in names]
        return self.planner.plan("s", "query", range(SHARDS), slots, self.assigned, standbys, policy=policy)  # type: ignore[arg-type]

    def copy_finished(self, move: PlannedMove, copy_result: CopyResult | None) -> bool:
        choice = Choice(move.target, move.reason, copy_result)
        return self.leases.give_at_end(move.state_name, move.partition_id, choice, self)  # type: ignore[arg-type]

    def standbys(self) -> list[list[str]]:
        """Names of the standbys of each shard."""
        standbys = [self.leases.standbys("s", shard, self.assigned[shard], self) for shard in range(SHARDS)]  # type: ignore[arg-type]
        return [[location.actor_name for location in of_shard] for of_shard in standbys]

    def run_batch(self, local: str = "a", shards: Iterable[int] = range(SHARDS)) -> list[str]:
        """Lease each of `shards` for a task on `local`, and return the names of all shards' store actors."""
        for shard in shards:
            request = LeaseRequest("s", shard, self.store_actors[local], self.assigned.get(shard))
            previous = self.assigned.get(shard)
            self.assigned[shard] = self.leases.place(request, self).location  # type: ignore[arg-type]
            slots = self.leases.slots("s")
            self.locality.count("s", shard, self.store_actors[local], previous, self.assigned[shard], slots)
        return self.nodes()

    def nodes(self) -> list[str]:
        return [self.assigned[shard].actor_name for shard in sorted(self.assigned)]

    def repairs(self) -> tuple[PlannedMove, ...]:
        self.leases.batch_ended("s")
        return self.planner.repairs("s", "query", range(SHARDS), self.assigned)  # type: ignore[arg-type]


def one_node(request: PlacementRequest) -> Mapping[int, Choice]:
    """Put all shards on the first node, by name."""
    first = request.slots[0].location
    return {shard: Choice(first, "all on one node") for shard in range(request.num_shards)}


def test_stay_spreads_new_shards_and_moves_none_to_a_node_that_joins() -> None:
    for policy, moved in ((stay, []), (balance, ["c", "c"])):
        harness = PlannerHarness("a", "b", "c")
        assert harness.plan("a", "b", policy=policy) == ()
        assert sorted(harness.run_batch()) == ["a", "a", "a", "b", "b", "b"]
        assert [move.target.actor_name for move in harness.plan("a", "b", "c", policy=policy)] == moved


def test_stay_leaves_a_drained_node() -> None:
    harness = PlannerHarness("a", "b", "c")
    harness.plan("a", "b", policy=stay)
    harness.run_batch()
    harness.leases.drained.add(harness.store_actors["a"].node_id)
    moves = harness.plan("a", "b", "c", policy=stay)
    assert [move.source.actor_name for move in moves] == ["a"] * 3


def test_a_policy_says_where_shards_are_and_why_and_moves_none_that_is_there() -> None:
    harness = PlannerHarness("a", "b", "c")
    assert harness.plan("b", "c", "a", policy=one_node) == ()
    assert harness.run_batch("b") == ["a"] * SHARDS
    assert harness.plan("a", "b", "c", policy=one_node) == ()
    harness = PlannerHarness("a", "b", "c")
    harness.run_batch("b")
    moves = harness.plan("a", "b", "c", policy=one_node)
    assert [(move.target.actor_name, move.reason) for move in moves] == [("a", "all on one node")] * SHARDS


def test_shards_without_a_store_actor_go_to_their_slots_at_once() -> None:
    harness = PlannerHarness("a", "b", "c")
    assert harness.plan("a", "b", "c") == ()
    assert sorted(harness.run_batch()) == ["a", "a", "b", "b", "c", "c"]
    assert harness.plan("a", "b", "c") == (), "nothing has changed"


def test_resident_shards_are_moved_once_their_target_is_ready_and_the_batch_has_ended() -> None:
    harness = PlannerHarness("a", "b")
    assert set(harness.run_batch("a")) == {"a"}
    moves = harness.plan("a", "b")
    assert [(move.source.actor_name, move.target.actor_name) for move in moves] == [("a", "b")] * 3
    assert set(harness.run_batch()) == {"a"}, "no target is ready"
    for move in moves:
        harness.copy_finished(move, CopyResult(1, 10, 1))
    assert set(harness.run_batch()) == {"a"}, "tasks of the batch were sent there"
    harness.leases.batch_ended("s")
    assert sorted(harness.run_batch()) == ["a"] * 3 + ["b"] * 3
    assert harness.repairs() == ()


def test_a_move_that_was_prepared_while_no_batch_ran_holds_for_the_next_run() -> None:
    harness = PlannerHarness("a", "b")
    harness.run_batch("a")
    for move in harness.plan("a", "b"):
        harness.copy_finished(move, None)
    assert harness.plan("a", "b") == (), "a prepared move is not planned again"
    assert sorted(harness.run_batch()) == ["a"] * 3 + ["b"] * 3


def test_a_coordinator_that_has_just_started_knows_the_store_actors_that_have_shards() -> None:
    ledger = StateLedger("memory:///s")
    ledger.fold(RunStarted("run", "query", 0, 1))
    ledger.fold(ShardsAssigned(0, 2, actor("a"), "for a test"))
    registry = ActorRegistry()
    fleet = KnownFleet(registry, lambda: [ledger])
    assert list(fleet.actors()) == [actor("a")]
    registry.started(actor("a", life=2))
    assert list(fleet.actors()) == [actor("a", life=2)]
    registry.lost(actor("a", life=2).instance_id)
    assert list(fleet.actors()) == []


def test_a_second_move_of_a_shard_is_refused_for_the_first_and_drained_nodes_get_none() -> None:
    harness = PlannerHarness("a", "b", "c")
    harness.run_batch("a")
    first, second = (
        PlannedMove("s", 0, harness.store_actors["a"], harness.store_actors[to], "asked for by `statefleet move`")
        for to in ("b", "c")
    )
    assert harness.copy_finished(first, None)
    assert harness.leases.going_to("s", 0, harness) == harness.store_actors["b"]
    assert not harness.copy_finished(second, None)
    assert harness.copy_finished(first, None), "the answer was lost"
    harness.leases.batch_ended("s")
    assert harness.leases.going_to("s", 0, harness) is None
    harness.leases.drained.add(harness.store_actors["c"].node_id)
    assert not harness.copy_finished(second, None)


def test_shards_of_a_lost_store_actor_go_where_tasks_are_and_back_once_it_has_restarted() -> None:
    harness = PlannerHarness("a", "b")
    harness.plan("a", "b")
    before = harness.run_batch()
    harness.dead.add(harness.store_actors["b"].instance_id)
    assert set(harness.run_batch("a")) == {"a"}
    assert harness.repairs() == (), "it is not back yet"
    harness.store_actors["b"] = actor("b", life=2)
    moves = harness.repairs()
    assert len(moves) == 3
    assert {move.target for move in moves} == {harness.store_actors["b"]}
    assert harness.repairs() == (), "returned once"
    for move in moves:
        harness.copy_finished(move, None)
    harness.leases.batch_ended("s")
    assert sorted(harness.run_batch()) == sorted(before)


def test_a_store_actor_that_restarted_unnoticed_has_its_shards_again() -> None:
    harness = PlannerHarness("a", "b")
    harness.plan("a", "b")
    before = harness.run_batch()
    harness.dead.add(harness.store_actors["b"].instance_id)
    harness.store_actors["b"] = actor("b", life=2)
    assert harness.run_batch("a") == before
    assert harness.assigned[before.index("b")] == harness.store_actors["b"]


def test_a_drained_node_is_given_nothing() -> None:
    harness = PlannerHarness("a", "b", "c")
    harness.plan("a", "b", "c")
    harness.run_batch()
    harness.leases.drained.add(harness.store_actors["b"].node_id)
    moves = harness.planner.moves("s", "query", range(SHARDS), harness.assigned)  # type: ignore[arg-type]
    assert {move.source.actor_name for move in moves} == {"b"}
    assert sorted(move.target.actor_name for move in moves) == ["a", "c"]
    assert all(move.target.actor_name != "b" for move in harness.plan("a", "b", "c"))
    harness.leases.drained.clear()
    assert harness.plan("a", "b", "c") == ()


def test_several_store_actors_of_a_node_share_its_shards() -> None:
    harness = PlannerHarness("a", "a-1", "b", "b-1")
    for name in ("a-1", "b-1"):
        harness.store_actors[name] = structs.replace(
            harness.store_actors[name], node_id=harness.store_actors[name[0]].node_id
        )
    harness.plan("a", "a-1", "b", "b-1", standbys=1)
    nodes = harness.run_batch()
    assert max(Counter(nodes).values()) - min(Counter(nodes).values()) <= 1
    assert set(nodes) == set(harness.store_actors)
    for name, (standby,) in zip(nodes, harness.standbys(), strict=True):
        assert standby[0] != name[0], "a standby is on another node"
    harness.plan("a", "a-1", "b", "b-1")
    harness.dead |= {harness.store_actors[name].instance_id for name in ("b", "b-1")}
    after = harness.run_batch("a")
    lost_shards = [shard for shard, name in enumerate(nodes) if name[0] == "b"]
    assert {after[shard] for shard in lost_shards} == {"a", "a-1"}, "one store actor got all shards of a lost node"


def test_outcomes_of_operations_are_counted_by_reason() -> None:
    harness = PlannerHarness("a", "b")
    harness.run_batch("a", [0])
    assert harness.locality.of("s", 0) == {LOCAL: 1}
    harness.run_batch("b", [0])
    assert harness.locality.of("s", 0) == {LOCAL: 1, UNPLACED: 1}
    harness.plan("b")
    harness.run_batch("b", [0])
    assert harness.locality.of("s", 0)[NO_EXECUTOR] == 1
    harness.plan("a", "b")
    harness.run_batch("b", [0])
    assert harness.locality.of("s", 0)[ELSEWHERE] == 1
    harness.copy_finished(PlannedMove("s", 0, harness.store_actors["a"], harness.store_actors["b"], "for a test"), None)
    harness.leases.batch_ended("s")
    harness.run_batch("a", [0])
    assert harness.locality.of("s", 0)[MOVED] == 1


def test_standbys_are_on_other_nodes_and_spread() -> None:
    harness = PlannerHarness("a", "b", "c", "d")
    harness.plan("a", "b", "c", "d", standbys=2)
    holders = harness.run_batch()
    for holder, standbys in zip(holders, harness.standbys(), strict=True):
        assert len(set(standbys)) == 2
        assert holder not in standbys
    assert len({name for names in harness.standbys() for name in names}) == 4
    harness.leases.drained.add(harness.store_actors["d"].node_id)
    assert all("d" not in names for names in harness.standbys())
    harness.plan("a", standbys=2)
    assert harness.standbys() == [[] if holder == "a" else ["a"] for holder in holders], "there is no other store actor"


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_lost_store_actors_shards_go_to_their_standbys(is_planned: bool) -> None:
    """A task notices the lost store actor, or Spark first notices the lost executor and plans again."""
    harness = PlannerHarness("a", "b", "c")
    harness.plan("a", "b", "c", standbys=1)
    before, standbys = harness.run_batch(), harness.standbys()
    harness.dead.add(harness.store_actors["b"].instance_id)
    if is_planned:
        assert harness.plan("a", "c", standbys=1) == ()
    holders = harness.leases.holders("s", range(SHARDS), harness.assigned, harness)  # type: ignore[arg-type]
    after = harness.run_batch("a")
    assert after == [standby if was == "b" else was for was, (standby,) in zip(before, standbys, strict=True)]
    assert list(holders) == [harness.store_actors[name] for name in after], "tasks are sent there at once"
    if is_planned:
        counts = sorted(after.count(name) for name in "ac")
        assert (harness.repairs() == ()) == (counts == [3, 3])

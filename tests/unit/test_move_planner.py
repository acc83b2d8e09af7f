"""Plans of places: what goes at once, what is moved in the shadow of batches, and what is mended. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from coordinator.ledger.fleet_view import KnownFleet
from coordinator.ledger.records import RunStarted, ShardsAssigned
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.copy_result import CopyResult
from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_placer import LeaseRequest
from coordinator.placement.move_planner import ELSEWHERE, LOCAL, MOVED, NO_EXECUTOR, UNPLACED, MovePlanner, PlannedMove
from coordinator.placement.policy import ActorSlot
from tests.unit.ledger_harness import actor

SHARDS = 6


class PlannerHarness:
    """Store actors, and where the shards of one state are."""

    def __init__(self, *names: str) -> None:
        self.lives = {name: actor(name) for name in names}
        self.dead: set[str] = set()
        self.placing = MovePlanner()
        self.assigned: dict[int, ActorLocation] = {}

    def is_alive(self, location: ActorLocation) -> bool:
        return location.instance_id not in self.dead

    def newest(self, location: ActorLocation) -> ActorLocation:
        return next((one for one in self.lives.values() if one.actor_name == location.actor_name), location)

    def actors(self) -> list[ActorLocation]:
        return [one for one in self.lives.values() if self.is_alive(one)]

    def load(self, location: ActorLocation) -> None:
        raise AssertionError("nobody asks")

    def plan(self, *names: str, standbys: int = 0) -> tuple[PlannedMove, ...]:
        places = [ActorSlot(self.lives[name], 2) for name in names]
        return self.placing.plan("s", "query", range(SHARDS), places, self.assigned, self, standbys)  # type: ignore[arg-type]

    def standbys(self) -> list[list[str]]:
        """Names of the standbys of each shard."""
        found = [self.placing.standbys("s", shard, self.assigned[shard], self) for shard in range(SHARDS)]  # type: ignore[arg-type]
        return [[one.actor_name for one in some] for some in found]

    def run_batch(self, asking: str = "a", only: Iterable[int] = range(SHARDS)) -> list[str]:
        """Nodes that the shards are on after each of some has been leased."""
        for shard in only:
            request = LeaseRequest("s", shard, self.lives[asking], self.assigned.get(shard))
            former = self.assigned.get(shard)
            self.assigned[shard] = self.placing.place(request, self).location  # type: ignore[arg-type]
            self.placing.count("s", shard, self.lives[asking], former, self.assigned[shard])
        return self.nodes()

    def nodes(self) -> list[str]:
        return [self.assigned[shard].actor_name for shard in sorted(self.assigned)]

    def repairs(self) -> tuple[PlannedMove, ...]:
        self.placing.batch_ended("s")
        return self.placing.repairs("s", "query", range(SHARDS), self.assigned, self)  # type: ignore[arg-type]


def test_shards_that_nobody_holds_go_to_their_places_at_once() -> None:
    town = PlannerHarness("a", "b", "c")
    assert town.plan("a", "b", "c") == ()
    assert sorted(town.run_batch()) == ["a", "a", "b", "b", "c", "c"]
    assert town.plan("a", "b", "c") == (), "nothing has changed"


def test_shards_that_are_held_are_moved_once_their_taker_is_ready_and_the_batch_is_at_its_end() -> None:
    town = PlannerHarness("a", "b")
    assert set(town.run_batch("a")) == {"a"}
    moves = town.plan("a", "b")
    assert [(move.source.actor_name, move.target.actor_name) for move in moves] == [("a", "b")] * 3
    assert set(town.run_batch()) == {"a"}, "nobody is ready"
    for move in moves:
        town.placing.copy_finished(move, CopyResult(1, 10, 1), town)
    assert set(town.run_batch()) == {"a"}, "tasks of the batch were sent there"
    town.placing.batch_ended("s")
    assert sorted(town.run_batch()) == ["a"] * 3 + ["b"] * 3
    assert town.repairs() == ()


def test_a_move_that_was_prepared_while_no_batch_ran_holds_for_the_next_run() -> None:
    town = PlannerHarness("a", "b")
    town.run_batch("a")
    for move in town.plan("a", "b"):
        town.placing.copy_finished(move, None, town)
    assert town.plan("a", "b") == (), "what is prepared is not planned again"
    assert sorted(town.run_batch()) == ["a"] * 3 + ["b"] * 3


def test_a_coordinator_that_has_just_started_knows_the_store_actors_that_have_shards() -> None:
    ledger = StateLedger("memory:///s")
    ledger.fold(RunStarted("run", "query", 0, 1))
    ledger.fold(ShardsAssigned(0, 2, actor("a"), "for a test"))
    lives = ActorRegistry()
    fleet = KnownFleet(lives, lambda: [ledger])
    assert list(fleet.actors()) == [actor("a")]
    lives.started(actor("a", life=2))
    assert list(fleet.actors()) == [actor("a", life=2)]
    lives.lost(actor("a", life=2).instance_id)
    assert list(fleet.actors()) == []


def test_a_second_move_of_a_shard_is_told_that_the_first_one_has_it_and_drained_nodes_get_none() -> None:
    town = PlannerHarness("a", "b", "c")
    town.run_batch("a")
    first, second = (
        PlannedMove("s", 0, town.lives["a"], town.lives[to], "asked for by `statefleet move`") for to in ("b", "c")
    )
    assert town.placing.copy_finished(first, None, town)
    assert town.placing.going_to("s", 0, town) == town.lives["b"]
    assert not town.placing.copy_finished(second, None, town)
    assert town.placing.copy_finished(first, None, town), "the answer was lost"
    town.placing.batch_ended("s")
    assert town.placing.going_to("s", 0, town) is None
    town.placing.drained.add(town.lives["c"].node_id)
    assert not town.placing.copy_finished(second, None, town)


def test_shards_of_a_lost_store_actor_go_where_tasks_are_and_back_once_it_is_there_again() -> None:
    town = PlannerHarness("a", "b")
    town.plan("a", "b")
    before = town.run_batch()
    town.dead.add(town.lives["b"].instance_id)
    assert set(town.run_batch("a")) == {"a"}
    assert town.repairs() == (), "it is not back yet"
    town.lives["b"] = actor("b", life=2)
    moves = town.repairs()
    assert len(moves) == 3
    assert {move.target for move in moves} == {town.lives["b"]}
    assert town.repairs() == (), "told once"
    for move in moves:
        town.placing.copy_finished(move, None, town)
    town.placing.batch_ended("s")
    assert sorted(town.run_batch()) == sorted(before)


def test_a_store_actor_that_is_back_before_anybody_noticed_has_its_shards_again() -> None:
    town = PlannerHarness("a", "b")
    town.plan("a", "b")
    before = town.run_batch()
    town.dead.add(town.lives["b"].instance_id)
    town.lives["b"] = actor("b", life=2)
    assert town.run_batch("a") == before
    assert town.assigned[before.index("b")] == town.lives["b"]


def test_a_drained_node_is_given_nothing() -> None:
    town = PlannerHarness("a", "b", "c")
    town.plan("a", "b", "c")
    town.run_batch()
    town.placing.drained.add(town.lives["b"].node_id)
    moves = town.placing.moves("s", "query", range(SHARDS), town.assigned, town)  # type: ignore[arg-type]
    assert {move.source.actor_name for move in moves} == {"b"}
    assert sorted(move.target.actor_name for move in moves) == ["a", "c"]
    assert all(move.target.actor_name != "b" for move in town.plan("a", "b", "c"))
    town.placing.drained.clear()
    assert town.plan("a", "b", "c") == ()


def test_several_store_actors_of_a_node_share_its_shards() -> None:
    town = PlannerHarness("a", "a-1", "b", "b-1")
    for name in ("a-1", "b-1"):
        town.lives[name] = replace(town.lives[name], node_id=town.lives[name[0]].node_id)
    town.plan("a", "a-1", "b", "b-1", standbys=1)
    nodes = town.run_batch()
    assert max(Counter(nodes).values()) - min(Counter(nodes).values()) <= 1
    assert set(nodes) == set(town.lives)
    for name, (standby,) in zip(nodes, town.standbys(), strict=True):
        assert standby[0] != name[0], "a standby is on another node"
    town.plan("a", "a-1", "b", "b-1")
    town.dead |= {town.lives[name].instance_id for name in ("b", "b-1")}
    after = town.run_batch("a")
    gone = [shard for shard, name in enumerate(nodes) if name[0] == "b"]
    assert {after[shard] for shard in gone} == {"a", "a-1"}, "one alone does not have all that a lost node had"


def test_what_became_of_operations_is_counted_by_reason() -> None:
    town = PlannerHarness("a", "b")
    town.run_batch("a", [0])
    assert town.placing.operations("s", 0) == {LOCAL: 1}
    town.run_batch("b", [0])
    assert town.placing.operations("s", 0) == {LOCAL: 1, UNPLACED: 1}
    town.plan("b")
    town.run_batch("b", [0])
    assert town.placing.operations("s", 0)[NO_EXECUTOR] == 1
    town.plan("a", "b")
    town.run_batch("b", [0])
    assert town.placing.operations("s", 0)[ELSEWHERE] == 1
    town.placing.copy_finished(PlannedMove("s", 0, town.lives["a"], town.lives["b"], "for a test"), None, town)
    town.placing.batch_ended("s")
    town.run_batch("a", [0])
    assert town.placing.operations("s", 0)[MOVED] == 1


def test_standbys_are_on_other_nodes_and_spread() -> None:
    town = PlannerHarness("a", "b", "c", "d")
    town.plan("a", "b", "c", "d", standbys=2)
    holders = town.run_batch()
    for holder, standbys in zip(holders, town.standbys(), strict=True):
        assert len(set(standbys)) == 2
        assert holder not in standbys
    assert len({one for some in town.standbys() for one in some}) == 4
    town.placing.drained.add(town.lives["d"].node_id)
    assert all("d" not in some for some in town.standbys())
    town.plan("a", standbys=2)
    assert town.standbys() == [[] if holder == "a" else ["a"] for holder in holders], "there is nobody else"


@pytest.mark.parametrize("told", [True, False])
def test_a_lost_store_actors_shards_go_to_their_standbys(told: bool) -> None:
    """Whether a task finds out that it is lost, or Spark first that its executor is."""
    town = PlannerHarness("a", "b", "c")
    town.plan("a", "b", "c", standbys=1)
    before, standbys = town.run_batch(), town.standbys()
    town.dead.add(town.lives["b"].instance_id)
    if told:
        assert town.plan("a", "c", standbys=1) == ()
    nodes = town.placing.nodes("s", range(SHARDS), town.assigned, town)  # type: ignore[arg-type]
    after = town.run_batch("a")
    assert after == [standby if was == "b" else was for was, (standby,) in zip(before, standbys, strict=True)]
    assert list(nodes) == [town.lives[name].node_id for name in after], "tasks are sent there at once"
    if told:
        counts = sorted(after.count(name) for name in "ac")
        assert (town.repairs() == ()) == (counts == [3, 3])

"""Placement policies, and what the planner does with their choices. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import ActorLocation
from coordinator.placement.lease_placer import PlannedLeases
from coordinator.placement.move_planner import MovePlanner, PlannedMove
from coordinator.placement.policies import ActorSlot, Choice, PlacementPolicy, PlacementRequest, balance, stay
from statefleet.fleet import connect

SHARDS = 6


def store_actor(name: str) -> ActorLocation:
    return ActorLocation(name, f"{name}-1", f"node-{name}", f"10.0.0.{ord(name)}", 1)


def slots(names: str) -> tuple[ActorSlot, ...]:
    return tuple(ActorSlot(store_actor(name), 2) for name in names)


class LiveFleet:
    """Store actors that are all alive."""

    def __init__(self, names: str) -> None:
        self._locations = [store_actor(name) for name in names]

    def is_alive(self, location: ActorLocation) -> bool:
        return location in self._locations

    def newest(self, location: ActorLocation) -> ActorLocation:
        return location

    def actors(self) -> list[ActorLocation]:
        return self._locations

    def load(self, location: ActorLocation) -> None:
        raise AssertionError("no plan reads loads")


def one_node(request: PlacementRequest) -> Mapping[int, Choice]:
    """Put all shards on the first node, by name."""
    first = request.slots[0].location
    return {shard: Choice(first, "all on one node") for shard in range(request.num_shards)}


def plan(
    planner: MovePlanner, names: str, current: Mapping[int, ActorLocation], policy: PlacementPolicy
) -> tuple[PlannedMove, ...]:
    return planner.plan("s", "q", range(SHARDS), slots(names), current, LiveFleet("abc"), policy=policy)  # type: ignore[arg-type]


def planned(planner: MovePlanner, current: Mapping[int, ActorLocation]) -> list[str]:
    holders = planner.leases.holders("s", range(SHARDS), current, LiveFleet("abc"))  # type: ignore[arg-type]
    return ["nobody" if holder is None else holder.node_id.removeprefix("node-") for holder in holders]


def test_stay_spreads_new_shards_and_moves_none_to_a_node_that_joins() -> None:
    staying, balancing = MovePlanner(PlannedLeases()), MovePlanner(PlannedLeases())
    for planner, policy in ((staying, stay), (balancing, balance)):
        assert plan(planner, "ab", {}, policy) == ()
        assert sorted(planned(planner, {})) == ["a", "a", "a", "b", "b", "b"]
    current = {shard: store_actor("ab"[shard % 2]) for shard in range(SHARDS)}
    assert plan(staying, "abc", current, stay) == ()
    assert [move.target for move in plan(balancing, "abc", current, balance)] == [store_actor("c")] * 2


def test_stay_leaves_a_drained_node() -> None:
    current = {shard: store_actor("ab"[shard % 2]) for shard in range(SHARDS)}
    planner = MovePlanner(PlannedLeases())
    planner.leases.drained.add("node-a")
    moves = plan(planner, "abc", current, stay)
    assert {move.source for move in moves} == {store_actor("a")}
    assert len(moves) == 3


def test_a_policy_says_where_shards_are_and_why() -> None:
    planner = MovePlanner(PlannedLeases())
    assert plan(planner, "bca", {}, one_node) == ()
    assert planned(planner, {}) == ["a"] * SHARDS
    current = {shard: store_actor("b") for shard in range(SHARDS)}
    moves = plan(MovePlanner(PlannedLeases()), "abc", current, one_node)
    assert {(move.target, move.reason) for move in moves} == {(store_actor("a"), "all on one node")}
    assert len(moves) == SHARDS


def test_a_choice_of_where_a_shard_is_moves_nothing() -> None:
    assert (
        plan(MovePlanner(PlannedLeases()), "abc", {shard: store_actor("a") for shard in range(SHARDS)}, one_node) == ()
    )


def test_a_policy_of_another_name_is_refused_before_anything_is_started() -> None:
    with pytest.raises(InvalidRequestError, match=r"a placement is 'balance' or 'stay'.*placement=`random`"):
        connect("file:///tmp/s", placement="random")

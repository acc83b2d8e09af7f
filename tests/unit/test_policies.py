"""Placement policies: those that come with Statefleet, a user's, and what the planner does with their choices. Pure."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ray import cloudpickle

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import ActorLocation
from coordinator.placement.move_planner import MovePlanner, PlannedMove
from coordinator.placement.policies import POLICIES, Balance, Stay, policy_of
from coordinator.placement.policy import ActorSlot, Choice, PlacementPolicy, PlacementRequest
from spark_jobs.portable_policy import portable_policy

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


class OneNode:
    """All shards on the first node, by name."""

    def assign(self, request: PlacementRequest) -> Mapping[int, Choice]:
        first = request.slots[0].location
        return {shard: Choice(first, "all on one node") for shard in range(request.num_shards)}


class Broken:
    def assign(self, request: PlacementRequest) -> Mapping[int, Choice]:
        raise ZeroDivisionError("on purpose")


class Stranger:
    def assign(self, request: PlacementRequest) -> Mapping[int, Choice]:
        return {0: Choice(store_actor("z"))}


class TooManyShards:
    def assign(self, request: PlacementRequest) -> Mapping[int, Choice]:
        return {request.num_shards: Choice(request.slots[0].location)}


def plan(
    planner: MovePlanner, names: str, current: Mapping[int, ActorLocation], policy: PlacementPolicy
) -> tuple[PlannedMove, ...]:
    return planner.plan("s", "q", range(SHARDS), slots(names), current, LiveFleet("abc"), policy=policy)  # type: ignore[arg-type]


def planned(planner: MovePlanner, current: Mapping[int, ActorLocation]) -> list[str]:
    holders = planner.holders("s", range(SHARDS), current, LiveFleet("abc"))  # type: ignore[arg-type]
    return ["nobody" if holder is None else holder.node_id.removeprefix("node-") for holder in holders]


def test_stay_spreads_new_shards_and_moves_none_to_a_node_that_joins() -> None:
    stay, balance = MovePlanner(), MovePlanner()
    for planner, policy in ((stay, Stay()), (balance, Balance())):
        assert plan(planner, "ab", {}, policy) == ()
        assert sorted(planned(planner, {})) == ["a", "a", "a", "b", "b", "b"]
    current = {shard: store_actor("ab"[shard % 2]) for shard in range(SHARDS)}
    assert plan(stay, "abc", current, Stay()) == ()
    assert [move.target for move in plan(balance, "abc", current, Balance())] == [store_actor("c")] * 2


def test_stay_leaves_a_drained_node() -> None:
    current = {shard: store_actor("ab"[shard % 2]) for shard in range(SHARDS)}
    planner = MovePlanner()
    planner.drained.add("node-a")
    moves = plan(planner, "abc", current, Stay())
    assert {move.source for move in moves} == {store_actor("a")}
    assert len(moves) == 3


def test_a_users_policy_says_where_shards_are_and_why() -> None:
    planner = MovePlanner()
    assert plan(planner, "bca", {}, OneNode()) == ()
    assert planned(planner, {}) == ["a"] * SHARDS
    current = {shard: store_actor("b") for shard in range(SHARDS)}
    moves = plan(MovePlanner(), "abc", current, OneNode())
    assert {(move.target, move.reason) for move in moves} == {(store_actor("a"), "all on one node")}
    assert len(moves) == SHARDS


def test_a_choice_of_where_a_shard_is_moves_nothing() -> None:
    assert plan(MovePlanner(), "abc", {shard: store_actor("a") for shard in range(SHARDS)}, OneNode()) == ()


def test_shards_leave_a_drained_node_though_a_policy_says_nothing_of_them() -> None:
    class Silent:
        def assign(self, request: PlacementRequest) -> Mapping[int, Choice]:
            assert "node-a" not in {slot.location.node_id for slot in request.slots}
            return {}

    planner = MovePlanner()
    planner.drained.add("node-a")
    moves = plan(planner, "abc", {0: store_actor("a"), 1: store_actor("b")}, Silent())
    assert [move.shard for move in moves] == [0]


@pytest.mark.parametrize("policy", [Broken(), Stranger(), TooManyShards()], ids=lambda policy: type(policy).__name__)
def test_a_policy_that_fails_or_chooses_an_unknown_shard_or_store_actor_is_refused_by_name(
    policy: PlacementPolicy,
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"no row is affected.*policy=`{type(policy).__name__}`"):
        plan(MovePlanner(), "abc", {}, policy)


def test_a_policy_travels_by_value() -> None:
    """The coordinator cannot import the module of a user's policy."""
    portable = portable_policy(OneNode())
    assert isinstance(portable, bytes)
    code = (
        "import sys, pickle; from coordinator.placement.policies import policy_of; "
        "policy = policy_of(sys.stdin.buffer.read()); print(type(policy).__name__, 'tests.unit.test_policies' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], input=portable, capture_output=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout.split() == [b"OneNode", b"False"]


def test_policies_by_name_are_those_that_come_with_statefleet() -> None:
    assert {name: portable_policy(name) for name in POLICIES} == {"balance": "balance", "stay": "stay"}
    assert isinstance(policy_of("stay"), Stay)
    assert policy_of(portable_policy(Balance())).__class__ is Balance


def test_an_object_that_is_no_policy_is_refused_before_anything_is_started() -> None:
    with pytest.raises(InvalidRequestError, match="'balance' or 'stay', or a policy of your own"):
        portable_policy("random")
    for wrong in (object(), OneNode):
        with pytest.raises(InvalidRequestError, match="an object with a method assign"):
            portable_policy(wrong)  # type: ignore[arg-type]

    class Connected(OneNode):
        def __init__(self) -> None:
            self.lock = __import__("threading").Lock()

    with pytest.raises(InvalidRequestError, match=r"cannot be pickled.*Connected"):
        portable_policy(Connected())


def test_a_policy_that_cannot_be_loaded_is_named_in_the_error() -> None:
    class Gone:
        def __reduce__(self) -> tuple[object, ...]:
            return (__import__, ("no_such_module",))

    with pytest.raises(InvalidRequestError, match=r"cannot be loaded in the coordinator's process.*no_such_module"):
        policy_of(cloudpickle.dumps(Gone()))
    with pytest.raises(InvalidRequestError, match="cannot be loaded"):
        policy_of(pickle.dumps(1)[:-1])

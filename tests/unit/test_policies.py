"""Placement policies: where shards are before the first task, and what moves when nodes come and go; and rules by which the ledger
leases, which only use the facts that the coordinator has. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import FleetView, LeasePlacer, LeaseRequest, stay_else_local
from coordinator.placement.policies import ActorSlot, Choice, PlacementRequest, balance
from coordinator.service.placement_service import KnownFleet
from statefleet.fleet import connect
from tests.unit.ledger_harness import LedgerHarness, actor, entry, task

NODES = "abcdef"


def slots_of(**cores: int) -> list[ActorSlot]:
    return [ActorSlot(actor(name), count) for name, count in cores.items()]


def spread(num_shards: int, at: list[ActorSlot], present: dict[int, ActorLocation], query: str) -> Mapping[int, Choice]:
    return balance(PlacementRequest("s", query, num_shards, tuple(at), present))


def settled(
    num_shards: int, at: list[ActorSlot], present: dict[int, ActorLocation], query: str = "q"
) -> dict[int, ActorLocation]:
    moved = {partition: choice.location for partition, choice in spread(num_shards, at, present, query).items()}
    return present | moved


def test_shards_are_spread_evenly_and_then_nothing_moves() -> None:
    three = slots_of(a=2, b=2, c=2)
    first = settled(12, three, {})
    assert Counter(location.actor_name for location in first.values()) == {"a": 4, "b": 4, "c": 4}
    assert spread(12, three, first, "q") == {}


def test_a_node_with_more_cores_gets_more() -> None:
    first = settled(12, slots_of(a=4, b=1, c=1), {})
    assert Counter(location.actor_name for location in first.values()) == {"a": 8, "b": 2, "c": 2}


def test_operators_of_a_query_share_nodes_and_queries_do_not_all_begin_at_one() -> None:
    three = slots_of(a=1, b=1, c=1)
    assert settled(7, three, {}, "q") == settled(7, list(reversed(three)), {}, "q")
    assert len({settled(1, three, {}, f"query-{number}")[0].actor_name for number in range(20)}) == 3


def test_a_skewed_assignment_is_repaired_by_as_few_moves_as_it_takes() -> None:
    three = slots_of(a=1, b=1, c=1)
    skewed = {partition: actor("a") for partition in range(12)}
    choices = spread(12, three, skewed, "q")
    assert len(choices) == 8
    assert {choice.reason for choice in choices.values()} == {"the node that had it had more than its cores' share"}
    # The moves lead to the assignment of a first plan.
    assert skewed | {partition: choice.location for partition, choice in choices.items()} == settled(12, three, {}, "q")


def test_without_a_node_that_has_executors_nothing_moves() -> None:
    assert spread(4, [], {0: actor("a")}, "q") == {}
    assert spread(4, slots_of(a=0), {}, "q") == {}


@given(
    st.integers(1, 40),
    st.lists(st.dictionaries(st.sampled_from(NODES), st.integers(1, 4), min_size=1), min_size=1, max_size=5),
)
def test_nodes_come_and_go_and_each_has_its_share(num_shards: int, steps: list[dict[str, int]]) -> None:
    present: dict[int, ActorLocation] = {}
    for cores in steps:
        at = slots_of(**cores)
        choices = spread(num_shards, at, present, "q")
        share = Counter(location.actor_name for location in settled(num_shards, at, {}).values())
        before = Counter(location.actor_name for location in present.values())
        # Only shards beyond a node's share, or on no node, move.
        stays = sum(min(before[name], share[name]) for name in cores)
        assert len(choices) == num_shards - stays
        present = settled(num_shards, at, present)
        assert Counter(location.actor_name for location in present.values()) == share
        assert spread(num_shards, at, present, "q") == {}


def test_a_restarted_store_actor_has_its_shards_again() -> None:
    three = slots_of(a=1, b=1, c=1)
    first = settled(6, three, {})
    restarted = structs.replace(actor("b"), instance_id="b-2")
    again = spread(6, [three[0], ActorSlot(restarted, 1), three[2]], first, "q")
    assert {partition for partition, location in first.items() if location.actor_name == "b"} == set(again)
    assert {choice.location for choice in again.values()} == {restarted}


def test_a_policy_of_another_name_is_refused_before_anything_is_started() -> None:
    with pytest.raises(InvalidRequestError, match=r"a placement is 'balance' or 'stay'.*placement=`random`"):
        connect("file:///tmp/s", placement="random")


# -- leases ---------------------------------------------------------------------------------------------------------


def least_loaded(request: LeaseRequest, fleet: FleetView) -> Choice:
    """Lease a shard to the living store actor with the fewest partitions, and keep it there."""
    if request.present is not None and fleet.is_alive(request.present):
        return Choice(request.present)
    return Choice(min(fleet.actors(), key=lambda location: (fleet.load(location), location.actor_name)))


def move_to_b(request: LeaseRequest, fleet: FleetView) -> Choice:
    """Take a shard away from a living owner."""
    return Choice(actor("b"))


class PlacementHarness:
    """A ledger and a registry of store actors, as the coordinator has them."""

    def __init__(self, *actors: ActorLocation) -> None:
        self.registry, self.ledger = ActorRegistry(), StateLedger("memory:///clicks")
        for location in actors:
            self.registry.started(location)
        self.fleet = KnownFleet(self.registry, lambda: [self.ledger])

    def lease(self, shard: int, policy: LeasePlacer, batch: int = 0) -> tuple[ActorLocation, int]:
        records, grant = self.ledger.decide_lease(task(shard=shard, batch=batch), actor("a"), self.fleet, policy)
        for record in records:
            self.ledger.fold(record)
        return grant.lease.location, grant.lease.epoch


def test_a_policy_by_loads_spreads_shards_over_living_actors() -> None:
    harness = PlacementHarness(actor("a"), actor("b"), actor("c"))
    harness.registry.lost("c-1")
    placed = Counter(harness.lease(shard, least_loaded)[0].actor_name for shard in range(8))
    assert placed == {"a": 4, "b": 4}
    harness.registry.lost("b-1")
    assert {harness.lease(shard, least_loaded)[0].actor_name for shard in range(8)} == {"a"}
    assert harness.fleet.load(actor("a")) == 8


def test_a_shard_that_a_policy_moves_goes_under_a_higher_epoch() -> None:
    harness = PlacementHarness(actor("a"), actor("b"))
    first_location, first_epoch = harness.lease(0, stay_else_local)
    second_location, second_epoch = harness.lease(0, move_to_b)
    assert (first_location, second_location) == (actor("a"), actor("b"))
    assert second_epoch > first_epoch
    assert harness.lease(0, move_to_b) == (second_location, second_epoch), "a repeated request does not move it"


def test_a_load_counts_partitions_and_a_partition_has_rows_and_bytes_of_its_newest_version() -> None:
    harness = LedgerHarness()
    for shard in range(2):
        harness.commit(entry(harness.lease(task(shard=shard), actor("a")), 1))
    fleet = KnownFleet(ActorRegistry(), lambda: [harness.ledger])
    assert (fleet.load(actor("a")), fleet.load(actor("b"))) == (2, 0)
    assert [harness.ledger.rows_and_bytes(shard) for shard in range(2)] == [(3, 4), (3, 4)]

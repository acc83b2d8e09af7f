"""The ledger takes a placement policy: the default policy, and other policies that only use the facts that the coordinator has."""

from __future__ import annotations

from collections import Counter

from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import FleetView, LeasePlacer, LeaseRequest, stay_else_local
from coordinator.placement.policies import Choice
from coordinator.service.placement_service import KnownFleet
from tests.unit.ledger_harness import LedgerHarness, actor, entry, task


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

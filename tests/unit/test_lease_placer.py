"""Placement is a policy that the ledger is handed: today's rule, and that another one needs nothing but what the coordinator knows."""

from __future__ import annotations

from collections import Counter

from coordinator.ledger.fleet_view import KnownFleet
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_placer import ActorLoad, FleetView, LeasePlacer, LeaseRequest, StayElseLocal
from coordinator.placement.policy import Choice
from tests.unit.ledger_harness import FakeFleetView, LedgerHarness, actor, entry, task


def request(asking: ActorLocation, present: ActorLocation | None) -> LeaseRequest:
    return LeaseRequest("clicks", 0, asking, present)


def test_a_shard_stays_where_it_lives_and_otherwise_goes_to_who_asks() -> None:
    rule = StayElseLocal()
    assert rule.place(request(actor("a"), None), FakeFleetView()).location == actor("a")
    assert rule.place(request(actor("a"), actor("b")), FakeFleetView()).location == actor("b")
    assert rule.place(request(actor("a"), actor("b")), FakeFleetView({"b-1"})).location == actor("a")


class LeastLoaded:
    """Another policy: the living store actor with the fewest partitions, for good."""

    def place(self, request: LeaseRequest, fleet: FleetView) -> Choice:
        if request.present is not None and fleet.is_alive(request.present):
            return Choice(request.present)
        return Choice(min(fleet.actors(), key=lambda one: (fleet.load(one).partitions, one.actor_name)))


class MoveTo:
    """A policy that takes shards away from a living owner."""

    def __init__(self, target: ActorLocation) -> None:
        self._target = target

    def place(self, request: LeaseRequest, fleet: FleetView) -> Choice:
        return Choice(self._target)


class PlacementHarness:
    """Ledgers and lives as the coordinator has them."""

    def __init__(self, *actors: ActorLocation) -> None:
        self.lives, self.ledger = ActorRegistry(), StateLedger("memory:///clicks")
        for location in actors:
            self.lives.started(location)
        self.fleet = KnownFleet(self.lives, lambda: [self.ledger])

    def lease(self, shard: int, policy: LeasePlacer, batch: int = 0) -> tuple[ActorLocation, int]:
        records, grant = self.ledger.decide_lease(task(shard=shard, batch=batch), actor("a"), self.fleet, policy)
        for record in records:
            self.ledger.fold(record)
        return grant.lease.location, grant.lease.epoch


def test_a_policy_by_loads_spreads_shards_over_living_actors() -> None:
    office = PlacementHarness(actor("a"), actor("b"), actor("c"))
    office.lives.lost("c-1")
    placed = Counter(office.lease(shard, LeastLoaded())[0].actor_name for shard in range(8))
    assert placed == {"a": 4, "b": 4}
    office.lives.lost("b-1")
    assert {office.lease(shard, LeastLoaded())[0].actor_name for shard in range(8)} == {"a"}
    assert office.fleet.load(actor("a")).partitions == 8


def test_a_shard_that_a_policy_moves_goes_under_a_higher_epoch() -> None:
    office = PlacementHarness(actor("a"), actor("b"))
    here, first = office.lease(0, StayElseLocal())
    there, second = office.lease(0, MoveTo(actor("b")))
    assert (here, there) == (actor("a"), actor("b"))
    assert second > first
    assert office.lease(0, MoveTo(actor("b"))) == (there, second), "asked again, it is where it is"


def test_a_load_counts_rows_and_bytes_of_newest_versions() -> None:
    desk = LedgerHarness()
    for shard in range(2):
        desk.commit(entry(desk.lease(task(shard=shard), actor("a")), 1))
    fleet = KnownFleet(ActorRegistry(), lambda: [desk.ledger])
    assert fleet.load(actor("a")) == ActorLoad(2, 6, 8)
    assert fleet.load(actor("b")) == ActorLoad()

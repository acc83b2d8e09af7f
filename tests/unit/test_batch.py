"""The watermarks of a batch."""

from __future__ import annotations

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import ActorLocation, StateStoreId
from coordinator.model.leases import Lease
from coordinator.model.watermarks import Watermarks
from store_actors.client.operator_task import event_times


def grant(before: Watermarks) -> LeaseGrant:
    location = ActorLocation("a", "a-1", "node", "host", 1)
    return LeaseGrant(Lease(StateStoreId("memory:///s", 0, 0), "run", 1, location), 5, before)


def test_sparks_watermarks_are_used_unchanged() -> None:
    times = event_times(grant(Watermarks(1_000)), late_ms=1_000, evict_ms=2_000)
    assert (times.late_ms, times.seen_ms, times.after) == (1_000, 2_000, Watermarks(2_000))


def test_watermarks_never_go_back() -> None:
    times = event_times(grant(Watermarks(50_000, 50_000)), late_ms=1_000, evict_ms=2_000)
    assert (times.late_ms, times.after.input_ms) == (50_000, 50_000)

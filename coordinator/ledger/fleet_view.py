"""The coordinator's view of the fleet, by which leases are placed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_placer import ActorLoad


class KnownFleet:
    """The fleet by what store actors reported and by the ledgers that are open; see
    :class:`~coordinator.placement.lease_placer.FleetView`.
    """

    def __init__(self, registry: ActorRegistry, ledgers: Callable[[], Iterable[StateLedger]]) -> None:
        self._registry = registry
        self._ledgers = ledgers

    def is_alive(self, location: ActorLocation) -> bool:
        """Return whether the incarnation is not known to be dead."""
        return not self._registry.is_dead(location)

    def newest(self, location: ActorLocation) -> ActorLocation:
        """Return the newest known incarnation of the same store actor, dead or alive."""
        return self._registry.newest(location)

    def actors(self) -> Collection[ActorLocation]:
        """Return the newest incarnation of each store actor that is not known to be dead.

        No store actor has reported to a coordinator that has just started: those that have shards are in the ledgers.
        """
        reported = {location.actor_name: location for location in self._registry.all()}
        holders = {holder.actor_name: holder for ledger in self._ledgers() for holder in ledger.assigned().values()}
        return [location for location in {**holders, **reported}.values() if self.is_alive(location)]

    def load(self, location: ActorLocation) -> ActorLoad:
        """Return the sums over the partitions that are leased to an incarnation. It visits every partition of every ledger."""
        sizes = [
            ledger.rows_and_bytes(partition)
            for ledger in self._ledgers()
            for partition, where in ledger.assigned().items()
            if where.instance_id == location.instance_id and not ledger.is_taken_over(partition)
        ]
        return ActorLoad(len(sizes), sum(rows for rows, _ in sizes), sum(size for _, size in sizes))

"""What the coordinator knows, as placement policies see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.identities import ActorLocation
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_placer import ActorLoad

__all__ = ["KnownFleet"]


class KnownFleet:
    """The fleet by what store actors reported and by the ledgers that are open; see
    :class:`~coordinator.placement.lease_placer.FleetView`.

    Parameters
    ----------
    lives
        Which store actors there are.
    ledgers
        Gives the ledgers that are open.
    """

    def __init__(self, lives: ActorRegistry, ledgers: Callable[[], Iterable[StateLedger]]) -> None:
        self._lives = lives
        self._ledgers = ledgers

    def is_alive(self, location: ActorLocation) -> bool:
        """Whether nobody has said that the life is over."""
        return not self._lives.is_dead(location)

    def newest(self, location: ActorLocation) -> ActorLocation:
        """See :meth:`ActorRegistry.newest <coordinator.placement.actor_registry.ActorRegistry.newest>`."""
        return self._lives.newest(location)

    def actors(self) -> Collection[ActorLocation]:
        """Newest life of each store actor, unless that is over.

        A coordinator that has just started was told of none yet: those that have shards are in the ledgers.
        """
        known = {location.actor_name: location for location in self._lives.all()}
        holders = {one.actor_name: one for ledger in self._ledgers() for one in ledger.assigned().values()}
        return [location for location in {**holders, **known}.values() if self.is_alive(location)]

    def load(self, location: ActorLocation) -> ActorLoad:
        """Sum over the partitions that are leased to the life; looks at every partition of every ledger."""
        held = [
            ledger.rows_and_bytes(partition)
            for ledger in self._ledgers()
            for partition, where in ledger.assigned().items()
            if where.instance_id == location.instance_id and not ledger.is_taken_over(partition)
        ]
        return ActorLoad(len(held), sum(rows for rows, _ in held), sum(size for _, size in held))

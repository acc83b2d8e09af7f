"""The choice of the store actor that gets a shard's lease: the ledger asks for it with every lease. Pure.

Where the answer is not where the shard is, the shard goes there under a new epoch, which is written to the log with the reason before
any caller learns of it (:meth:`coordinator.ledger.state_ledger.StateLedger.decide_lease`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from coordinator.model.identities import ActorLocation
from coordinator.placement.policy import Choice


@dataclass(frozen=True, slots=True)
class ActorLoad:
    """Partitions that are leased to a store actor, with the rows and bytes of their newest versions."""

    partitions: int = 0
    state_rows: int = 0
    state_bytes: int = 0


class FleetView(Protocol):
    """Store actors as the coordinator knows them."""

    def is_alive(self, location: ActorLocation) -> bool:
        """Return whether a store actor's incarnation may still be alive."""

    def newest(self, location: ActorLocation) -> ActorLocation:
        """Return the newest known incarnation of the same store actor, dead or alive."""

    def actors(self) -> Collection[ActorLocation]:
        """Return the live store actors; each says on which node it is."""

    def load(self, location: ActorLocation) -> ActorLoad:
        """Return the load of a store actor, over all states that were opened."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A task asks for the lease of a shard.

    Attributes
    ----------
    asking
        Store actor of the task's node.
    present
        Store actor that has the shard; None if it was never placed.
    """

    state_name: str
    partition_id: int
    asking: ActorLocation
    present: ActorLocation | None


class LeasePlacer(Protocol):
    """Chooses the store actor of a lease."""

    def place(self, request: LeaseRequest, fleet: FleetView) -> Choice:
        """Return the store actor that is to have the shard. That of `request.present` leaves it there, unless that one is dead.

        Called for every lease, within the coordinator's turn: it must be quick. The same call may be repeated.
        """


class StayElseLocal:
    """Leaves a shard where it is as long as that store actor is alive, also when a new run starts: loaded state survives the driver.

    Otherwise the shard goes to the node whose task asks.
    """

    def place(self, request: LeaseRequest, fleet: FleetView) -> Choice:
        """Return the choice; see :class:`LeasePlacer`."""
        if request.present is None:
            return Choice(request.asking, "its first task ran there")
        if fleet.is_alive(request.present):
            return Choice(request.present)
        return Choice(request.asking, "the store actor that had it was lost; the task that asked for it ran there")

"""Which store actor a shard goes to: a policy, asked whenever a task wants its shard's lease. Pure.

A policy proposes and the ledger disposes: where the answer is not where the shard is, the shard goes there under a new epoch,
which is written to the log with the reason before anybody is told (:meth:`coordinator.ledger.state_ledger.StateLedger.decide_lease`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from coordinator.model.copy_result import CopyResult
from coordinator.model.identities import ActorLocation

__all__ = ["ActorLoad", "Choice", "FleetView", "PlacementPolicy", "PlacementRequest", "StayElseLocal"]


@dataclass(frozen=True, slots=True)
class ActorLoad:
    """What a store actor has: partitions that are leased to it, with the rows and bytes of their newest versions."""

    partitions: int = 0
    state_rows: int = 0
    state_bytes: int = 0


class FleetView(Protocol):
    """What the coordinator knows of the fleet."""

    def is_alive(self, location: ActorLocation) -> bool:
        """Whether a store actor's life may still go on."""

    def newest(self, location: ActorLocation) -> ActorLocation:
        """The newest known life of the same store actor, over or not."""

    def actors(self) -> Collection[ActorLocation]:
        """Store actors that live; each says on which node."""

    def load(self, location: ActorLocation) -> ActorLoad:
        """What a store actor has, of all states that were opened."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A shard that needs a place.

    Attributes
    ----------
    asking
        Store actor of the node whose task asks.
    present
        Where the shard is; None if it was never placed.
    """

    state_name: str
    partition_id: int
    asking: ActorLocation
    present: ActorLocation | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A store actor for a shard, and why that one.

    Attributes
    ----------
    preparation
        What it took over beforehand; None if nobody asked it to.
    """

    location: ActorLocation
    reason: str = ""
    preparation: CopyResult | None = None


class PlacementPolicy(Protocol):
    """Chooses store actors."""

    def place(self, request: PlacementRequest, fleet: FleetView) -> Choice:
        """The store actor that shall have the shard. That of `request.present` leaves it there, unless that life is over.

        Called for every lease, within the coordinator's turn: it must be quick. The same call may be repeated.
        """


class StayElseLocal:
    """A shard stays where it is as long as that store actor lives, also when a new run starts: hot state survives the driver.

    Otherwise it goes to the node whose task asks.
    """

    def place(self, request: PlacementRequest, fleet: FleetView) -> Choice:
        """See :class:`PlacementPolicy`."""
        if request.present is None:
            return Choice(request.asking, "its first task ran there")
        if fleet.is_alive(request.present):
            return Choice(request.present)
        return Choice(request.asking, "the store actor that had it was lost; the task that asked for it ran there")

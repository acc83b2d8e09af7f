"""Plans where the shards of states are to be. Pure, in memory only; :mod:`coordinator.placement.lease_placer` places leases by it.

A shard that no live store actor has goes to its planned store actor with its next lease. A loaded one is migrated while batches go
on: the next store actor takes a copy first (a :class:`PlannedMove`, carried out by the process that asked for the plan), and has
the shard from the end of a batch on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from coordinator.model.identities import ActorLocation
from coordinator.model.leases import ShardMove
from coordinator.placement.lease_placer import FleetView, PlannedLeases, live_incarnation
from coordinator.placement.policies import POLICIES, ActorSlot, Choice, PlacementPolicy, PlacementRequest, slot_order

#: Why a shard of a rescaled state is where it is.
INHERITED = "the shards that it is made of were there"


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A shard that is to go from one live store actor to another.

    Attributes
    ----------
    first_partition
        Partition of the state's shard 0.
    """

    state_name: str
    partition_id: int
    source: ActorLocation
    target: ActorLocation
    reason: str
    first_partition: int = 0

    @property
    def shard(self) -> int:
        """Number of the shard, as users know it."""
        return self.partition_id - self.first_partition


@dataclass(frozen=True, slots=True)
class PlacementExplanation:
    """Why a shard is where it is.

    Attributes
    ----------
    location
        Store actor that has it; None if none has.
    planned
        Store actor that has it from its next lease on, if that is another one.
    moves
        Its newest moves with their reasons, oldest first; they are in the state's log.
    operations
        State operations since the coordinator started by where their tasks ran: ``local``, or why not.
    """

    location: ActorLocation | None
    planned: ActorLocation | None
    moves: tuple[ShardMove, ...]
    operations: Mapping[str, int]


class MovePlanner:
    """Makes the plans of all states, by their policies."""

    def __init__(self, leases: PlannedLeases) -> None:
        self.leases = leases

    def plan(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        slots: Sequence[ActorSlot],
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
        standbys: int = 0,
        inherited: Mapping[int, ActorLocation] = MappingProxyType({}),
        policy: PlacementPolicy = POLICIES["balance"],
    ) -> tuple[PlannedMove, ...]:
        """Place a state's shards on nodes that have executors; returns the moves of shards that live store actors have.

        Shards of a store actor that was lost go to their standbys.

        Parameters
        ----------
        inherited
            Store actors that have the rows of which shards without a store actor will be made.
        """
        plan = self.leases.plan_of(state_name)
        # By the slots that were reported before: standbys have their copies there.
        promoted = {
            partition: choice
            for partition, holder in present.items()
            if (choice := self.leases.promoted(state_name, partition, holder, fleet)) is not None
        }
        plan.slots, plan.standbys, plan.policy = tuple(sorted(slots, key=slot_order)), standbys, policy
        # Copies that were made for the end of a batch that never ended are there now.
        plan.end_batch()
        plan.with_lease = {
            partition: choice for partition, choice in plan.with_lease.items() if fleet.is_alive(choice.location)
        }
        plan.with_lease |= promoted
        made_there = {
            partition: holder
            for partition, holder in inherited.items()
            if partition not in present and fleet.is_alive(holder)
        }
        choices = {partition: Choice(holder, INHERITED) for partition, holder in made_there.items()}
        choices |= self._assign(state_name, query_id, partitions, slots, {**made_there, **present}, fleet)
        moves = _moves(state_name, partitions, choices, present, fleet)
        free = choices.keys() - {move.partition_id for move in moves}
        # Shards that a standby is about to take over are spread evenly later.
        plan.is_skewed = any(partition in plan.with_lease for partition in free)
        plan.with_lease = {**{partition: choices[partition] for partition in free}, **plan.with_lease}
        return moves

    def moves(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
    ) -> tuple[PlannedMove, ...]:
        """Return the moves by which a state's shards are where its policy wants them, by the slots that the driver reported last.

        If no driver reported any since the coordinator started, all nodes that have a store actor count.
        """
        slots = self.leases.slots(state_name) or [ActorSlot(location, 1) for location in fleet.actors()]
        choices = self._assign(state_name, query_id, partitions, slots, present, fleet)
        return _moves(state_name, partitions, choices, present, fleet)

    def repairs(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
    ) -> tuple[PlannedMove, ...]:
        """Return :meth:`moves` of a state whose shards went elsewhere than planned, once; none of others."""
        plan = self.leases.plan_of(state_name)
        if not plan.is_skewed:
            return ()
        if any(live_incarnation(slot.location, fleet) is None for slot in plan.slots):
            # A store actor that was lost is being restarted, or the driver will report that its executor is gone.
            return ()
        plan.is_skewed = False
        return self.moves(state_name, query_id, partitions, present, fleet)

    def _assign(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        slots: Iterable[ActorSlot],
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
    ) -> dict[int, Choice]:
        plan = self.leases.plan_of(state_name)
        going = {partition: choice.location for partition, choice in plan.with_lease.items()}
        current = {
            partition - partitions.start: location
            for partition, location in {**present, **going}.items()
            if partition in partitions and fleet.is_alive(location)
        }
        live_slots = [
            replace(slot, location=live)
            for slot in slots
            if slot.location.node_id not in self.leases.drained
            and (live := live_incarnation(slot.location, fleet)) is not None
        ]
        request = PlacementRequest(
            state_name,
            query_id,
            len(partitions),
            tuple(sorted(live_slots, key=slot_order)),
            MappingProxyType(current),
            frozenset(self.leases.drained),
        )
        return {partitions[shard]: choice for shard, choice in plan.policy(request).items()}


def _moves(
    state_name: str,
    partitions: range,
    choices: Mapping[int, Choice],
    present: Mapping[int, ActorLocation],
    fleet: FleetView,
) -> tuple[PlannedMove, ...]:
    """Return the choices for shards that a live store actor has, as moves."""
    return tuple(
        PlannedMove(state_name, partition, present[partition], choice.location, choice.reason, partitions.start)
        for partition, choice in choices.items()
        if partition in present and fleet.is_alive(present[partition]) and choice.location != present[partition]
    )

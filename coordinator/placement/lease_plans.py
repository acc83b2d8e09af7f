"""Where the shards of all states are and are to be: plans, made by a policy, and the leases by them. Pure, in memory only.

One class decides which store actor gets a shard's lease: the ledger asks :class:`PlannedLeases` with every lease. A shard goes to the
store actor that was planned for it, else to its standby if its store actor was lost; else it stays, or goes to the node whose task
asks. Where the answer is not where the shard is, the shard goes there under a new epoch, which is written to the log with the reason
before any caller learns of it (:meth:`coordinator.ledger.state_ledger.StateLedger.decide_lease`).

:class:`MovePlanner` makes the plans. A shard that no live store actor has goes to its planned store actor with its next lease. A
loaded one is migrated while batches go on: the next store actor takes a copy first (a :class:`PlannedMove`, carried out by the process
that asked for the plan), and has the shard from the end of a batch on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from coordinator.model.identities import ActorLocation
from coordinator.model.leases import ShardMove
from coordinator.placement.policies import POLICIES, ActorSlot, Choice, PlacementPolicy, PlacementRequest, slot_order

#: Why a shard of a rescaled state is where it is.
INHERITED = "the shards that it is made of were there"


class FleetView(Protocol):
    """Store actors as the coordinator knows them."""

    def is_alive(self, location: ActorLocation) -> bool:
        """Return whether a store actor's incarnation may still be alive."""

    def newest(self, location: ActorLocation) -> ActorLocation:
        """Return the newest known incarnation of the same store actor, dead or alive."""

    def actors(self) -> Collection[ActorLocation]:
        """Return the live store actors; each says on which node it is."""

    def load(self, location: ActorLocation) -> int:
        """Return how many partitions are leased to a store actor, over all states that were opened."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A task asks for the lease of a shard."""

    state_name: str
    partition_id: int
    #: Store actor of the task's node.
    asking: ActorLocation
    #: Store actor that has the shard; None if it was never placed.
    present: ActorLocation | None


#: Returns the store actor that is to have the shard. That of ``request.present`` leaves it there, unless that one is dead. Called for
#: every lease, within the coordinator's turn: it must be quick. The same call may be repeated.
LeasePlacer = Callable[[LeaseRequest, FleetView], Choice]


def stay_else_local(request: LeaseRequest, fleet: FleetView) -> Choice:
    """Leave a shard where it is as long as that store actor is alive, also when a new run starts: loaded state survives the driver.

    Otherwise the shard goes to the node whose task asks.
    """
    if request.present is None:
        return Choice(request.asking, "its first task ran there")
    if fleet.is_alive(request.present):
        return Choice(request.present)
    return Choice(request.asking, "the store actor that had it was lost; the task that asked for it ran there")


@dataclass(slots=True)
class LeasePlan:
    """The plan for the leases of one state's shards."""

    #: Store actors of nodes that have executors, as the driver reported last; none if no driver reported any.
    slots: tuple[ActorSlot, ...] = ()
    #: Of the driver that reported last.
    policy: PlacementPolicy = POLICIES["balance"]
    #: How many each shard is to have.
    standbys: int = 0
    #: Whether shards went elsewhere than planned, as after the loss of a store actor.
    is_skewed: bool = False
    #: Store actors that shards go to with their next lease.
    with_lease: dict[int, Choice] = field(default_factory=dict)
    #: Those that they go to once the batch at hand has ended: tasks of it were sent to where the shards are.
    at_end: dict[int, Choice] = field(default_factory=dict)

    def end_batch(self) -> None:
        """Have finished copies take over: no task of the batch at hand is to come."""
        self.with_lease |= self.at_end
        self.at_end = {}


class PlannedLeases:
    """Places the leases of all states by their plans."""

    def __init__(self) -> None:
        #: Ray ids of nodes that are to have no shards.
        self.drained: set[str] = set()
        self._plans: defaultdict[str, LeasePlan] = defaultdict(LeasePlan)

    def plan_of(self, state_name: str) -> LeasePlan:
        """Return the plan of a state; it is empty at first."""
        return self._plans[state_name]

    def forget(self, state_name: str) -> None:
        """Drop the plan of a state."""
        self._plans.pop(state_name, None)

    def slots(self, state_name: str) -> tuple[ActorSlot, ...]:
        """Return the store actors of nodes that have executors, as a state's driver reported last; none if no driver reported any."""
        plan = self._plans.get(state_name)
        return () if plan is None else plan.slots

    # -- leases ---------------------------------------------------------------------------------------------------

    def place(self, request: LeaseRequest, fleet: FleetView) -> Choice:
        """Return the planned store actor, if it is alive, else a standby, else the choice of :func:`stay_else_local`."""
        planned = self.planned(request.state_name, request.partition_id, fleet)
        if planned is not None:
            return planned
        promoted = self.promoted(request.state_name, request.partition_id, request.present, fleet)
        choice = promoted or stay_else_local(replace(request, asking=self._of_node(request, fleet)), fleet)
        plan = self._plans.get(request.state_name)
        if plan is not None and plan.slots and choice.location != request.present:
            plan.is_skewed = True
        return choice

    def _of_node(self, request: LeaseRequest, fleet: FleetView) -> ActorLocation:
        """Return the store actor of the asking node that is to have a shard, where the driver reported several there."""
        live = [
            location
            for slot in self.slots(request.state_name)
            if slot.location.node_id == request.asking.node_id
            and (location := live_incarnation(slot.location, fleet)) is not None
        ]
        return live[request.partition_id % len(live)] if live else request.asking

    def stays(self, request: LeaseRequest, fleet: FleetView) -> bool:
        """Return whether a shard stays where it is in the batch after the one at hand, as far as is known."""
        plan = self._plans.get(request.state_name)
        if request.present is None or (plan is not None and request.partition_id in plan.at_end):
            return False
        planned = self.planned(request.state_name, request.partition_id, fleet)
        choice = planned or stay_else_local(request, fleet)
        return choice.location == request.present and fleet.is_alive(request.present)

    def planned(self, state_name: str, partition_id: int, fleet: FleetView) -> Choice | None:
        """Return the store actor that a shard goes to with its next lease, if that is planned."""
        plan = self._plans.get(state_name)
        choice = None if plan is None else plan.with_lease.get(partition_id)
        if choice is None or fleet.is_alive(choice.location):
            return choice
        restarted = live_incarnation(choice.location, fleet)
        return None if restarted is None else Choice(restarted, "the store actor of its node started again")

    def holders(
        self, state_name: str, partitions: range, assigned: Mapping[int, ActorLocation], fleet: FleetView
    ) -> tuple[ActorLocation | None, ...]:
        """Return the store actor of each shard at its next lease; None for one that goes to the node that asks for it."""

        def holder_of(partition_id: int) -> ActorLocation | None:
            holder = assigned.get(partition_id)
            choice = self.planned(state_name, partition_id, fleet) or self.promoted(
                state_name, partition_id, holder, fleet
            )
            location = holder if choice is None else choice.location
            return location if location is not None and fleet.is_alive(location) else None

        return tuple(map(holder_of, partitions))

    # -- the end of a batch ----------------------------------------------------------------------------------------

    def give_at_end(self, state_name: str, partition_id: int, choice: Choice, fleet: FleetView) -> bool:
        """Have a store actor own a shard from the end of the batch at hand on.

        Returns
        -------
        bool
            False if the shard is about to go to another store actor, or the node was drained: nothing is changed.
        """
        going = self.going_to(state_name, partition_id, fleet)
        if going not in (None, choice.location) or choice.location.node_id in self.drained:
            return False
        self._plans[state_name].at_end[partition_id] = choice
        return True

    def going_to(self, state_name: str, partition_id: int, fleet: FleetView) -> ActorLocation | None:
        """Return the live store actor that a shard goes to at the end of the batch at hand, if its copy is finished."""
        plan = self._plans.get(state_name)
        choice = None if plan is None else plan.at_end.get(partition_id)
        return choice.location if choice is not None and fleet.is_alive(choice.location) else None

    def batch_ended(self, state_name: str) -> None:
        """Have finished copies take over: no task of the batch at hand is to come."""
        self._plans[state_name].end_batch()

    # -- standbys -------------------------------------------------------------------------------------------------

    def standbys(
        self, state_name: str, partition_id: int, holder: ActorLocation, fleet: FleetView
    ) -> tuple[ActorLocation, ...]:
        """Return the store actors on other nodes that are sent the commits of a shard's holder."""
        plan = self._plans.get(state_name)
        if plan is None or not plan.standbys:
            return ()
        standbys: list[ActorLocation] = []
        # The search begins at another slot for each shard, and visits few of them, however many there are.
        for step in range(len(plan.slots)):
            location = plan.slots[(partition_id + step) % len(plan.slots)].location
            live = None if location.node_id in (holder.node_id, *self.drained) else live_incarnation(location, fleet)
            if live is not None:
                standbys.append(live)
            if len(standbys) == plan.standbys:
                break
        return tuple(standbys)

    def promoted(
        self, state_name: str, partition_id: int, holder: ActorLocation | None, fleet: FleetView
    ) -> Choice | None:
        """Return the standby that takes over a shard, if its holder was lost and there is a standby."""
        if holder is None or fleet.is_alive(holder):
            return None
        ready = self.standbys(state_name, partition_id, holder, fleet)
        return Choice(ready[0], "its standby took over from a store actor that was lost") if ready else None


def live_incarnation(location: ActorLocation, fleet: FleetView) -> ActorLocation | None:
    """Return the newest incarnation of a store actor; None if that is dead, too."""
    newest = fleet.newest(location)
    return newest if fleet.is_alive(newest) else None


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A shard that is to go from one live store actor to another."""

    state_name: str
    partition_id: int
    source: ActorLocation
    target: ActorLocation
    reason: str
    #: Partition of the state's shard 0.
    first_partition: int = 0

    @property
    def shard(self) -> int:
        """Number of the shard, as users know it."""
        return self.partition_id - self.first_partition


@dataclass(frozen=True, slots=True)
class PlacementExplanation:
    """Why a shard is where it is."""

    #: Store actor that has it; None if none has.
    location: ActorLocation | None
    #: Store actor that has it from its next lease on, if that is another one.
    planned: ActorLocation | None
    #: Its newest moves with their reasons, oldest first; they are in the state's log.
    moves: tuple[ShardMove, ...]
    #: State operations since the coordinator started by where their tasks ran: ``local``, or why not.
    operations: Mapping[str, int]


class MovePlanner:
    """Makes the plans of all states of a fleet, by their policies."""

    def __init__(self, leases: PlannedLeases, fleet: FleetView) -> None:
        self.leases = leases
        self._fleet = fleet

    def plan(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        slots: Sequence[ActorSlot],
        present: Mapping[int, ActorLocation],
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
        plan, fleet = self.leases.plan_of(state_name), self._fleet
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
        choices |= self._assign(state_name, query_id, partitions, slots, {**made_there, **present})
        moves = self._moves(state_name, partitions, choices, present)
        free = choices.keys() - {move.partition_id for move in moves}
        # Shards that a standby is about to take over are spread evenly later.
        plan.is_skewed = any(partition in plan.with_lease for partition in free)
        plan.with_lease = {**{partition: choices[partition] for partition in free}, **plan.with_lease}
        return moves

    def moves(
        self, state_name: str, query_id: str, partitions: range, present: Mapping[int, ActorLocation]
    ) -> tuple[PlannedMove, ...]:
        """Return the moves by which a state's shards are where its policy wants them, by the slots that the driver reported last.

        If no driver reported any since the coordinator started, all nodes that have a store actor count.
        """
        slots = self.leases.slots(state_name) or [ActorSlot(location, 1) for location in self._fleet.actors()]
        choices = self._assign(state_name, query_id, partitions, slots, present)
        return self._moves(state_name, partitions, choices, present)

    def repairs(
        self, state_name: str, query_id: str, partitions: range, present: Mapping[int, ActorLocation]
    ) -> tuple[PlannedMove, ...]:
        """Return :meth:`moves` of a state whose shards went elsewhere than planned, once; none of others."""
        plan = self.leases.plan_of(state_name)
        if not plan.is_skewed:
            return ()
        if any(live_incarnation(slot.location, self._fleet) is None for slot in plan.slots):
            # A store actor that was lost is being restarted, or the driver will report that its executor is gone.
            return ()
        plan.is_skewed = False
        return self.moves(state_name, query_id, partitions, present)

    def _assign(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        slots: Iterable[ActorSlot],
        present: Mapping[int, ActorLocation],
    ) -> dict[int, Choice]:
        plan = self.leases.plan_of(state_name)
        going = {partition: choice.location for partition, choice in plan.with_lease.items()}
        current = {
            partition - partitions.start: location
            for partition, location in {**present, **going}.items()
            if partition in partitions and self._fleet.is_alive(location)
        }
        live_slots = [
            replace(slot, location=live)
            for slot in slots
            if slot.location.node_id not in self.leases.drained
            and (live := live_incarnation(slot.location, self._fleet)) is not None
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
        self,
        state_name: str,
        partitions: range,
        choices: Mapping[int, Choice],
        present: Mapping[int, ActorLocation],
    ) -> tuple[PlannedMove, ...]:
        return tuple(
            PlannedMove(state_name, partition, holder, choice.location, choice.reason, partitions.start)
            for partition, choice in choices.items()
            if (holder := present.get(partition)) is not None
            and self._fleet.is_alive(holder)
            and choice.location != holder
        )

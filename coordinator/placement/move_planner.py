"""Plans of where shards shall be, and how many state operations ran where their shard is. Pure, and in memory only.

A shard that nobody holds goes to its planned place at once, with its next lease. One that a living store actor holds is moved in the
shadow of batches: the next store actor takes a copy first (a :class:`PlannedMove`, carried out by whoever asked for the plan), and has
the shard from the end of a batch on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from coordinator.model.copy_result import CopyResult, ShardMove
from coordinator.model.identities import ActorLocation
from coordinator.placement.policy import Choice, FleetView, PlacementPolicy, PlacementRequest
from coordinator.placement.spreading import ActorSlot, place_order, spread

__all__ = [
    "ELSEWHERE",
    "LOCAL",
    "MADE_THERE",
    "MOVED",
    "NO_EXECUTOR",
    "UNPLACED",
    "PlacementExplanation",
    "MovePlanner",
    "PlannedMove",
]

#: What became of a state operation: its task ran on the node of its shard, or why it did not.
LOCAL = "local"
MOVED = "the shard was moved to another node with this batch"
NO_EXECUTOR = "the shard's node has no executor"
ELSEWHERE = "Spark ran the task on another node than it was asked to"
UNPLACED = "the driver told of no executors"
#: Why a shard of a rescaled state is where it is.
MADE_THERE = "the shards that it is made of were there"


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A shard that is to go from one living store actor to another.

    Attributes
    ----------
    giver, taker
        Who has it, and who shall.
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
        """Number of the shard, as people are told it."""
        return self.partition_id - self.first_partition


@dataclass(frozen=True, slots=True)
class PlacementExplanation:
    """Why a shard is where it is.

    Attributes
    ----------
    location
        Store actor that has it; None if nobody has.
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


@dataclass(slots=True)
class _Plan:
    """What is planned of a state.

    Attributes
    ----------
    wanted
        Where shards go with their next lease.
    at_end
        Where they go once the batch at hand is at its end: tasks of it were sent to where they are.
    places
        Nodes that have executors, as the driver told last; none if it told of none.
    standbys
        How many each shard is to have.
    is_skewed
        Whether shards went elsewhere than planned, as after the loss of a store actor.
    """

    places: tuple[ActorSlot, ...] = ()
    standbys: int = 0
    is_skewed: bool = False
    wanted: dict[int, Choice] = field(default_factory=dict)
    at_end: dict[int, Choice] = field(default_factory=dict)

    def end_batch(self) -> None:
        self.wanted |= self.at_end
        self.at_end = {}


class MovePlanner:
    """Where shards are wanted, as a policy, and whether tasks were there.

    Parameters
    ----------
    otherwise
        Policy for what was not planned.

    Attributes
    ----------
    drained
        Nodes that shall have no shards.
    """

    def __init__(self, otherwise: PlacementPolicy) -> None:
        self._otherwise = otherwise
        self.drained: set[str] = set()
        self._plans: defaultdict[str, _Plan] = defaultdict(_Plan)
        self._operations: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)

    # -- plans ----------------------------------------------------------------------------------------------------

    def plan(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        places: Sequence[ActorSlot],
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
        standbys: int = 0,
        inherited: Mapping[int, ActorLocation] = MappingProxyType({}),
    ) -> tuple[PlannedMove, ...]:
        """Spread a state's shards over the nodes that have executors; returns the moves of those that somebody holds.

        Shards of a store actor that was lost go to their standbys.

        Parameters
        ----------
        partitions
            Of the state's shards.
        inherited
            Where the rows are of which shards that nobody holds yet will be made.
        """
        plan = self._plans[state_name]
        # By the places that were told before, at which standbys have their copies.
        promoted = {
            partition: choice
            for partition, where in present.items()
            if (choice := self._promoted(state_name, partition, where, fleet)) is not None
        }
        plan.places, plan.standbys = tuple(sorted(places, key=place_order)), standbys
        # What was prepared for the end of a batch that never ended is there now.
        plan.end_batch()
        plan.wanted = {partition: one for partition, one in plan.wanted.items() if fleet.is_alive(one.location)}
        plan.wanted |= promoted
        born = {one: where for one, where in inherited.items() if one not in present and fleet.is_alive(where)}
        choices = {one: Choice(where, MADE_THERE) for one, where in born.items()}
        choices |= self._spread(state_name, query_id, partitions, places, {**born, **present}, fleet)
        moves = _moves(state_name, partitions, choices, present, fleet)
        free = choices.keys() - {move.partition_id for move in moves}
        # What a standby is about to take over is spread evenly later.
        plan.is_skewed = any(partition in plan.wanted for partition in free)
        plan.wanted = {**{partition: choices[partition] for partition in free}, **plan.wanted}
        return moves

    def moves(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
    ) -> tuple[PlannedMove, ...]:
        """Moves that spread a state's shards evenly over the nodes that have executors, as the driver told of them last.

        Of a state that no driver told of since the coordinator started, over all nodes that have a store actor.
        """
        places = self._plans[state_name].places or [ActorSlot(location, 1) for location in fleet.actors()]
        return _moves(
            state_name,
            partitions,
            self._spread(state_name, query_id, partitions, places, present, fleet),
            present,
            fleet,
        )

    def repairs(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
    ) -> tuple[PlannedMove, ...]:
        """:meth:`moves` of a state whose shards went elsewhere than planned, once; none of others."""
        plan = self._plans.get(state_name)
        if plan is None or not plan.is_skewed:
            return ()
        if any(_living(place.location, fleet) is None for place in plan.places):
            # A store actor that was lost is on its way back, or the driver will tell that its executor is gone.
            return ()
        plan.is_skewed = False
        return self.moves(state_name, query_id, partitions, present, fleet)

    def _spread(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        places: Iterable[ActorSlot],
        present: Mapping[int, ActorLocation],
        fleet: FleetView,
    ) -> dict[int, Choice]:
        going = {partition: choice.location for partition, choice in self._plans[state_name].wanted.items()}
        there = {
            partition - partitions.start: where
            for partition, where in {**present, **going}.items()
            if partition in partitions and fleet.is_alive(where)
        }
        open_places = [
            replace(place, location=living)
            for place in places
            if place.location.node_id not in self.drained and (living := _living(place.location, fleet)) is not None
        ]
        choices = spread(len(partitions), open_places, there, query_id, self.drained)
        return {partitions[shard]: choice for shard, choice in choices.items()}

    def prepared(self, move: PlannedMove, preparation: CopyResult | None, fleet: FleetView) -> bool:
        """The taker is ready: it has the shard from the end of the batch at hand on.

        Returns
        -------
        bool
            False if the shard is about to go to another store actor, or the taker's node was drained: nothing is changed.
        """
        going = self.going(move.state_name, move.partition_id, fleet)
        if going not in (None, move.target) or move.target.node_id in self.drained:
            return False
        self._plans[move.state_name].at_end[move.partition_id] = Choice(move.target, move.reason, preparation)
        return True

    def going(self, state_name: str, partition_id: int, fleet: FleetView) -> ActorLocation | None:
        """The living store actor that a shard goes to at the end of the batch at hand, if that was prepared."""
        plan = self._plans.get(state_name)
        choice = None if plan is None else plan.at_end.get(partition_id)
        return choice.location if choice is not None and fleet.is_alive(choice.location) else None

    def batch_ended(self, state_name: str) -> None:
        """No task of the batch at hand is to come: what was prepared goes where it shall."""
        self._plans[state_name].end_batch()

    def place(self, request: PlacementRequest, fleet: FleetView) -> Choice:
        """See :class:`~coordinator.placement.policy.PlacementPolicy`: where it is planned to be, as long as that store actor lives."""
        planned = self.planned(request.state_name, request.partition_id, fleet)
        if planned is not None:
            return planned
        promoted = self._promoted(request.state_name, request.partition_id, request.present, fleet)
        choice = promoted or self._otherwise.place(replace(request, asking=self._of_node(request, fleet)), fleet)
        plan = self._plans.get(request.state_name)
        if plan is not None and plan.places and choice.location != request.present:
            plan.is_skewed = True
        return choice

    def _of_node(self, request: PlacementRequest, fleet: FleetView) -> ActorLocation:
        """The store actor of the asking node that is to have a shard, where the driver told of several there."""
        plan = self._plans.get(request.state_name)
        places = () if plan is None else plan.places
        here = [place.location for place in places if place.location.node_id == request.asking.node_id]
        living = [one for one in (_living(location, fleet) for location in here) if one is not None]
        return living[request.partition_id % len(living)] if living else request.asking

    def stays(self, request: PlacementRequest, fleet: FleetView) -> bool:
        """Whether a shard is where it shall be in the batch after the one at hand, as far as is known."""
        plan = self._plans.get(request.state_name)
        if request.present is None or (plan is not None and request.partition_id in plan.at_end):
            return False
        planned = self.planned(request.state_name, request.partition_id, fleet)
        choice = planned or self._otherwise.place(request, fleet)
        return choice.location == request.present and fleet.is_alive(request.present)

    def planned(self, state_name: str, partition_id: int, fleet: FleetView) -> Choice | None:
        """Where a shard goes with its next lease, if that is planned."""
        plan = self._plans.get(state_name)
        choice = None if plan is None else plan.wanted.get(partition_id)
        if choice is None or fleet.is_alive(choice.location):
            return choice
        anew = _living(choice.location, fleet)
        return None if anew is None else Choice(anew, "the store actor of its node started anew")

    def nodes(
        self, state_name: str, partitions: range, assigned: Mapping[int, ActorLocation], fleet: FleetView
    ) -> tuple[str | None, ...]:
        """Ray node on which each shard will be at its next lease; None for one that goes to whoever asks for it."""

        def node(partition_id: int) -> str | None:
            holder = assigned.get(partition_id)
            choice = self.planned(state_name, partition_id, fleet) or self._promoted(
                state_name, partition_id, holder, fleet
            )
            location = holder if choice is None else choice.location
            return location.node_id if location is not None and fleet.is_alive(location) else None

        return tuple(map(node, partitions))

    # -- standbys -------------------------------------------------------------------------------------------------

    def standbys(
        self, state_name: str, partition_id: int, holder: ActorLocation, fleet: FleetView
    ) -> tuple[ActorLocation, ...]:
        """Store actors on other nodes that are told of what the holder of a shard commits."""
        plan = self._plans.get(state_name)
        if plan is None or not plan.standbys:
            return ()
        found: list[ActorLocation] = []
        # Each shard begins at a place of its own; few are looked at, however many there are.
        for step in range(len(plan.places)):
            place = plan.places[(partition_id + step) % len(plan.places)].location
            living = None if place.node_id in (holder.node_id, *self.drained) else _living(place, fleet)
            if living is not None:
                found.append(living)
            if len(found) == plan.standbys:
                break
        return tuple(found)

    def _promoted(
        self, state_name: str, partition_id: int, holder: ActorLocation | None, fleet: FleetView
    ) -> Choice | None:
        """The standby that takes over from the holder of a shard, if that was lost and there is one."""
        if holder is None or fleet.is_alive(holder):
            return None
        ready = self.standbys(state_name, partition_id, holder, fleet)
        return Choice(ready[0], "its standby took over from a store actor that was lost") if ready else None

    # -- what came of them ----------------------------------------------------------------------------------------

    def count(
        self,
        state_name: str,
        partition_id: int,
        asking: ActorLocation,
        former: ActorLocation | None,
        has: ActorLocation,
    ) -> None:
        """A task was told where its shard is.

        Parameters
        ----------
        asking
            Store actor of the task's node.
        former, has
            Store actors that had the shard before and that has it now.
        """
        self._operations[state_name, partition_id][self._outcome(state_name, asking, former, has)] += 1

    def count_local(self, state_name: str, partition_id: int) -> None:
        """A task was on the node of its shard."""
        self._operations[state_name, partition_id][LOCAL] += 1

    def _outcome(self, state_name: str, asking: ActorLocation, former: ActorLocation | None, has: ActorLocation) -> str:
        plan = self._plans.get(state_name)
        places = () if plan is None else plan.places
        if asking.node_id == has.node_id:
            return LOCAL
        if not places:
            return UNPLACED
        if not any(place.location.node_id == has.node_id and place.cores > 0 for place in places):
            return NO_EXECUTOR
        return MOVED if former is not None and former.node_id == asking.node_id else ELSEWHERE

    def forget(self, state_name: str) -> None:
        """Let go of what is planned of a state, and of where its tasks ran."""
        self._plans.pop(state_name, None)
        for key in [key for key in self._operations if key[0] == state_name]:
            del self._operations[key]

    def operations(self, state_name: str, partition_id: int) -> dict[str, int]:
        """How many state operations of a shard had which outcome since the coordinator started."""
        return dict(self._operations.get((state_name, partition_id), {}))


def _living(location: ActorLocation, fleet: FleetView) -> ActorLocation | None:
    """The newest life of a store actor; None if that is over, too."""
    newest = fleet.newest(location)
    return newest if fleet.is_alive(newest) else None


def _moves(
    state_name: str,
    partitions: range,
    choices: Mapping[int, Choice],
    present: Mapping[int, ActorLocation],
    fleet: FleetView,
) -> tuple[PlannedMove, ...]:
    """Those choices that are about shards which a living store actor has."""
    return tuple(
        PlannedMove(state_name, partition, present[partition], choice.location, choice.reason, partitions.start)
        for partition, choice in choices.items()
        if partition in present and fleet.is_alive(present[partition])
    )

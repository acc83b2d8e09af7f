"""The placement of shards: an asynchronous shell around the move planner and the ledgers. No Ray."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.ledger.records import MoveFailed, Record
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import ActorLocation
from coordinator.model.leases import CopyResult
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import MovePlanner, PlacementExplanation, PlannedLeases, PlannedMove
from coordinator.placement.policies import POLICIES, ActorSlot, Choice
from coordinator.storage.protocol import ObjectStore
from coordinator.telemetry.state_stats import TaskLocality

log = logging.getLogger(__name__)

_DRAINED = "_drained"
#: Ray's ids of nodes.
_NODE_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of a state's shards in the next batch."""

    #: Store actor of each shard at its next lease; None for one that goes to the node that asks for it.
    holders: tuple[ActorLocation | None, ...]
    #: Moves to carry out while batches go on, so that shards are where the policy wants them.
    moves: tuple[PlannedMove, ...]


@dataclass(eq=False)
class KnownFleet:
    """The fleet by what store actors reported and by the ledgers that are open; see
    :class:`~coordinator.placement.lease_plans.FleetView`.
    """

    _registry: ActorRegistry
    _ledgers: Callable[[], Iterable[StateLedger]]

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

    def load(self, location: ActorLocation) -> int:
        """Return how many partitions are leased to an incarnation. It visits every partition of every ledger."""
        return sum(
            where.instance_id == location.instance_id and not ledger.is_taken_over(partition)
            for ledger in self._ledgers()
            for partition, where in ledger.assigned().items()
        )


class PlacementService:
    """Places the shards of a fleet's states.

    Each node that is to have no shards has an empty object, ``_drained/<node id>``, which a restarted coordinator finds. Ray never uses
    an id again, so the object of a node that has ended affects no other node.
    """

    def __init__(
        self,
        fleet: KnownFleet,
        writer_of: Callable[[str], Awaitable[LedgerWriter]],
        store: ObjectStore,
        locality: TaskLocality,
    ) -> None:
        self.leases = PlannedLeases()
        self._planner = MovePlanner(self.leases, fleet)
        self._locality = locality
        self._fleet = fleet
        self._writer_of = writer_of
        self._store = store

    async def open(self) -> None:
        """Load which nodes were drained before this coordinator started."""
        marks = await asyncio.to_thread(self._store.list, _DRAINED)
        self.leases.drained |= {mark.path.rpartition("/")[2] for mark in marks}

    async def place_shards(
        self,
        state_name: str,
        query_id: str,
        partitions: range,
        slots: Sequence[ActorSlot],
        standbys: int = 0,
        policy: str = "balance",
    ) -> Placement:
        """Place a state's shards on nodes that have executors, before the first task of a run and whenever these nodes change.

        Parameters
        ----------
        standbys
            How many store actors on other nodes are sent the commits of each shard.
        """
        assigned, inherited = await (await self._writer_of(state_name)).read(
            lambda ledger: (_of(ledger.assigned(), partitions), ledger.inherited(partitions))
        )
        moves = self._planner.plan(
            state_name, query_id, partitions, slots, assigned, standbys, inherited, POLICIES[policy]
        )
        return Placement(self.leases.holders(state_name, partitions, assigned, self._fleet), moves)

    def next_batch(self, ledger: StateLedger, partitions: range, *, is_whole: bool) -> Placement:
        """Return where the tasks of the next batch should run, and what is to be moved meanwhile.

        Parameters
        ----------
        is_whole
            Whether no task of the batch at hand is to come.
        """
        name, assigned = ledger.state_name, _of(ledger.assigned(), partitions)
        if is_whole:
            self.leases.batch_ended(name)
        holders = self.leases.holders(name, partitions, assigned, self._fleet)
        moves = self._planner.repairs(name, ledger.query_id, partitions, assigned)
        return Placement(holders, moves)

    async def explain_placement(self, state_name: str, shard: int) -> PlacementExplanation:
        """Return why a shard is where it is: its newest moves, and where its tasks ran."""

        partition_id = (await self._checked(state_name, shard))[shard]

        def explanation(ledger: StateLedger) -> PlacementExplanation:
            holder = ledger.holder(partition_id)
            planned = self.leases.planned(state_name, partition_id, self._fleet)
            return PlacementExplanation(
                holder,
                None if planned is None or planned.location == holder else planned.location,
                ledger.moves(partition_id),
                self._locality.of(state_name, partition_id),
            )

        return await (await self._writer_of(state_name)).read(explanation)

    async def plan_move(self, state_name: str, shard: int, node_id: str) -> tuple[PlannedMove, ...]:
        """Return the move that puts one shard on a node; none if it is there.

        Raises
        ------
        InvalidRequestError
            No living store actor has the shard, or none is on the node.
        """
        partitions = await self._checked(state_name, shard)
        source = await self._holder(state_name, partitions[shard])
        facts = {"state": state_name, "shard": shard, "node": node_id}
        if source is None or not self._fleet.is_alive(source):
            raise InvalidRequestError(
                "no living store actor has the shard, so there is nothing to move; it is placed with its next batch",
                **facts,
            )
        if node_id in self.leases.drained:
            raise InvalidRequestError(
                "the node is drained, so no shard goes there; nothing was changed; `statefleet drain NODE --undo` lets them back",
                **facts,
            )
        going = self.leases.going_to(state_name, partitions[shard], self._fleet)
        if going is not None and going.node_id != node_id:
            raise InvalidRequestError(
                "the shard was moved a moment ago, and goes to another node at the end of the batch at hand; nothing was changed; "
                "move it again once it is there",
                goes_to=going.node_id,
                **facts,
            )
        targets = [actor for actor in self._fleet.actors() if actor.node_id == node_id]
        if not targets:
            raise InvalidRequestError(
                "no living store actor of this fleet is known on the node; one starts with the first executor there; a coordinator "
                "that has just started knows of those that have no shards within a minute: ask again; see `statefleet status`",
                nodes=sorted(actor.node_id for actor in self._fleet.actors()),
                **facts,
            )
        if source.node_id == node_id:
            return ()
        target = min(targets, key=lambda actor: (self._fleet.load(actor), actor.actor_name))
        reason = "asked for by `statefleet move`"
        return (PlannedMove(state_name, partitions[shard], source, target, reason, partitions.start),)

    async def plan_rebalance(self, state_names: Sequence[str]) -> tuple[PlannedMove, ...]:
        """Return the moves by which the shards of those states that exist are where their policies want them."""
        moves: list[PlannedMove] = []
        for name in state_names:
            partitions = await self._partitions(name)
            if not partitions:
                continue
            writer = await self._writer_of(name)
            query_id, assigned = await writer.read(lambda ledger: (ledger.query_id, ledger.assigned()))
            moves += self._planner.moves(name, query_id, partitions, _of(assigned, partitions))
        return tuple(moves)

    async def drain(self, state_names: Sequence[str], node_id: str, *, dry_run: bool) -> tuple[PlannedMove, ...]:
        """Have no shard placed on a node from now on; returns the moves that empty it.

        Raises
        ------
        InvalidRequestError
            No other node has a living store actor.
        """
        if not any(actor.node_id not in {node_id, *self.leases.drained} for actor in self._fleet.actors()):
            raise InvalidRequestError(
                "no other node has a living store actor, so the shards have nowhere to go; nothing was changed; add a node with an "
                "executor first",
                node=node_id,
            )
        for name in state_names:
            await self._partitions(name)  # one that cannot be read refuses before anything is changed
        was_drained = node_id in self.leases.drained
        if not dry_run:
            # A concurrent writer writes the same.
            await asyncio.to_thread(self._store.put, _drained_path(node_id), b"")
        self.leases.drained.add(node_id)
        try:
            return tuple(move for move in await self.plan_rebalance(state_names) if move.source.node_id == node_id)
        finally:
            if dry_run and not was_drained:
                self.leases.drained.discard(node_id)

    async def undrain(self, node_id: str) -> None:
        """Let shards be placed on a node again."""
        await asyncio.to_thread(self._store.delete, _drained_path(node_id))
        self.leases.drained.discard(node_id)

    async def move_prepared(self, move: PlannedMove, copy_result: CopyResult | None) -> bool:
        """Have the target of a move, which has a copy, own the shard from the end of the batch at hand on; False if it cannot."""
        source = await self._holder(move.state_name, move.partition_id)
        if source != move.source or not self._fleet.is_alive(move.target):
            return False
        choice = Choice(move.target, move.reason, copy_result)
        return self.leases.give_at_end(move.state_name, move.partition_id, choice, self._fleet)

    async def failed(self, move: PlannedMove, error: str) -> None:
        """Write to the state's log why a move failed, unless the state was dropped meanwhile."""
        record = MoveFailed(move.partition_id, move.target, move.reason, error)

        def decide(ledger: StateLedger) -> tuple[list[Record], None]:
            return [] if ledger.holder(move.partition_id) is None else [record], None

        await (await self._writer_of(move.state_name)).decide(decide)

    async def _checked(self, state_name: str, shard: int) -> range:
        """Return the partitions of a state's shards, if it still has this one: it may have been rescaled meanwhile
        (InvalidRequestError).
        """
        partitions = await self._partitions(state_name)
        if not 0 <= shard < len(partitions):
            raise InvalidRequestError(
                "there is no such shard (any more); nothing was changed; see `statefleet shards`",
                state=state_name,
                shard=shard,
                shards=len(partitions),
            )
        return partitions

    async def _partitions(self, state_name: str) -> range:
        """Return the partitions of a state's shards, in their order; none if it does not exist."""
        writer = await self._writer_of(state_name)
        created = writer.metadata
        if created is None:
            return range(0)
        return await writer.read(lambda ledger: ledger.layouts.newest(first_layout(created)).partitions)

    async def _holder(self, state_name: str, partition_id: int) -> ActorLocation | None:
        return await (await self._writer_of(state_name)).read(lambda ledger: ledger.holder(partition_id))


def _of(assigned: Mapping[int, ActorLocation], partitions: range) -> dict[int, ActorLocation]:
    return {partition: location for partition, location in assigned.items() if partition in partitions}


def _drained_path(node_id: str) -> str:
    if _NODE_ID.fullmatch(node_id) is None:
        raise InvalidRequestError("this is no id of a Ray node; nothing was changed", node=node_id)
    return f"{_DRAINED}/{node_id}"

"""The coordinator's answers about places: a shell around the plans and the ledgers. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.ledger.fleet_view import KnownFleet
from coordinator.ledger.records import MoveFailed, Record
from coordinator.ledger.rescaling import BatchShards
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.model.copy_result import CopyResult
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import ActorLocation
from coordinator.placement.move_planner import MovePlanner, PlacementExplanation, PlannedMove
from coordinator.placement.policy import PlacementPolicy
from coordinator.placement.spreading import ActorSlot
from coordinator.service.drained_nodes import DrainedNodes

__all__ = ["Placement", "PlacementService"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the shards of a state are to be.

    Attributes
    ----------
    nodes
        Ray node on which each shard is at its next lease; None for one that goes to whoever asks for it.
    moves
        What is to be carried out, in the shadow of batches, so that shards are spread evenly.
    """

    nodes: tuple[str | None, ...]
    moves: tuple[PlannedMove, ...]


class PlacementService:
    """Plans places for the states of a fleet.

    Parameters
    ----------
    otherwise
        Policy for what was not planned.
    fleet
        What is known of store actors.
    keeper
        Gives the keeper of a state's ledger.
    drained
        Keeps what was drained.
    partitions
        Gives the partitions of a state's shards.
    """

    def __init__(
        self,
        otherwise: PlacementPolicy,
        fleet: KnownFleet,
        keeper: Callable[[str], Awaitable[LedgerWriter]],
        drained: DrainedNodes,
        partitions: Callable[[str], Awaitable[range]],
    ) -> None:
        self.placing = MovePlanner(otherwise)
        self._fleet = fleet
        self._keeper = keeper
        self._drained = drained
        self._partitions = partitions

    async def open(self) -> None:
        """Learn which nodes were drained before this coordinator started."""
        self.placing.drained |= await asyncio.to_thread(self._drained.node_ids)

    async def place(
        self, state_name: str, query_id: str, shards: BatchShards, places: Sequence[ActorSlot], standbys: int
    ) -> Placement:
        """See :meth:`Coordinator.place_shards <coordinator.service.coordinator.Coordinator.place_shards>`."""
        partitions = shards.partitions

        def look(ledger: StateLedger) -> tuple[list[Record], tuple[dict[int, ActorLocation], dict[int, ActorLocation]]]:
            return [], (_of(ledger.assigned(), partitions), ledger.inherited(partitions))

        assigned, inherited = await (await self._keeper(state_name)).submit(look)
        moves = self.placing.plan(state_name, query_id, partitions, places, assigned, self._fleet, standbys, inherited)
        return Placement(self.placing.nodes(state_name, partitions, assigned, self._fleet), moves)

    def next_batch(self, ledger: StateLedger, partitions: range, *, is_whole: bool) -> Placement:
        """Where the tasks of the next batch should run, and what is to be moved meanwhile.

        Parameters
        ----------
        is_whole
            Whether no task of the batch at hand is to come.
        """
        name, assigned = ledger.state_name, _of(ledger.assigned(), partitions)
        if is_whole:
            self.placing.batch_ended(name)
        nodes = self.placing.nodes(name, partitions, assigned, self._fleet)
        moves = self.placing.repairs(name, ledger.query_id, partitions, assigned, self._fleet)
        return Placement(nodes, moves)

    async def explain(self, state_name: str, shard: int) -> PlacementExplanation:
        """See :meth:`Coordinator.explain_placement <coordinator.service.coordinator.Coordinator.explain_placement>`."""

        partition_id = (await self._checked(state_name, shard))[shard]

        def look(ledger: StateLedger) -> tuple[list[Record], PlacementExplanation]:
            holder = ledger.holder(partition_id)
            planned = self.placing.planned(state_name, partition_id, self._fleet)
            return [], PlacementExplanation(
                holder,
                None if planned is None or planned.location == holder else planned.location,
                ledger.assignments.moves(partition_id),
                self.placing.operations(state_name, partition_id),
            )

        return await (await self._keeper(state_name)).submit(look)

    async def move(self, state_name: str, shard: int, node_id: str) -> tuple[PlannedMove, ...]:
        """The move that brings one shard to a node; none if it is there.

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
        if node_id in self.placing.drained:
            raise InvalidRequestError(
                "the node is drained, so no shard goes there; nothing was changed; `statefleet drain NODE --undo` lets them back",
                **facts,
            )
        going = self.placing.going(state_name, partitions[shard], self._fleet)
        if going is not None and going.node_id != node_id:
            raise InvalidRequestError(
                "the shard was moved a moment ago, and goes to another node at the end of the batch at hand; nothing was changed; "
                "move it again once it is there",
                goes_to=going.node_id,
                **facts,
            )
        takers = [one for one in self._fleet.actors() if one.node_id == node_id]
        if not takers:
            raise InvalidRequestError(
                "no living store actor of this fleet is known on the node; one starts with the first executor there; a coordinator "
                "that has just started knows of those that have no shards within a minute: ask again; see `statefleet status`",
                nodes=sorted(one.node_id for one in self._fleet.actors()),
                **facts,
            )
        if source.node_id == node_id:
            return ()
        target = min(takers, key=lambda one: (self._fleet.load(one).partitions, one.actor_name))
        reason = "asked for by `statefleet move`"
        return (PlannedMove(state_name, partitions[shard], source, target, reason, partitions.start),)

    async def rebalance(self, states: Sequence[tuple[str, range]]) -> tuple[PlannedMove, ...]:
        """Moves that spread the shards of some states (names, partitions) evenly."""
        moves: list[PlannedMove] = []
        for name, partitions in states:
            keeper = await self._keeper(name)
            query_id, assigned = await keeper.submit(lambda ledger: ([], (ledger.query_id, ledger.assigned())))
            moves += self.placing.moves(name, query_id, partitions, _of(assigned, partitions), self._fleet)
        return tuple(moves)

    async def drain(
        self, states: Sequence[tuple[str, range]], node_id: str, *, dry_run: bool
    ) -> tuple[PlannedMove, ...]:
        """Have no shard placed on a node from now on; returns the moves that empty it.

        Raises
        ------
        InvalidRequestError
            No other node has a living store actor.
        """
        if not any(one.node_id not in {node_id, *self.placing.drained} for one in self._fleet.actors()):
            raise InvalidRequestError(
                "no other node has a living store actor, so the shards have nowhere to go; nothing was changed; add a node with an "
                "executor first",
                node=node_id,
            )
        was_drained = node_id in self.placing.drained
        if not dry_run:
            await asyncio.to_thread(self._drained.add, node_id)
        self.placing.drained.add(node_id)
        try:
            return tuple(move for move in await self.rebalance(states) if move.source.node_id == node_id)
        finally:
            if dry_run and not was_drained:
                self.placing.drained.discard(node_id)

    async def undrain(self, node_id: str) -> None:
        """Let shards be placed on a node again."""
        await asyncio.to_thread(self._drained.remove, node_id)
        self.placing.drained.discard(node_id)

    async def prepared(self, move: PlannedMove, preparation: CopyResult | None) -> bool:
        """See :meth:`Coordinator.move_prepared <coordinator.service.coordinator.Coordinator.move_prepared>`."""
        source = await self._holder(move.state_name, move.partition_id)
        if source != move.source or not self._fleet.is_alive(move.target):
            return False
        return self.placing.prepared(move, preparation, self._fleet)

    async def failed(self, move: PlannedMove, error: str) -> None:
        """A move came to nothing: the state's log says why, unless the state was dropped meanwhile."""
        record = MoveFailed(move.partition_id, move.target, move.reason, error)

        def decide(ledger: StateLedger) -> tuple[list[Record], None]:
            return [] if ledger.holder(move.partition_id) is None else [record], None

        await (await self._keeper(move.state_name)).submit(decide)

    async def _checked(self, state_name: str, shard: int) -> range:
        """Partitions of a state's shards, of which there is this one: it may have been rescaled since somebody looked."""
        partitions = await self._partitions(state_name)
        if not 0 <= shard < len(partitions):
            raise InvalidRequestError(
                "there is no such shard (any more); nothing was changed; see `statefleet shards`",
                state=state_name,
                shard=shard,
                shards=len(partitions),
            )
        return partitions

    async def _holder(self, state_name: str, partition_id: int) -> ActorLocation | None:
        return await (await self._keeper(state_name)).submit(lambda ledger: ([], ledger.holder(partition_id)))


def _of(assigned: Mapping[int, ActorLocation], partitions: range) -> dict[int, ActorLocation]:
    """Where some of a state's partitions are."""
    return {partition: where for partition, where in assigned.items() if partition in partitions}

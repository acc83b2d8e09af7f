"""The Protocol of a placement policy: which store actor each shard of a state goes to. Pure.

A policy is asked for a whole state at once: before the first batch of a run, whenever executors or nodes come and go, and when a user
rebalances or drains. It proposes and the coordinator carries out. A shard that no store actor has loaded goes to its proposed
store actor with its next lease. A loaded one is migrated while batches go on (:mod:`coordinator.placement.move_planner`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from coordinator.model.copy_result import CopyResult
from coordinator.model.identities import ActorLocation


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """A store actor on a node that has executors.

    Attributes
    ----------
    location
        The store actor: its name, and its node's Ray id and address.
    cores
        Of the executors on the node, or its share of them where the node has several store actors: tasks that Spark runs there at once.
    """

    location: ActorLocation
    cores: int


def slot_order(slot: ActorSlot) -> tuple[str, str]:
    """Return the key by which slots are sorted, so that the order is the same in every process."""
    return slot.location.node_id, slot.location.actor_name


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The shards of a state, and where they can be.

    Attributes
    ----------
    state_name
        The state.
    query_id
        Its query, by Spark's id. All operators of a query have it in common.
    num_shards
        Its shards are numbered from 0.
    slots
        Live store actors on nodes that have executors, without drained nodes, in :func:`slot_order`. Where no driver has reported
        executors since the coordinator started: all live store actors, with one core each.
    current
        Store actor of each shard that a live one has.
    drained
        Ray ids of the nodes that are to have no shards.
    """

    state_name: str
    query_id: str
    num_shards: int
    slots: tuple[ActorSlot, ...]
    current: Mapping[int, ActorLocation]
    drained: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A store actor for a shard.

    Attributes
    ----------
    location
        The store actor.
    reason
        Why it is this one, in words. The state's log and ``fleet.explain_placement`` have it.
    copy_result
        What the store actor copied of the shard beforehand; None if it loads the shard from its files. Not for policies to set.
    """

    location: ActorLocation
    reason: str = ""
    copy_result: CopyResult | None = None


class PlacementPolicy(Protocol):
    """Assigns shards to store actors.

    A policy runs in the coordinator, whose other answers wait for it: it has to be quick, and uses no I/O. The same request has to give
    the same answer.
    """

    def assign(self, request: PlacementRequest) -> Mapping[int, Choice]:
        """Return choices by shard, for shards that have no store actor yet or are to go to another one.

        A shard without a choice stays where it is; one that has no store actor goes to that of the node whose task asks for it first.
        Choices are of the request's slots. A shard of a drained node has to have one.
        """

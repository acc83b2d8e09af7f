"""Placement policies: which store actor each shard of a state goes to; `balance` and `stay` come with Statefleet. Pure.

A policy is asked for a whole state at once: before the first batch of a run, whenever executors or nodes come and go, and when a user
rebalances or drains. It proposes and the coordinator carries out. A shard that no store actor has loaded goes to its proposed
store actor with its next lease. A loaded one is migrated while batches go on (:mod:`coordinator.placement.lease_plans`).

Spark sends a partition to the executor that its coordinator says has the store, but where a store is at first is chance. Here that is
planned: by the cores that Spark has on each node, in the same order for all operators of a query, and with as few moves as balance
takes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from coordinator.model.identities import ActorLocation
from coordinator.model.leases import CopyResult


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """A store actor on a node that has executors."""

    #: The store actor: its name, and its node's Ray id and address.
    location: ActorLocation
    #: Of the executors on the node, or its share of them where the node has several store actors: tasks that Spark runs there at once.
    cores: int


def slot_order(slot: ActorSlot) -> tuple[str, str]:
    """Return the key by which slots are sorted, so that the order is the same in every process."""
    return slot.location.node_id, slot.location.actor_name


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The shards of a state, and where they can be."""

    state_name: str
    #: Its query, by Spark's id. All operators of a query have it in common.
    query_id: str
    #: Its shards are numbered from 0.
    num_shards: int
    #: Live store actors on nodes that have executors, without drained nodes, in :func:`slot_order`. Where no driver has reported
    #: executors since the coordinator started: all live store actors, with one core each.
    slots: tuple[ActorSlot, ...]
    #: Store actor of each shard that a live one has.
    current: Mapping[int, ActorLocation]
    #: Ray ids of the nodes that are to have no shards.
    drained: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A store actor for a shard."""

    location: ActorLocation
    #: Why it is this one, in words. The state's log and ``fleet.explain_placement`` have it.
    reason: str = ""
    #: What the store actor copied of the shard beforehand; None if it loads the shard from its files. Not for policies to set.
    copy_result: CopyResult | None = None


#: Returns choices by shard, for shards that have no store actor yet or are to go to another one. A shard without a choice stays where
#: it is; one that has no store actor goes to that of the node whose task asks for it first. Choices are of the request's slots. A shard
#: of a drained node has to have one. A policy runs in the coordinator, whose other answers wait for it: it has to be quick, and uses no
#: I/O. The same request has to give the same answer.
PlacementPolicy = Callable[[PlacementRequest], Mapping[int, Choice]]


def stay(request: PlacementRequest) -> Mapping[int, Choice]:
    """Spread shards that no store actor has, as :func:`balance` does, and leave all others where they are.

    Nothing is moved to a node that joins: for states that are too large to copy while batches go on. Shards leave a drained node.
    """
    return {
        shard: choice
        for shard, choice in balance(request).items()
        if shard not in request.current or request.current[shard].node_id in request.drained
    }


def balance(request: PlacementRequest) -> Mapping[int, Choice]:
    """Spread the shards of a state over the store actors by their cores, with as few moves as that takes.

    - A slot gets shards by its cores; a slot that has no more shards than that keeps them. Without any slot nothing is moved.
    - A shard without a store actor goes to its slot in one order, the same for every state of a query that has as many shards. So
      operators whose keys are the same have the same rows on the same node.
    - Each query begins that order at a slot of its own, so that remainders do not all fall to the same slot.
    """
    num_shards, current = request.num_shards, request.current
    ordered = sorted((slot for slot in request.slots if slot.cores > 0), key=slot_order)
    if not ordered:
        return {}
    start = zlib.crc32(request.query_id.encode()) % len(ordered)
    ordered = [*ordered[start:], *ordered[:start]]
    turns = _turns(num_shards, [slot.cores for slot in ordered])
    capacity = Counter(turns)
    # A name belongs to one node for good; its incarnations come and go.
    index_of = {slot.location.actor_name: index for index, slot in enumerate(ordered)}
    kept: dict[int, int] = {}

    def take(index: int) -> None:
        capacity[index] -= 1
        if not capacity[index]:
            del capacity[index]

    # Shards that are where the order has them are kept first, so that what moves restores the order, too.
    for shard in sorted(range(num_shards), key=lambda shard: index_of.get(_name(current.get(shard))) != turns[shard]):
        index = index_of.get(_name(current.get(shard)))
        if index is not None and capacity[index] > 0:
            take(index)
            kept[shard] = index
    choices: dict[int, Choice] = {}
    movable = [shard for shard in range(num_shards) if shard not in kept]
    for shard in sorted(movable, key=lambda shard: capacity[turns[shard]] == 0):
        index = turns[shard] if capacity[turns[shard]] > 0 else next(iter(capacity))
        take(index)
        choices[shard] = Choice(ordered[index].location, _reason(current.get(shard), index_of, request.drained))
    for shard, index in kept.items():
        if current[shard] != ordered[index].location:
            choices[shard] = Choice(ordered[index].location, "the store actor of its node started again")
    return choices


#: Policies by the name that ``connect(placement=..)`` takes.
POLICIES: Mapping[str, PlacementPolicy] = MappingProxyType({"balance": balance, "stay": stay})


def _turns(num_shards: int, weights: Sequence[int]) -> list[int]:
    """Return the slot of each shard if none has one yet: in turns, each slot as often as its weight.

    Smooth weighted round robin, as in nginx: the slot with the most credit is next, the first of those that have as much.
    """
    shares = np.array(weights, np.int64)
    shares //= np.gcd.reduce(shares)
    # All credit is used up after as many turns, and the order repeats.
    period = int(shares.sum())
    credit, turns = np.zeros_like(shares), list[int]()
    for _ in range(min(num_shards, period)):
        credit += shares
        chosen = int(credit.argmax())
        credit[chosen] -= period
        turns.append(chosen)
    return [turns[shard % period] for shard in range(num_shards)]


def _name(location: ActorLocation | None) -> str:
    return "" if location is None else location.actor_name


def _reason(current: ActorLocation | None, index_of: Mapping[str, int], drained: Collection[str]) -> str:
    if current is None:
        return "spread over the nodes that have executors"
    if current.node_id in drained:
        return "the node that had it is drained"
    if current.actor_name not in index_of:
        return "the node that had it has no executor"
    return "the node that had it had more than its cores' share"

"""How the shards of a state are spread over the nodes that have executors. Pure.

Spark sends a partition to where its coordinator says that the store is, but where a store is at first is chance. Here it is planned: by
the cores that Spark has on each node, alike for all operators of a query, and with as few moves as balance takes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.model.identities import ActorLocation
from coordinator.placement.policy import Choice

__all__ = ["ActorSlot", "place_order", "spread"]


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """A store actor on a node that has executors.

    Attributes
    ----------
    cores
        Of the executors on the node, or its share of them, if the node has several store actors: tasks that Spark runs there at once.
    """

    location: ActorLocation
    cores: int


def place_order(place: ActorSlot) -> tuple[str, str]:
    """Key to sort places by, in which everybody has them."""
    return place.location.node_id, place.location.actor_name


def spread(
    num_shards: int,
    places: Sequence[ActorSlot],
    present: Mapping[int, ActorLocation],
    query_id: str,
    drained: Collection[str] = (),
) -> dict[int, Choice]:
    """Shards that are to go elsewhere, or that are nowhere yet, by partition.

    - A place gets shards by its cores; one that has no more than that keeps what it has.
    - A shard that is nowhere goes to its place in one order, the same for every state of a query that has as many shards: operators
      whose keys are the same have the same rows on the same node.
    - Queries begin that order at places of their own, so that what does not divide evenly does not all fall to one.

    Parameters
    ----------
    places
        Store actors of nodes that have executors. Without any nothing is moved.
    present
        Where shards are.
    query_id
        Whose state it is.
    drained
        Nodes that shall have no shards.
    """
    ordered = sorted((place for place in places if place.cores > 0), key=place_order)
    if not ordered:
        return {}
    start = zlib.crc32(query_id.encode()) % len(ordered)
    ordered = [*ordered[start:], *ordered[:start]]
    wanted = _order(num_shards, [place.cores for place in ordered])
    room = Counter(wanted)
    # A name is a node's for good; its lives come and go.
    number = {place.location.actor_name: index for index, place in enumerate(ordered)}
    kept: dict[int, int] = {}

    def take(place: int) -> None:
        room[place] -= 1
        if not room[place]:
            del room[place]

    # Those that are where the order has them stay first, so that what moves mends the order, too.
    for partition in sorted(range(num_shards), key=lambda one: number.get(_name(present.get(one))) != wanted[one]):
        here = number.get(_name(present.get(partition)))
        if here is not None and room[here] > 0:
            take(here)
            kept[partition] = here
    choices: dict[int, Choice] = {}
    rest = [partition for partition in range(num_shards) if partition not in kept]
    for partition in sorted(rest, key=lambda one: room[wanted[one]] == 0):
        there = wanted[partition] if room[wanted[partition]] > 0 else next(iter(room))
        take(there)
        choices[partition] = Choice(ordered[there].location, _reason(present.get(partition), number, drained))
    for partition, here in kept.items():
        if present[partition] != ordered[here].location:
            choices[partition] = Choice(ordered[here].location, "the store actor of its node started anew")
    return choices


def _order(num_shards: int, weights: Sequence[int]) -> list[int]:
    """Which place each partition has if none is anywhere yet: in turns, each place as often as its weight.

    Smooth weighted round robin, as in nginx: the place with the most credit is next, the first one of those that have as much.
    """
    shares = np.array(weights, np.int64)
    shares //= np.gcd.reduce(shares)
    # All credit is used up after as many turns, and it begins anew.
    period = int(shares.sum())
    credit, turns = np.zeros_like(shares), list[int]()
    for _ in range(min(num_shards, period)):
        credit += shares
        chosen = int(credit.argmax())
        credit[chosen] -= period
        turns.append(chosen)
    return [turns[partition % period] for partition in range(num_shards)]


def _name(location: ActorLocation | None) -> str:
    return "" if location is None else location.actor_name


def _reason(present: ActorLocation | None, number: Mapping[str, int], drained: Collection[str]) -> str:
    if present is None:
        return "spread over the nodes that have executors"
    if present.node_id in drained:
        return "the node that had it is drained"
    if present.actor_name not in number:
        return "the node that had it has no executor"
    return "the node that had it had more than its cores' share"

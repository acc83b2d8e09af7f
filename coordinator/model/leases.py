"""Leases of shards, and where shards are."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from coordinator.model.identities import ActorLocation, StateStoreId


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """The location of a partition.

    Attributes
    ----------
    newest_version
        Newest committed version; 0 without any.
    location
        Store actor with its lease; None if it was never leased.
    """

    store_id: StateStoreId
    newest_version: int
    location: ActorLocation | None


class Lease(Struct, frozen=True):
    """The right of one store actor to commit a shard for one run, until there is a higher epoch.

    Attributes
    ----------
    standbys
        Names of the store actors that each commit is replicated to, so that they can take over.
    """

    store_id: StateStoreId
    run_id: str
    epoch: int
    location: ActorLocation
    standbys: tuple[str, ...] = ()

"""Leases of shards, where shards are, and how they came there. Pure."""

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


class CopyResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The copy of a partition that a store actor took from another one before it had the partition's lease.

    Attributes
    ----------
    version
        Newest version of the copy; 0 if there is none: the partition will be loaded from its files.
    moved_bytes
        Bytes of Arrow data that came from the memory of the other store actor.
    """

    version: int
    moved_bytes: int
    duration_ms: int


class ShardMove(Struct, frozen=True, forbid_unknown_fields=True):
    """A shard was given to a store actor, or was to be given to it.

    Attributes
    ----------
    version
        Newest version of the shard then.
    former
        Store actor that had it; None if it was never leased.
    preparation
        The copy that the new one took beforehand, while batches went on; None if it loads the shard from its files.
    error
        Why the shard stayed with `former`; empty if it went to `location`.
    """

    epoch: int
    version: int
    former: ActorLocation | None
    location: ActorLocation
    reason: str
    preparation: CopyResult | None = None
    error: str = ""

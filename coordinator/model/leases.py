"""Leases of shards, where shards are, and how they came there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from coordinator.model.identities import ActorLocation, StateStoreId


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """The location of a partition."""

    store_id: StateStoreId
    #: Newest committed version; 0 without any.
    newest_version: int
    #: Store actor with its lease; None if it was never leased.
    location: ActorLocation | None


class Lease(Struct, frozen=True):
    """The right of one store actor to commit a shard for one run, until there is a higher epoch."""

    store_id: StateStoreId
    run_id: str
    epoch: int
    location: ActorLocation
    #: Names of the store actors that each commit is replicated to, so that they can take over.
    standbys: tuple[str, ...] = ()


class CopyResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The copy of a partition that a store actor took from another one before it had the partition's lease."""

    #: Newest version of the copy; 0 if there is none: the partition will be loaded from its files.
    version: int
    #: Bytes of Arrow data that came from the memory of the other store actor.
    moved_bytes: int
    duration_ms: int


class ShardMove(Struct, frozen=True, forbid_unknown_fields=True):
    """A shard was given to a store actor, or was to be given to it."""

    epoch: int
    #: Newest version of the shard then.
    version: int
    #: Store actor that had it; None if it was never leased.
    former: ActorLocation | None
    location: ActorLocation
    reason: str
    #: The copy that the new one took beforehand, while batches went on; None if it loads the shard from its files.
    preparation: CopyResult | None = None
    #: Why the shard stayed with `former`; empty if it went to `location`.
    error: str = ""

"""The result of copying a partition to its next store actor, and moves of shards. Pure."""

from __future__ import annotations

from msgspec import Struct

from coordinator.model.identities import ActorLocation


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

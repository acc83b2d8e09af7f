"""What a store actor took over of a partition before it was to have it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.model.identities import ActorLocation

__all__ = ["CopyResult", "ShardMove"]


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What a store actor took over of a partition before it was to have it.

    Attributes
    ----------
    version
        Newest version that it held then; 0 for none: it will load the partition from its files.
    moved_bytes
        Bytes of Arrow data that came from the memory of the store actor that had it.
    duration_ms
        How long that took.
    """

    version: int
    moved_bytes: int
    duration_ms: int


@dataclass(frozen=True, slots=True)
class ShardMove:
    """A shard was given to a store actor, or was to be given to it.

    Attributes
    ----------
    version
        Newest version of the shard then: the one that went along.
    former
        Store actor that had it; None if nobody had.
    preparation
        What the new one took over beforehand, while batches went on; None if it loads the shard from its files.
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

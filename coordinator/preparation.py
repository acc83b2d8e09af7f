"""What a store actor took over of a partition before it was to have it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Preparation"]


@dataclass(frozen=True, slots=True)
class Preparation:
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

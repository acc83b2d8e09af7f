"""The protocol of every store of a partition, an operator's shard and a keyed store alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import pyarrow as pa

from coordinator.model.schema import StateSchema
from store_actors.engine.versions import Frozen


class Loadable(Protocol):
    """A store, empty or at some version, that takes the rows of files."""

    def load(self, delta: pa.Table, version: int, watermark_ms: int) -> None:
        """Replay a committed delta, or a file of a snapshot, on top of the newest version."""

    def reserve(self, room: Mapping[str, Any]) -> None:
        """Reserve memory for the rows of a snapshot."""


class VersionedStore(Loadable, Protocol):
    """Rows at their newest version, with the way back to the few versions before.

    A change is pending from the write that makes it until :meth:`commit` or :meth:`abort`.
    """

    @property
    def schema(self) -> StateSchema:
        """Schema of rows and deltas."""

    @property
    def version(self) -> int:
        """The newest committed version."""

    @property
    def watermark_ms(self) -> int:
        """Watermark of the newest version, in milliseconds since the epoch."""

    @property
    def nbytes(self) -> int:
        """Memory of the store, in bytes."""

    def __len__(self) -> int:
        """Return the number of rows, those of a pending change included."""

    def commit(self) -> object:
        """Make the pending change the newest version."""

    def abort(self) -> None:
        """Drop the pending change."""

    def rollback(self, version: int) -> bool:
        """Go back to a retained version; return False (without any effect) if the version must be loaded."""

    def retained(self) -> Collection[int]:
        """Return the versions in memory, oldest first."""

    def frozen(self) -> Frozen:
        """Return all rows of the newest version as they are now, in pieces."""

    def room(self) -> Mapping[str, Any]:
        """Return how much memory the rows need, as JSON values, for :meth:`reserve`."""

"""A store's rows in memory, frozen at one version and read while its partition goes on with batches. No Ray."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Lock
from store_actors.engine.versions import Frozen


@dataclass(frozen=True, slots=True)
class FrozenStore:
    """A store's rows at its newest commit.

    Attributes
    ----------
    pieces
        Copies of rows. Each is taken under the partition's lock, and converted to tables without the lock.
    room
        Sizes that the rows need in memory; see ``VersionedStore.room``.
    """

    entry: CommitEntry
    pieces: Frozen
    room: Mapping[str, Any]
    schema: StateSchema


def tables_of(lock: Lock, pieces: Frozen) -> Generator[pa.Table]:
    """Yield frozen rows as tables. The lock is held only while a piece is copied; batches go on while it is converted."""
    try:
        while True:
            with lock:
                make_tables = next(pieces, None)
            if make_tables is None:
                return
            yield from make_tables()
    finally:
        with lock:
            pieces.close()

"""Rows of a store in memory as they were at one moment, read while its partition goes on. No Ray."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Lock
from store_actors.engine.versions import Frozen

__all__ = ["FrozenStore", "tables_of"]


@dataclass(frozen=True, slots=True)
class FrozenStore:
    """The rows of a counted commit as they are now.

    Attributes
    ----------
    pieces
        Given out under the partition's lock; each is made into tables outside it.
    room
        What the rows need in memory.
    """

    entry: CommitEntry
    pieces: Frozen
    room: Mapping[str, Any]
    schema: StateSchema


def tables_of(lock: Lock, pieces: Frozen) -> Generator[pa.Table]:
    """Yield frozen rows, a piece at a time: under the lock only some are copied, and batches go on while these are made into tables."""
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

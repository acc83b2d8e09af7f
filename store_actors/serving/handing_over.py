"""Handing the rows of a partition from one store actor to another, from memory to memory. No Ray.

The giver freezes its newest version, as for a snapshot, and gives it out piece by piece while its own batches go on. The taker makes
stores of its own of that. What was committed meanwhile it takes from the log, as any partition in memory that is behind
(:mod:`store_actors.serving.lineage`); so nothing rests on the giver's word but the time that is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from coordinator.errors import OperationOutOfOrderError
from coordinator.surroundings import Lock
from store_actors.engine.versions import Frozen
from store_actors.messages import GivenStore, Offer
from store_actors.serving.files import as_snapshot
from store_actors.serving.frozen_store import Locked, tables_of
from store_actors.serving.loading import Loadable

__all__ = ["Given", "Offers", "fill"]

#: Seconds without a call after which a taker is taken for dead: what is frozen for it takes memory.
_IDLE_S = 60.0

#: A store as its taker is told of it, and its rows.
Given = tuple[GivenStore, Frozen]


@dataclass(slots=True)
class _Open:
    pieces: Generator[tuple[int, pa.Table]]
    used_s: float


class Offers:
    """What is being given. Thread-safe.

    Parameters
    ----------
    guard
        Lock of the list itself.
    new_id, elapsed_s
        Makes ids; a clock that only elapses, in seconds.
    """

    def __init__(self, guard: Lock, new_id: Callable[[], str], elapsed_s: Callable[[], float]) -> None:
        self._guard = guard
        self._new_id = new_id
        self._elapsed_s = elapsed_s
        self._open: dict[str, _Open] = {}

    def add(self, held: Locked, version: int, attempt_id: str, deltas: int, given: Sequence[Given]) -> Offer:
        """Offer the rows of a partition's stores; the caller holds the partition's lock."""
        offer_id = self._new_id()
        with self._guard:
            self._open[offer_id] = _Open(_pieces(held, [rows for _, rows in given]), self._elapsed_s())
        return Offer(offer_id, version, attempt_id, deltas, tuple(store for store, _ in given))

    def next_piece(self, offer_id: str) -> tuple[int, pa.Table] | None:
        """The next rows (in ``row_schema``), with the place of their store in the offer; None after the last.

        Raises
        ------
        OperationOutOfOrderError
            The offer was not taken up for long.
        """
        with self._guard:
            found = self._open.get(offer_id)
            if found is None:
                raise OperationOutOfOrderError(
                    "the rows that were offered are not given any more: nobody asked for them for long; nothing was lost; ask anew"
                )
            found.used_s = self._elapsed_s()
        piece = next(found.pieces, None)
        if piece is None:
            self._close(offer_id)
        return piece

    def close_idle(self) -> None:
        """Let go of what nobody takes."""
        horizon = self._elapsed_s() - _IDLE_S
        with self._guard:
            idle = [offer_id for offer_id, one in self._open.items() if one.used_s < horizon]
        for offer_id in idle:
            self._close(offer_id)

    def _close(self, offer_id: str) -> None:
        with self._guard:
            found = self._open.pop(offer_id, None)
        if found is not None:
            found.pieces.close()


def fill(stores: Sequence[Loadable], offer: Offer, pieces: Iterable[tuple[int, pa.Table]]) -> int:
    """Make empty stores what was offered, one each; returns the bytes of the rows."""
    size = 0
    for store, given in zip(stores, offer.stores, strict=True):
        store.reserve(given.room)
        # A store may have no rows, and is at the version nevertheless.
        store.load(
            as_snapshot(given.schema.row_schema().empty_table(), given.schema), offer.version, given.watermark_ms
        )
    for place, rows in pieces:
        given = offer.stores[place]
        stores[place].load(as_snapshot(rows, given.schema), offer.version, given.watermark_ms)
        size += rows.nbytes
    return size


def _pieces(held: Locked, stores: Sequence[Frozen]) -> Generator[tuple[int, pa.Table]]:
    """All rows of some stores, each with its store's place."""
    try:
        for place, rows in enumerate(stores):
            for table in tables_of(held, rows):
                yield place, table
    finally:
        with held.lock:
            for rows in stores:
                rows.close()

"""Handing the rows of a partition from one store actor to another, from memory to memory. No Ray.

The giver freezes its newest version, as for a snapshot, and gives it out piece by piece while its own batches go on. The taker makes
stores of its own of that. What was committed meanwhile it takes from the log, as any partition in memory that is behind
(:mod:`store_actors.serving.lineage`); so nothing rests on the giver's word but the time that is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence

import pyarrow as pa

from coordinator.runtime.runtime import Lock
from store_actors.engine.versions import Frozen
from store_actors.messages import Transfer, TransferredStore
from store_actors.serving.files import as_snapshot
from store_actors.serving.frozen_store import Locked, tables_of
from store_actors.serving.loading import Loadable
from store_actors.serving.piece_streams import PieceStreams

__all__ = ["Given", "Transfers", "fill"]

#: A store as its taker is told of it, and its rows.
Given = tuple[TransferredStore, Frozen]


class Transfers:
    """What is being given. Thread-safe.

    Parameters
    ----------
    guard, new_id, elapsed_s
        See :class:`~store_actors.serving.piece_streams.PieceStreams`.
    """

    def __init__(self, guard: Lock, new_id: Callable[[], str], elapsed_s: Callable[[], float]) -> None:
        self._pulled: PieceStreams[tuple[int, pa.Table]] = PieceStreams(guard, new_id, elapsed_s)
        #: The next rows (in ``row_schema``), with the place of their store in the offer; None after the last.
        self.next_piece = self._pulled.next_piece
        self.close_idle = self._pulled.close_idle

    def add(self, held: Locked, version: int, attempt_id: str, deltas: int, given: Sequence[Given]) -> Transfer:
        """Offer the rows of a partition's stores; the caller holds the partition's lock."""
        offer_id = self._pulled.add(_pieces(held, [rows for _, rows in given]))
        return Transfer(offer_id, version, attempt_id, deltas, tuple(store for store, _ in given))


def fill(stores: Sequence[Loadable], offer: Transfer, pieces: Iterable[tuple[int, pa.Table]]) -> int:
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

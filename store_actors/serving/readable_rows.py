"""Versions of stores that are read beside the batches. No Ray."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from coordinator.runtime.runtime import Lock
from store_actors.engine.table_view import Found, ShardView
from store_actors.serving.frozen_store import tables_of

#: Keys that are looked for under the lock at once: a batch waits for no more than these.
_KEYS_AT_ONCE = 1 << 14


class Views:
    """Views of the versions of a partition's stores. They are kept, with an overlay of what changed since."""

    def __init__(self) -> None:
        self._views: dict[tuple[str, int], ShardView] = {}

    @property
    def nbytes(self) -> int:
        """Memory held besides the stores', in bytes."""
        return sum(view.nbytes for view in self._views.values())

    def of(self, store_name: str, version: int, make: Callable[[], ShardView]) -> ShardView:
        """Return a view that memory still has the version of."""
        view = self._views.get((store_name, version))
        if view is None or not view.is_there:
            self._views = {which: view for which, view in self._views.items() if view.is_there}
            view = self._views[store_name, version] = make()
        return view

    def clear(self) -> None:
        """Let go of all: their stores are others now."""
        self._views.clear()


@dataclass(frozen=True, slots=True)
class ReadableRows:
    """A version of a store.

    Attributes
    ----------
    lock
        Taken while rows are looked for or copied, and never for longer.
    """

    lock: Lock
    view: ShardView

    def find(self, keys: pa.Table, columns: Sequence[str]) -> Iterator[Found]:
        """Find keys, a block at a time, as :meth:`ShardView.find <store_actors.engine.table_view.ShardView.find>`."""
        begin = 0
        for batch in keys.to_batches(max_chunksize=_KEYS_AT_ONCE):
            with self.lock:
                indices, rows = self.view.find(batch, columns)
            yield indices + begin, rows
            begin += batch.num_rows

    def scan(self, columns: Sequence[str]) -> Generator[pa.Table]:
        """Yield all rows as they are now, in pieces."""
        with self.lock:
            pieces = self.view.frozen(columns)
        with closing(tables_of(self.lock, pieces)) as tables:
            yield from tables

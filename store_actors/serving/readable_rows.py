"""Rows of committed versions, read beside the batches: in memory, by a view or frozen; in files; in pieces, by remote callers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import OperationOutOfOrderError, VersionNotFoundError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan, LoadPlans
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Lock, Runtime
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table_view import Found, ShardView
from store_actors.engine.versions import Frozen
from store_actors.serving.loading import Loader
from store_actors.serving.store_formats import StoreFormat, newest_spec, store_format
from store_actors.spilling.store_memory import StoreMemory

#: Keys that are looked for under the lock at once: a batch waits for no more than these.
_KEYS_AT_ONCE = 1 << 14
Piece = TypeVar("Piece")
#: Seconds without a call after which a caller is taken for dead and its stream is closed, as streams take memory.
_IDLE_S = 60.0
#: Each commit, the rows that it changed (``__change`` is the last column), and their schema.
Changes: TypeAlias = Iterator[tuple[CommitEntry, pa.Table, StateSchema]]


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


@dataclass(frozen=True, slots=True)
class FrozenStore:
    """A store's rows at its newest commit.

    Attributes
    ----------
    pieces
        Copies of rows. Each is taken under the partition's lock, and converted to tables without the lock.
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


@dataclass(slots=True)
class _Stream(Generic[Piece]):
    pieces: Generator[Piece]
    used_s: float


class PieceStreams(Generic[Piece]):
    """Open streams by id. Thread-safe."""

    def __init__(self, guard: Lock, new_id: Callable[[], str], elapsed_s: Callable[[], float]) -> None:
        self._guard = guard
        self._new_id = new_id
        self._elapsed_s = elapsed_s
        self._streams: dict[str, _Stream[Piece]] = {}

    def add(self, pieces: Generator[Piece]) -> str:
        """Keep a stream of pieces; return its id."""
        stream_id = self._new_id()
        with self._guard:
            self._streams[stream_id] = _Stream(pieces, self._elapsed_s())
        return stream_id

    def next_piece(self, stream_id: str) -> Piece | None:
        """Return the next piece; None after the last.

        Raises
        ------
        OperationOutOfOrderError
            The caller made no call for ``_IDLE_S``, or the process has restarted.
        """
        with self._guard:
            stream = self._streams.get(stream_id)
            if stream is None:
                raise OperationOutOfOrderError(
                    "the offered rows are not available any more: no call came for them for a minute; nothing was lost; "
                    "ask again"
                )
            stream.used_s = self._elapsed_s()
        piece = next(stream.pieces, None)
        if piece is None:
            self.close(stream_id)
        return piece

    def keep(self, stream_ids: Iterable[str]) -> None:
        """Keep streams open whose callers are alive and will read on later."""
        now_s = self._elapsed_s()
        with self._guard:
            for stream_id in stream_ids:
                if (stream := self._streams.get(stream_id)) is not None:
                    stream.used_s = now_s

    def close_idle(self) -> None:
        """Close streams without a call for ``_IDLE_S``."""
        horizon = self._elapsed_s() - _IDLE_S
        with self._guard:
            idle = [stream_id for stream_id, stream in self._streams.items() if stream.used_s < horizon]
        for stream_id in idle:
            self.close(stream_id)

    def close(self, stream_id: str) -> None:
        """Close a stream, which may be closed already."""
        with self._guard:
            stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.pieces.close()


class StoredRows:
    """Reads versions of stores from their files."""

    def __init__(self, loader: Loader, runtime: Runtime, memory: StoreMemory) -> None:
        self._loader = loader
        self._seed = runtime.hash_seed
        self.memory = memory

    def view(
        self, store_id: StateStoreId, version: int, loading: LoadPlans, schema: StateSchema | None
    ) -> tuple[ShardView, int]:
        """Return a store at the version of the load plans, and the bytes that its rows take in memory.

        Parameters
        ----------
        schema
            Schema of an operator's shard; None for a keyed store, which is read in the columns of its newest file.

        Raises
        ------
        CorruptStateError
            A file that it needs is missing or damaged.
        VersionNotFoundError
            The partition has no such store at the version.
        """
        plan = loading.plans[store_id.store_name]
        with self.memory.loading(store_id, version):
            row_format = self._format(plan, store_id, schema, self.memory.region(store_id))
            store, _ = row_format.load(self._loader, plan)
            return row_format.view(store, store.version), store.nbytes

    def changes(self, store_id: StateStoreId, loading: LoadPlans, since: int, schema: StateSchema | None) -> Changes:
        """Yield the changes that each commit after version `since`, up to the version of the load plans, made to a store.

        Parameters
        ----------
        schema
            See :meth:`view`.

        Raises
        ------
        VersionNotFoundError
            Some of these commits are not retained, or the partition has no such store.
        CorruptStateError
            A file is missing or damaged.
        StateMismatchError
            A column of a keyed store has changed its type, and an older value cannot be converted.
        """
        plan = loading.plans[store_id.store_name]
        row_format = self._format(plan, store_id, schema, HEAP)
        adapt = row_format.adapter(plan)
        for entry in _commits_since(plan, store_id, since):
            yield entry, adapt(self._loader.read(entry), entry.file), row_format.schema

    def _format(
        self, plan: LoadPlan, store_id: StateStoreId, schema: StateSchema | None, memory: Memory
    ) -> StoreFormat:
        definition = newest_spec(self._loader, plan, store_id) if schema is None else schema
        return store_format(definition, self._seed, memory)


def _commits_since(plan: LoadPlan, store_id: StateStoreId, since: int) -> Sequence[CommitEntry]:
    first = 0 if plan.origin is None else plan.origin.version
    if since < max(plan.oldest_retained, first):
        raise VersionNotFoundError(
            "what changed since this version is not known any more: its commits are not retained, or the state was rescaled since; "
            "nothing was changed; ask for changes since a later one, or compare two versions",
            state=store_id.state_name,
            partition=store_id.partition_id,
            version=since,
            oldest=max(plan.oldest_retained, first),
        )
    return [entry for entry in plan.deltas if entry.version > since]

"""Reads of versions of the shards and keyed stores of one process, beside its batches. No Ray.

A version that memory has is read there, under a lock that batches take only while rows change. Any other one that is retained is loaded
for its readers, and kept for as long as they come and there is room for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import StateStoreError, VersionNotFoundError
from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.load_plans import LoadPlan, LoadPlans
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Lock, Runtime
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table_view import ShardView
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED
from store_actors.messages.key_queries import FoundRows, KeyQuery, KeyResult, KeyResults
from store_actors.messages.requests import CHANGE_FIELDS, DELETE, UPSERT, ReadProjection, ReadRequest
from store_actors.operators.view_columns import ViewColumns
from store_actors.serving.hot_key_tracker import HotKeyTracker
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition import ReadableRows
from store_actors.serving.restoring import READ_BYTES, PartitionCache, StoreMemory
from store_actors.serving.sessions import PieceStreams
from store_actors.serving.store_formats import StoreFormat, newest_spec, store_format

#: Versions that are kept loaded for readers, at most, and the seconds for which each is kept after its last read.
_LOADED = 32
_IDLE_S = 60.0
#: A version whose rows take more than 1 / `_LARGE` of the bytes that may be kept is loaded alone, since `_LARGE` threads read.
_LARGE = 8


#: Each commit, the rows that it changed (``__change`` is the last column), and their schema.
Changes: TypeAlias = Iterator[tuple[CommitEntry, pa.Table, StateSchema]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    rows: ReadableRows
    nbytes: int
    used_s: float


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


class Planner(Protocol):
    """A source of load plans of versions."""

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        """Return the files of a version, as :meth:`Coordinator.load_plans <coordinator.service.coordinator.Coordinator.load_plans>`."""


class Reads:
    """Reads of one process. Thread-safe.

    Parameters
    ----------
    resident
        What the process has in memory; None where no fleet runs.
    most_bytes
        Most memory for versions that are loaded and kept; one that takes more by itself is read, and kept until the next is loaded.
    """

    def __init__(
        self,
        stored: StoredRows,
        resident: PartitionCache | None,
        coordinator: Planner,
        runtime: Runtime,
        metrics: StoreMetrics,
        hot_keys: HotKeyTracker,
        most_bytes: int = READ_BYTES,
    ) -> None:
        self._stored, self._resident = stored, resident
        self._coordinator = coordinator
        self._metrics, self._hot_keys = metrics, hot_keys
        self._elapsed_s = runtime.clock.elapsed_s
        self._new_lock = runtime.threads.lock
        self._guard = self._new_lock()
        self._most_bytes = most_bytes
        self._one_large = self._new_lock()
        self._loading: dict[tuple[StateStoreId, int, str], Lock] = {}
        self._loaded: OrderedDict[tuple[StateStoreId, int, str], _Loaded] = OrderedDict()
        self._scans: PieceStreams[pa.Table] = PieceStreams(self._new_lock(), runtime.new_id, self._elapsed_s)
        #: The next rows of a scan; None after the last.
        self.next_rows = self._scans.next_piece
        self.end_scan = self._scans.close
        self.keep_scans = self._scans.keep

    # -- answers --------------------------------------------------------------------------------------------------

    def answer(self, query: bytes) -> bytes:
        """Return :meth:`find_all` of a query as bytes, in bytes: a caller without Ray gets it in this form."""
        return self.find_all(KeyQuery.decoded(query)).encoded()

    def find_all(self, query: KeyQuery) -> KeyResults:
        """Find keys in some stores, and count them; a store that fails does not keep the others from being read."""
        return KeyResults([self._found(request, keys) for request, keys in query])

    def _found(self, request: ReadRequest, keys: pa.Table) -> KeyResult:
        try:
            rows = self.find(request, keys)
        except StateStoreError as error:
            return error
        self._metrics.look_ups += keys.num_rows
        self._hot_keys.looked_up(request.store_id.state_name, request.store_id.partition_id, keys)
        return rows

    def find(self, request: ReadRequest, keys: pa.Table) -> FoundRows | None:
        """Return the rows with some keys.

        Parameters
        ----------
        keys
            Columns of the schema's ``input_keys``, as state holds them.

        Returns
        -------
        FoundRows or None
            None if another attempt made the version again since the reader asked the coordinator.
        """
        projection, newest = _projection_of(request.projection), self._newest(request)
        version, attempt_id = _version_to_read(request, newest)
        rows = self._rows(request, projection, version, attempt_id)
        if rows is None:
            return None
        view_columns = _view_columns(request, rows.view.schema)
        key_indices, tables = [], []
        with self._stored.memory.using(_partition(request.store_id)):
            for indices, table in rows.find(keys, view_columns.needed(projection.columns)):
                is_of_component = view_columns.is_of_part(table)
                key_indices.append(indices if is_of_component is None else indices[is_of_component.to_numpy()])
                tables.append(view_columns.rows(table, projection.columns))
        if len(tables) == 1:
            return FoundRows(version, newest[0], key_indices[0], tables[0])
        nothing = view_columns.schema.empty_table()
        if projection.columns is not None:
            nothing = nothing.select(list(projection.columns))
        every = np.concatenate([np.empty(0, np.int64), *key_indices])
        return FoundRows(version, newest[0], every, pa.concat_tables([nothing, *tables]))

    def scan(self, request: ReadRequest, limit: int | None) -> str | None:
        """Start a scan of at most `limit` rows or changes; return its id, or None as :meth:`find`."""
        projection = _projection_of(request.projection)
        if request.since is not None:
            changes = self._changes(request, projection, request.since)
            return None if changes is None else self._scans.add(_limited(changes, limit))
        if request.snapshot is None:
            rows = self._rows(request, projection, *_version_to_read(request, self._newest(request)))
        else:
            loaded = self._load((request.store_id, request.version, request.attempt_id), projection, request.snapshot)
            rows = None if loaded is None else loaded.rows
        if rows is None:
            return None
        return self._scans.add(
            _limited(_projected_rows(rows, _view_columns(request, rows.view.schema), projection), limit)
        )

    def _changes(self, request: ReadRequest, projection: ReadProjection, since: int) -> Iterator[pa.Table] | None:
        store_id = request.store_id
        names = (store_id.store_name,)
        loading = self._coordinator.load_plans(store_id.state_name, store_id.partition_id, request.version, names)
        if loading.attempt_id != request.attempt_id:
            return None
        return _projected_changes(
            self._stored.changes(store_id, loading, since, projection.shard_schema), request, projection
        )

    def describe(self, request: ReadRequest) -> StateSchema | None:
        """Return the columns of a store; None as :meth:`find`."""
        rows = self._rows(
            request, _projection_of(request.projection), *_version_to_read(request, self._newest(request))
        )
        return None if rows is None else rows.view.schema

    def maintain(self) -> None:
        """Drop scans and loaded versions that no reader uses any more."""
        self._scans.close_idle()
        horizon = self._elapsed_s() - _IDLE_S
        with self._guard:
            while self._loaded and next(iter(self._loaded.values())).used_s < horizon:
                self._loaded.popitem(last=False)

    # -- rows of a version ----------------------------------------------------------------------------------------

    def _newest(self, request: ReadRequest) -> tuple[int, str]:
        return (-1, "") if self._resident is None else self._resident.newest(_partition(request.store_id))

    def _rows(
        self, request: ReadRequest, projection: ReadProjection, version: int, attempt_id: str
    ) -> ReadableRows | None:
        store_id = request.store_id
        if self._resident is not None:
            rows = self._resident.view(_partition(store_id), store_id.store_name, version, attempt_id)
            # Of an operator whose query was changed since, rows are shown as the version had them.
            if rows is not None and projection.shard_schema in (None, rows.view.schema):
                return rows
        key = store_id, version, attempt_id
        with self._guard:
            lock = self._loading.setdefault(key, self._new_lock())
        try:
            with lock:
                return self._kept(key) or self._load_and_keep(key, projection)
        finally:
            with self._guard:
                self._loading.pop(key, None)

    def _kept(self, key: tuple[StateStoreId, int, str]) -> ReadableRows | None:
        with self._guard:
            kept = self._loaded.pop(key, None)
            if kept is None:
                return None
            self._loaded[key] = replace(kept, used_s=self._elapsed_s())
            return kept.rows

    def _load_and_keep(self, key: tuple[StateStoreId, int, str], projection: ReadProjection) -> ReadableRows | None:
        loaded = self._load(key, projection)
        if loaded is None:
            return None
        with self._guard:
            self._loaded[key] = loaded
        self._make_room(0)
        return loaded.rows

    def _make_room(self, more: int) -> None:
        """Evict least recently used versions until `more` bytes fit; with `more` 0 the newest stays."""
        with self._guard:
            kept = sum(loaded.nbytes for loaded in self._loaded.values())
            while self._loaded and (kept + more > self._most_bytes or len(self._loaded) > _LOADED):
                if not more and len(self._loaded) == 1:
                    return
                kept -= self._loaded.popitem(last=False)[1].nbytes

    def _load(
        self, key: tuple[StateStoreId, int, str], projection: ReadProjection, snapshot: int | None = None
    ) -> _Loaded | None:
        """Load a version from its files, from a snapshot on if `snapshot` names it; return None as :meth:`find`."""
        store_id, version, attempt_id = key
        loading = self._coordinator.load_plans(
            store_id.state_name, store_id.partition_id, version, (store_id.store_name,)
        )
        if loading.attempt_id != attempt_id:
            return None
        if snapshot is not None:
            loading = structs.replace(
                loading, plans={name: plan.beginning_with(snapshot) for name, plan in loading.plans.items()}
            )
        size = loading.state_bytes()
        with self._one_large if size > self._most_bytes // _LARGE else nullcontext():
            self._make_room(size)
            view, nbytes = self._stored.view(store_id, version, loading, projection.shard_schema)
            return _Loaded(ReadableRows(self._new_lock(), view), nbytes, self._elapsed_s())


@lru_cache(maxsize=256)
def _projection_of(encoded: bytes) -> ReadProjection:
    """Return a projection from the bytes in which it was sent; readers send the same for many keys."""
    return ReadProjection.decoded(encoded)


@lru_cache(maxsize=256)
def _columns(encoded: bytes) -> ViewColumns:
    projection = _projection_of(encoded)
    assert projection.schema is not None
    return ViewColumns.of(projection.schema, projection.part)


def _view_columns(request: ReadRequest, schema: StateSchema) -> ViewColumns:
    """Return the view schema of a request: the one that the state describes, else the stored columns in `schema`."""
    return ViewColumns.of(schema) if _projection_of(request.projection).schema is None else _columns(request.projection)


@lru_cache(maxsize=4096)
def _partition(store_id: StateStoreId) -> StateStoreId:
    return structs.replace(store_id, store_name=DEFAULT_STORE)


def _version_to_read(request: ReadRequest, newest: tuple[int, str]) -> tuple[int, str]:
    if request.is_latest and newest[0] > request.version:
        return newest
    return request.version, request.attempt_id


def _limited(pieces: Iterator[pa.Table], limit: int | None) -> Generator[pa.Table]:
    remaining = limit
    for piece in pieces:
        rows = piece if remaining is None else piece.slice(0, remaining)
        if remaining is not None:
            remaining -= rows.num_rows
        if rows.num_rows:
            yield rows
        if remaining == 0:
            return


def _projected_changes(changes: Changes, request: ReadRequest, projection: ReadProjection) -> Iterator[pa.Table]:
    """Yield changes as readers see them: what they did, in which version and when comes last."""
    columns = _scanned_columns(projection)
    for entry, table, schema in changes:
        view_columns = _view_columns(request, schema)
        needed = list(view_columns.needed(columns))
        is_of_component = view_columns.is_of_part(table.select(needed))
        changed = table if is_of_component is None else table.filter(is_of_component)
        rows = view_columns.rows(changed.select(needed), columns)
        kinds = pc.if_else(pc.equal(changed.column(CHANGE_COLUMN), UPDATED), UPSERT, DELETE)
        at = pa.scalar(1000 * entry.committed_at_ms, CHANGE_FIELDS[2].type)
        facts = [kinds, *(pa.repeat(fact, rows.num_rows) for fact in (pa.scalar(entry.version), at))]
        for field, column in zip(CHANGE_FIELDS, facts, strict=True):
            rows = rows.append_column(field, column)
        yield _projected(rows, projection, [field.name for field in CHANGE_FIELDS])


def _projected_rows(rows: ReadableRows, view_columns: ViewColumns, projection: ReadProjection) -> Iterator[pa.Table]:
    """Yield all rows for which the filter is true, as they are shown."""
    columns = _scanned_columns(projection)
    with closing(rows.scan(view_columns.needed(columns))) as tables:
        for table in tables:
            yield _projected(view_columns.rows(table, columns), projection)


def _scanned_columns(projection: ReadProjection) -> Sequence[str] | None:
    """Return the columns that a scan needs: those that it returns, and those of its filter."""
    if projection.filter is None or projection.columns is None:
        return projection.columns
    # Without their names the filter may look at any.
    return None if projection.filtered is None else [*dict.fromkeys((*projection.columns, *projection.filtered))]


def _projected(rows: pa.Table, projection: ReadProjection, further: Sequence[str] = ()) -> pa.Table:
    if projection.filter is not None:
        rows = rows.filter(projection.filter)
    return rows if projection.columns is None else rows.select([*projection.columns, *further])


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

"""The shards of stateful operators that one process holds. No Ray in here.

Life of a request: position the shard at the version the batch reads (in memory if it can, else from the manifest's delta
files), apply, commit (:mod:`store_actors.serving.commits`). A repeated request gets the recorded rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.load_plans import LoadPlans
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Lock, Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.engine.results import results_of
from store_actors.engine.table_view import ShardView
from store_actors.engine.versions import Change
from store_actors.messages import ApplyRequest, ShardInput, Transfer, TransferredStore
from store_actors.operators.make_shard import OperatorShard, make_shard, view_of
from store_actors.serving.commits import CommitReplicator, Commits, Delta, describe_commit
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.evolution import groups_adapter
from store_actors.serving.files import PIECE_BYTES, as_snapshot, schema_of
from store_actors.serving.frozen_store import FrozenStore
from store_actors.serving.lineage import Lineage
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition_cache import PartitionCache, ServedPartitions
from store_actors.serving.readable_rows import Views
from store_actors.serving.reading_order import InMemory, nothing_in_memory
from store_actors.serving.stored_rows import Changes, LoadedView, operator_changes, operator_view
from store_actors.serving.transfers import Given, fill
from store_actors.spilling.store_memory import StoreMemory, UnlimitedMemory

__all__ = ["OperatorShards"]

#: Times the bytes of rows that a batch changes: as they were, as they are, as Arrow data, in a delta, and for the task that gets them.
_CHANGED = 6


@dataclass(slots=True)
class _HeldShard:
    """A shard in memory; see :class:`~store_actors.serving.partition_cache.Held`.

    Attributes
    ----------
    emitted
        Rows that the newest commit emitted, for a retry of the task that made it.
    """

    lock: Lock
    changing: Lock
    lineage: Lineage = field(default_factory=Lineage)
    views: Views = field(default_factory=Views)
    shard: OperatorShard | None = None
    emitted: pa.Table | None = None
    #: A shard is changed under its lock only.
    is_busy: bool = False

    def frozen(self) -> Sequence[FrozenStore]:
        if self.shard is None:
            return ()
        return [
            FrozenStore(entry, self.shard.frozen(), self.shard.room(), self.shard.schema)
            for entry in self.lineage.newest
        ]

    def given(self) -> Sequence[Given]:
        if self.shard is None:
            return ()
        shard = self.shard
        described = TransferredStore(DEFAULT_STORE, None, shard.schema, shard.room(), shard.watermark_ms)
        return [(described, shard.frozen())]

    def view(self, store_name: str, version: int) -> ShardView | None:
        shard = self.shard
        if shard is None or version not in shard.retained():
            return None
        return self.views.of(store_name, version, lambda: view_of(shard, version))

    def rollback(self, version: int) -> bool:
        with self.changing:
            return self.shard is not None and self.shard.rollback(version)

    def catch_up(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        assert self.shard is not None
        plan, schema = loading.plans[DEFAULT_STORE], self.shard.schema
        with self.changing:
            return loader.replay(self.shard, plan, self.lineage.version, groups_adapter(plan, schema))

    def replicate(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        assert self.shard is not None
        (entry,), (delta,) = entries, rows
        if schema_of(delta) != self.shard.schema:
            return False
        with self.changing:
            self.shard.load(delta, entry.version, entry.watermark_ms)
        return True

    def forget(self) -> None:
        with self.changing:
            self.shard = self.emitted = None
            self.views.clear()
            self.lineage.forget()

    evict = forget


@dataclass(slots=True)
class _PendingChange:
    """A change of a shard that waits for its commit; see :class:`~store_actors.serving.commits.Pending`.

    Attributes
    ----------
    change
        The own attempt's change, once it was applied.
    emitted
        What the batch emits, once it is known which attempt counts.
    """

    shard: OperatorShard
    changing: Lock
    change: Change | None = None
    emitted: pa.Table | None = None

    def commit(self) -> None:
        assert self.change is not None
        with self.changing:
            self.shard.commit()
        self.emitted = self._emitted(self.change.delta)

    def abort(self) -> None:
        with self.changing:
            self.shard.abort()

    def adopt(self, entry: CommitEntry, rows: pa.Table) -> None:
        with self.changing:
            self.shard.load(rows, entry.version, entry.watermark_ms)
        self.emitted = self._emitted(rows)

    def _emitted(self, delta: pa.Table) -> pa.Table:
        # In complete mode the whole version is emitted, which is nothing to keep beside the shard.
        if self.shard.schema.output_mode == "complete":
            return delta.slice(0, 0)
        # What cannot be read off a delta is the same for every attempt: it follows from the version and the rows.
        assert self.change is not None
        emitted = self.shard.output(delta) if self.change.emitted is None else self.change.emitted
        return results_of(emitted, self.shard.schema)


class _NothingPending:
    """Of an import, which memory has no part in; see :class:`~store_actors.serving.commits.Pending`."""

    def commit(self) -> None:
        """Memory stays empty."""

    abort = commit

    def adopt(self, entry: CommitEntry, rows: pa.Table) -> None:
        """Memory stays empty, whichever attempt counts."""


class OperatorShards(ServedPartitions[_HeldShard]):
    """Shards of one process. Thread-safe: one lock a shard, so shards proceed side by side.

    Parameters
    ----------
    objects
        Where deltas are written.
    coordinator
        Who counts commits.
    metrics
        Counters of the process.
    piece_bytes
        Bytes of rows from which on a file of a snapshot is closed, and another one begun.
    memory
        The process's memory.
    """

    def __init__(
        self,
        objects: ObjectStore,
        coordinator: CoordinatorRef,
        metrics: StoreMetrics | None = None,
        runtime: Runtime | None = None,
        piece_bytes: int = PIECE_BYTES,
        standbys: CommitReplicator | None = None,
        memory: StoreMemory | None = None,
    ) -> None:
        self._memory = memory = memory or UnlimitedMemory()
        piece_bytes = min(piece_bytes, memory.file_bytes)
        runtime = runtime or Runtime()
        self.metrics = metrics or StoreMetrics()
        self._coordinator = coordinator
        self._hash_seed = runtime.hash_seed
        self._clock = runtime.clock
        self._loader = Loader(objects, self.metrics, runtime, memory.ahead_bytes)
        self._commits = Commits(
            objects, coordinator, self._loader, self.metrics, runtime, piece_bytes, standbys=standbys
        )
        self._held = PartitionCache(_HeldShard, runtime, coordinator, self._commits, self._loader, self.metrics, memory)

    def apply(self, request: ApplyRequest, rows: ShardInput) -> tuple[pa.Table, CommitEntry]:
        """Fold a task's rows into its shard, commit, and return what the batch emits with its manifest entry.

        A repeated call for a version that the same run has committed changes nothing and returns the same rows.

        Raises
        ------
        FencedError
            A newer owner or run holds the shard; nothing was counted.
        CorruptStateError
            A delta that the shard needs is missing or damaged.
        StorageUnavailableError, StoreUnavailableError, CommitUnknownError
            Storage or coordinator failed; the shard is dropped from memory and read again at the next call.
        """
        held = self._held.of(request.lease.store_id)
        with held.lock:
            if held.lineage.recorded(request.task.run_id, request.task.batch_id + 1):
                # A retried or doubled task.
                self.metrics.replayed_answers += 1
            else:
                shard = self._position(held, request)
                with self._working(shard, request, rows):
                    self._commit(held, shard, request, rows)
            assert held.shard is not None
            assert held.emitted is not None
            (entry,) = held.lineage.newest
            if request.schema.output_mode == "complete":
                with self._memory.using(request.lease.store_id):
                    return results_of(held.shard.snapshot(), request.schema), entry
            return held.emitted, entry

    def _working(self, shard: OperatorShard, request: ApplyRequest, rows: ShardInput) -> AbstractContextManager[None]:
        """Memory for a batch: for its rows as words, and what it changes as it was, as it is, and on its way out."""
        given, count = (sum(of(table) for table in rows.tables) for of in (_bytes, len))
        size = shard.row_bytes + given // max(1, count)
        if len(shard) > count:
            size = max(size, shard.nbytes // len(shard))
        version = request.task.batch_id + 1
        return self._memory.working(request.lease.store_id, version, 2 * given, 3 * given + _CHANGED * count * size)

    def _position(self, held: _HeldShard, request: ApplyRequest) -> OperatorShard:
        """The shard at the version that the batch reads."""
        lease, base = request.lease, request.base_version
        if held.shard is not None and held.shard.schema != request.schema:
            # The query was changed: its state is read again, in the new schema.
            held.forget()
        run_id = request.task.run_id
        if not held.lineage.is_hot(lease.epoch, run_id, base):
            begun_s, load_bytes = self._clock.elapsed_s(), 0
            loading = self._held.restore(held, lease.store_id, run_id, base, (DEFAULT_STORE,))
            if not held.lineage.is_loaded:
                with self._memory.loading(lease.store_id, base):
                    in_memory = self._in_memory(request)
                    held.shard, deltas = self._loaded(lease.store_id, loading, request.schema, in_memory)
                held.lineage.loaded(base, loading.attempt_id, deltas)
                load_bytes = loading.file_bytes()
            held.lineage.leased(lease.epoch, run_id, round(1000 * (self._clock.elapsed_s() - begun_s)), load_bytes)
        assert held.shard is not None
        return held.shard

    def _in_memory(self, request: ApplyRequest) -> InMemory:
        """What memory has of the shards that one of a rescaled state is made of, in the request's schema."""

        def is_wanted(store: TransferredStore) -> bool:
            return store.schema == request.schema

        return partial(self._held.rows_in_memory, request.lease.store_id, DEFAULT_STORE, is_wanted)

    def _loaded(
        self,
        store_id: StateStoreId,
        loading: LoadPlans,
        schema: StateSchema,
        in_memory: InMemory = nothing_in_memory,
    ) -> tuple[OperatorShard, int]:
        """A shard from its files, and from what memory has of others; and how many deltas were replayed."""
        plan = loading.plans[DEFAULT_STORE]
        return self._loader.load(lambda: self._made(store_id, schema), plan, groups_adapter(plan, schema), in_memory)

    def _made(self, store_id: StateStoreId, schema: StateSchema) -> OperatorShard:
        """An empty shard."""
        return make_shard(schema, self._hash_seed, self._memory.region(store_id))

    def _commit(self, held: _HeldShard, shard: OperatorShard, request: ApplyRequest, rows: ShardInput) -> None:
        pending = _PendingChange(shard, held.changing)

        def describe(attempt_id: str, now_ms: int) -> Sequence[Delta]:
            watermarks = request.watermarks
            with held.changing:
                try:
                    pending.change = shard.apply(rows, watermarks.input_ms, request.task.batch_id + 1, request.late_ms)
                except BaseException:
                    # Nobody reads what is half changed.
                    held.forget()
                    raise
            delta = describe_commit(
                pending.change,
                task=request.task,
                lease=request.lease,
                store_id=request.lease.store_id,
                attempt_id=attempt_id,
                committed_at_ms=now_ms,
                schema=request.schema,
                state_rows=len(shard),
                state_bytes=shard.nbytes,
                watermarks=replace(
                    watermarks, output_ms=max(watermarks.output_ms, shard.output_watermark_ms(watermarks.input_ms))
                ),
            )
            return (delta,)

        try:
            self._commits.commit(request.lease, held.lineage, pending, describe)
        except BaseException:
            # The shard may be half changed, or the commit counted after all: memory is no longer the truth, so it goes.
            held.forget()
            raise
        assert pending.emitted is not None
        held.emitted = self._memory.kept(request.lease.store_id, pending.emitted)

    def import_rows(self, request: ApplyRequest, rows: pa.Table) -> CommitEntry:
        """Make rows of state, as they are, the first version of a shard, of a query that kept its state elsewhere until then.

        A repeated call changes nothing. Memory has none of it afterwards: the query's first batch reads the file.

        Raises
        ------
        InvalidRequestError
            The shard has an earlier version.
        FencedError
            A newer owner or run holds the shard; nothing was counted.
        StorageUnavailableError, StoreUnavailableError, CommitUnknownError
            Storage or coordinator failed; the import is to be repeated.
        """
        task, version = request.task, request.task.batch_id + 1
        # A standby would take a copy of what no memory has.
        lease = replace(request.lease, standbys=())
        if request.base_version:
            raise InvalidRequestError(
                "a state is imported as its first version, and this one has others; nothing was changed; use another name",
                state=task.state_name,
                version=request.base_version,
            )
        watermarks = request.watermarks
        change = Change(
            version=version,
            base_version=0,
            delta=as_snapshot(rows, request.schema),
            rows_updated=rows.num_rows,
            rows_removed=0,
            rows_in=0,
            rows_late=0,
            watermark_ms=watermarks.input_ms,
        )

        def describe(attempt_id: str, now_ms: int) -> Sequence[Delta]:
            delta = describe_commit(
                change,
                task=task,
                lease=lease,
                store_id=lease.store_id,
                attempt_id=attempt_id,
                committed_at_ms=now_ms,
                schema=request.schema,
                state_rows=rows.num_rows,
                state_bytes=_bytes(rows),
                watermarks=watermarks,
            )
            return (delta,)

        held = self._held.of(lease.store_id)
        with held.lock:
            held.forget()
            try:
                with self._memory.working(lease.store_id, version, 0, 2 * _bytes(rows)):
                    (counted,) = self._commits.commit(lease, held.lineage, _NothingPending(), describe)
            finally:
                held.forget()
        return counted

    def read(self, store_id: StateStoreId, version: int, schema: StateSchema) -> pa.Table:
        """All rows of any retained version, in ``row_schema``, from storage; what is in memory is not touched.

        Raises
        ------
        InvalidRequestError
            The version is not retained.
        CorruptStateError
            A file that it needs is missing or damaged.
        """
        loading = self._coordinator.load_plans(store_id.state_name, store_id.partition_id, version, (DEFAULT_STORE,))
        with self._memory.loading(store_id, version):
            return self._loaded(store_id, loading, schema)[0].snapshot()

    def loaded_view(
        self, store_id: StateStoreId, version: int, loading: LoadPlans, schema: StateSchema | None
    ) -> LoadedView:
        """A retained version from storage, to be read; what is in memory is not touched.

        Raises
        ------
        CorruptStateError
            A file that it needs is missing or damaged.
        """
        assert schema is not None, "an operator's state says what its rows are"
        with self._memory.loading(store_id, version):
            region = self._memory.region(store_id)
            return operator_view(self._loader, store_id, loading, schema, self._hash_seed, region)

    def changes(self, store_id: StateStoreId, loading: LoadPlans, since: int, schema: StateSchema | None) -> Changes:
        """See :func:`~store_actors.serving.stored_rows.operator_changes`."""
        assert schema is not None, "an operator's state says what its rows are"
        return operator_changes(self._loader, store_id, loading, since, schema)

    def take(self, store_id: StateStoreId, offer: Transfer, pieces: Iterable[tuple[int, pa.Table]]) -> tuple[int, int]:
        """See :meth:`PartitionCache.take`; returns the version that is held then, and the bytes of the pieces."""
        (store,) = offer.stores
        shard = self._made(store_id, store.schema)
        with self._memory.using(store_id):
            size = fill([shard], offer, pieces)

        def put(held: _HeldShard) -> None:
            held.shard = shard

        return self._held.take(store_id, offer, put), size

    def unload(self, store_id: StateStoreId, *, wait: bool = True) -> bool:
        """See :meth:`PartitionCache.unload`."""
        return self._held.unload(store_id, wait=wait)

    def loaded(self) -> list[tuple[StateStoreId, int, int]]:
        """(shard, version, rows) of every shard in memory."""
        return [(key, one.shard.version, len(one.shard)) for key, one in self._held.items() if one.shard is not None]


def _bytes(table: pa.Table) -> int:
    return int(table.nbytes)

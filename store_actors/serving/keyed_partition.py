"""One partition's keyed stores in memory: who is on them, and how they come to the version that a session wants. No Ray.

All stores of a partition go to a version together, by the rules of :mod:`store_actors.serving.lineage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import FencedError, OperationOutOfOrderError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan, LoadPlans
from coordinator.runtime.runtime import Lock, Runtime
from store_actors.engine.table_view import ShardView
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.keyed.shard import KeyedShard, ReadHandle, UpdateHandle
from store_actors.messages import OpenRequest, StoreSpec, TransferredStore
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.evolution import EvolvingStore, evolve
from store_actors.serving.frozen_store import FrozenStore
from store_actors.serving.lineage import Lineage
from store_actors.serving.loading import Loader
from store_actors.serving.partition_cache import PartitionCache
from store_actors.serving.readable_rows import Views
from store_actors.serving.reading_order import InMemory, nothing_in_memory
from store_actors.serving.transfers import Given
from store_actors.spilling.store_memory import StoreMemory

__all__ = ["Ended", "Partition", "Positioner", "Session"]


class _OtherColumnsError(Exception):
    """A file of a store was written with other columns than memory has."""


@dataclass(slots=True)
class Partition:
    """The named stores of one partition in memory; see :class:`~store_actors.serving.partition_cache.Held`.

    Attributes
    ----------
    shards, specs
        By store name, with the columns that each was loaded for.
    writer
        The one session that updates, if there is one.
    """

    lock: Lock
    changing: Lock
    lineage: Lineage = field(default_factory=Lineage)
    views: Views = field(default_factory=Views)
    shards: dict[str, KeyedShard] = field(default_factory=dict)
    specs: dict[str, StoreSpec] = field(default_factory=dict)
    writer: Session | None = None

    @property
    def is_busy(self) -> bool:
        return self.writer is not None

    def has(self, specs: Sequence[StoreSpec]) -> bool:
        """Whether memory has stores with just these columns, all at the lineage's version."""
        return all(
            self.specs.get(spec.name) == spec and self.shards[spec.name].version == self.lineage.version
            for spec in specs
        )

    def frozen(self) -> Sequence[FrozenStore]:
        return [
            FrozenStore(entry, shard.frozen(), shard.room(), shard.schema)
            for entry in self.lineage.newest
            if (shard := self.shards.get(entry.store_name)) is not None
        ]

    def given(self) -> Sequence[Given]:
        return [
            (TransferredStore(name, self.specs[name], shard.schema, shard.room(), shard.watermark_ms), shard.frozen())
            for name, shard in self.shards.items()
            if shard.version == self.lineage.version
        ]

    def view(self, store_name: str, version: int) -> ShardView | None:
        shard = self.shards.get(store_name)
        if shard is None or shard.is_broken or version not in shard.retained:
            return None
        return self.views.of(store_name, version, lambda: shard.view(version))

    def rollback(self, version: int) -> bool:
        # Every store goes along, also those that nobody asks for now.
        with self.changing:
            return all(shard.rollback(version) for shard in self.shards.values())

    def catch_up(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        with self.changing:
            return self._gone_on(loading, base, loader)

    def _gone_on(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        deltas = 0
        for name, shard in list(self.shards.items()):
            if name not in loading.plans:
                # Nobody asks for it now, and it would stay behind.
                del self.shards[name], self.specs[name]
                continue
            replayed = self._replayed(shard, loading.plans[name], loader)
            if replayed is None:
                return None
            deltas = max(deltas, replayed)
            _reach(shard, base)
        return deltas

    def _replayed(self, shard: KeyedShard, plan: LoadPlan, loader: Loader) -> int | None:
        """How many deltas brought a store to its plan's version; None if one of them has other columns."""

        def same(rows: pa.Table, _: str) -> pa.Table:
            if _has_columns(rows, shard):
                return rows
            raise _OtherColumnsError

        try:
            return loader.replay(shard, plan, self.lineage.version, same)
        except _OtherColumnsError:
            return None

    def replicate(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        with self.changing:
            return self._followed(entries, rows)

    def _followed(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        for entry, delta in zip(entries, rows, strict=True):
            shard = self.shards.get(entry.store_name)
            if shard is None or not _has_columns(delta, shard):
                return False
            shard.load(delta, entry.version, entry.watermark_ms)
        for shard in self.shards.values():
            _reach(shard, entries[0].version)
        return True

    def forget(self) -> None:
        with self.changing:
            self.shards.clear()
            self.specs.clear()
            self.views.clear()
            self.lineage.forget()

    def evict(self) -> None:
        if self.writer is not None:
            self.writer.end("another store actor took the partition over", fenced=True)
        self.forget()


@dataclass(frozen=True, slots=True)
class Ended:
    """What is kept of a session that is over: enough to answer who asks again. None of its rows.

    Attributes
    ----------
    reason
        Why it is over.
    fenced
        Whether somebody newer ended it.
    committed
        Version that it made.
    """

    reason: str
    fenced: bool
    committed: int | None
    state: str
    partition_id: int
    base_version: int

    def error(self) -> FencedError | OperationOutOfOrderError:
        """What a further call on the session is told."""
        kind = FencedError if self.fenced else OperationOutOfOrderError
        return kind(
            f"the handle has ended: {self.reason}; nothing was changed; open a new one",
            state=self.state,
            partition=self.partition_id,
            version=self.base_version,
        )


@dataclass(slots=True)
class Session:
    """One handle on all named stores of a partition, at one version.

    Attributes
    ----------
    used_s
        When it was last called, in seconds of a clock that only elapses.
    ended
        How it ended; None while it is open.
    on_end
        Told how it ended.
    """

    request: OpenRequest
    partition: Partition
    handles: dict[str, UpdateHandle] | dict[str, ReadHandle]
    used_s: float
    ended: Ended | None = None
    on_end: Callable[[Ended], None] | None = None
    scans: dict[str, Iterator[pa.RecordBatch]] = field(default_factory=dict)

    @property
    def updates(self) -> dict[str, UpdateHandle]:
        """Its handles, of a session that updates."""
        return {name: handle for name, handle in self.handles.items() if isinstance(handle, UpdateHandle)}

    def end(self, reason: str, *, fenced: bool = False) -> None:
        """Abort its updates or release its reads; the partition has no writer any more if this was it."""
        handles = self.handles
        self.leave(reason, fenced=fenced)
        try:
            with self.partition.changing:
                for handle in handles.values():
                    if isinstance(handle, UpdateHandle):
                        handle.abort()
                    else:
                        handle.release()
        except BaseException:
            # Half put back, or still being written: no memory to go on from.
            self.partition.forget()
            raise

    def leave(self, reason: str, *, fenced: bool = False, committed: int | None = None) -> None:
        """:meth:`end` where the stores themselves are gone, or were committed. Nothing of the stores is held on to."""
        task = self.request.task
        self.ended = Ended(reason, fenced, committed, task.state_name, task.partition_id, self.request.base_version)
        self.handles = {}
        self.scans.clear()
        if self.partition.writer is self:
            self.partition.writer = None
        if self.on_end is not None:
            self.on_end(self.ended)

    # -- its changes, as a commit sees them: see store_actors.serving.commits.Pending ----------------------------------

    def commit(self) -> None:
        with self.partition.changing:
            for handle in self.updates.values():
                handle.commit()

    def abort(self) -> None:
        with self.partition.changing:
            for handle in self.updates.values():
                handle.abort()

    def adopt(self, entry: CommitEntry, rows: pa.Table) -> None:
        spec = self.partition.specs[entry.store_name]
        adapted = evolve(rows, spec.keys, spec.values, entry.file)
        with self.partition.changing:
            self.partition.shards[entry.store_name].load(adapted, entry.version, entry.watermark_ms)


class Positioner:
    """Brings partitions to versions: in memory if that is the counted lineage, else from storage.

    Parameters
    ----------
    held
        The partitions of the process.
    coordinator
        Knows which commits count.
    loader
        Reads files.
    surroundings
        Of the process: seed of hashes, and clock.
    memory
        The process's memory.
    """

    def __init__(
        self,
        held: PartitionCache[Partition],
        coordinator: CoordinatorRef,
        loader: Loader,
        runtime: Runtime,
        memory: StoreMemory,
    ) -> None:
        self._hash_seed = runtime.hash_seed
        self._clock = runtime.clock
        self._memory = memory
        self._held = held
        self._coordinator = coordinator
        self._loader = loader

    def readers(self, partition: Partition, request: OpenRequest) -> dict[str, ReadHandle]:
        """Handles on stores at the request's base version; what is loaded for that is the handle's own."""
        names = [spec.name for spec in request.stores]
        task, base = request.task, request.base_version
        loading = self._coordinator.load_plans(task.state_name, task.partition_id, base, names)
        in_memory = partition.lineage.knows(base, loading.attempt_id)
        handles = {}
        for spec in request.stores:
            is_there = in_memory and partition.specs.get(spec.name) == spec
            if is_there and base in partition.shards[spec.name].retained:
                handles[spec.name] = partition.shards[spec.name].read(base)
            else:
                store_id = request.lease.store_id
                handles[spec.name] = self._loaded(store_id, base, spec, loading.plans[spec.name])[0].read()
        return handles

    def position(self, partition: Partition, request: OpenRequest) -> None:
        """Bring every store to the request's base version; the coordinator is asked only if memory is not there beyond doubt."""
        lease, base = request.lease, request.base_version
        run_id = request.task.run_id
        if partition.lineage.is_hot(lease.epoch, run_id, base) and partition.has(request.stores):
            return
        names = [spec.name for spec in request.stores]
        begun_s = self._clock.elapsed_s()
        loading = self._held.restore(partition, lease.store_id, run_id, base, names)
        load_bytes = 0 if partition.lineage.is_loaded else loading.file_bytes()
        self._load_missing(partition, request, loading)
        partition.lineage.leased(lease.epoch, run_id, round(1000 * (self._clock.elapsed_s() - begun_s)), load_bytes)

    def _load_missing(self, partition: Partition, request: OpenRequest, loading: LoadPlans) -> None:
        """Load the stores that memory has not, or not with the columns asked for."""
        base, deltas = request.base_version, 0
        for spec in request.stores:
            if partition.specs.get(spec.name) != spec:
                store_id = request.lease.store_id
                in_memory = partial(self._held.rows_in_memory, store_id, spec.name, _has(spec))
                shard, replayed = self._loaded(store_id, base, spec, loading.plans[spec.name], in_memory)
                _reach(shard, base)
                with partition.changing:
                    partition.views.clear()
                    partition.shards[spec.name], partition.specs[spec.name] = shard, spec
                deltas = max(deltas, replayed)
        if not partition.lineage.is_loaded:
            partition.lineage.loaded(base, loading.attempt_id, deltas)

    def _loaded(
        self,
        store_id: StateStoreId,
        base: int,
        spec: StoreSpec,
        plan: LoadPlan,
        in_memory: InMemory = nothing_in_memory,
    ) -> tuple[KeyedShard, int]:
        store = EvolvingStore(spec, self._hash_seed, self._memory.region(store_id))
        with self._memory.loading(store_id, base):
            _, replayed = self._loader.load(store.anew, plan, store.adapted, in_memory)
        return store.loaded(), replayed


def _has(spec: StoreSpec) -> Callable[[TransferredStore], bool]:
    """Whether a store that is held has just these columns."""
    return lambda store: store.spec == spec


def _has_columns(delta: pa.Table, shard: KeyedShard) -> bool:
    """Whether a file has just the columns of a store in memory."""
    return bool(delta.drop_columns([CHANGE_COLUMN]).schema.equals(shard.schema.row_schema()))


def _reach(shard: KeyedShard, base: int) -> None:
    """Have a store at its partition's version: it may have changed in none of the last ones, or be empty."""
    if shard.version < base:
        nothing = shard.schema.row_schema().empty_table().append_column(CHANGE_COLUMN, pa.array([], pa.int8()))
        shard.load(nothing, base)

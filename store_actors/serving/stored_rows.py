"""Versions of shards and keyed stores made of their files, to be read; whoever holds the partitions is not concerned. No Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import CorruptStateError, VersionNotFoundError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan, LoadPlans
from coordinator.model.schema import StateSchema
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table_view import ShardView
from store_actors.messages import StoreSpec
from store_actors.operators.make_shard import make_shard, view_of
from store_actors.serving.evolution import EvolvingStore, evolve, groups_adapter
from store_actors.serving.files import schema_of
from store_actors.serving.loading import Loader
from store_actors.serving.readable_rows import ReadableRows

__all__ = ["Changes", "LoadedView", "StoredRows", "operator_changes", "operator_view", "store_changes", "store_view"]

#: What each commit changed, in a schema: its rows have ``__change`` last.
Changes: TypeAlias = Iterator[tuple[CommitEntry, pa.Table, StateSchema]]


@dataclass(frozen=True, slots=True)
class LoadedView:
    """A version that was read from its files, and the bytes of its rows in memory."""

    view: ShardView
    nbytes: int


def operator_view(
    loader: Loader, store_id: StateStoreId, loading: LoadPlans, schema: StateSchema, seed: int, memory: Memory = HEAP
) -> LoadedView:
    """An operator's shard at the version that was planned for, with its rows in a schema.

    Raises
    ------
    CorruptStateError
        A file that it needs is missing or damaged.
    """
    plan = loading.plans[store_id.store_name]
    shard, _ = loader.load(lambda: make_shard(schema, seed, memory), plan, groups_adapter(plan, schema))
    return LoadedView(view_of(shard, shard.version), shard.nbytes)


def store_view(
    loader: Loader, store_id: StateStoreId, loading: LoadPlans, seed: int, memory: Memory = HEAP
) -> LoadedView:
    """A keyed store at the version that was planned for, in the columns of its newest file.

    Raises
    ------
    CorruptStateError
        A file that it needs is missing or damaged.
    VersionNotFoundError
        The partition has no such store at the version.
    """
    plan = loading.plans[store_id.store_name]
    written = _newest_schema(loader, plan, store_id)
    store = EvolvingStore(StoreSpec(store_id.store_name, written.keys, written.state_fields), seed, memory)
    loader.load(store.anew, plan, store.adapted)
    shard = store.loaded()
    return LoadedView(shard.view(shard.version), shard.nbytes)


def operator_changes(
    loader: Loader, store_id: StateStoreId, loading: LoadPlans, since: int, schema: StateSchema
) -> Changes:
    """What each commit after a version, up to the one that was planned for, changed of an operator's shard.

    Raises
    ------
    VersionNotFoundError
        Some of these commits are not retained.
    CorruptStateError
        A file is missing or damaged.
    """
    plan = loading.plans[store_id.store_name]
    adapt = groups_adapter(plan, schema)
    for entry in _commits_since(plan, store_id, since):
        yield entry, adapt(loader.read(entry), entry.file), schema


def store_changes(loader: Loader, store_id: StateStoreId, loading: LoadPlans, since: int) -> Changes:
    """:func:`operator_changes` of a keyed store, in the columns of its newest file.

    Raises
    ------
    VersionNotFoundError, CorruptStateError
        As there.
    StateMismatchError
        A column has become of another type, which a value from before cannot be shown as.
    """
    plan = loading.plans[store_id.store_name]
    written = _newest_schema(loader, plan, store_id)
    for entry in _commits_since(plan, store_id, since):
        rows = evolve(loader.read(entry), written.keys, written.state_fields, entry.file)
        yield entry, rows, StateSchema.keyed(written.keys, written.state_fields)


def _commits_since(plan: LoadPlan, store_id: StateStoreId, since: int) -> Sequence[CommitEntry]:
    begun = 0 if plan.origin is None else plan.origin.version
    if since < max(plan.floor, begun):
        raise VersionNotFoundError(
            "what changed since this version is not known any more: its commits are not retained, or the state was rescaled since; "
            "nothing was changed; ask for changes since a later one, or compare two versions",
            state=store_id.state_name,
            partition=store_id.partition_id,
            version=since,
            oldest=max(plan.floor, begun),
        )
    return [entry for entry in plan.deltas if entry.version > since]


def _newest_schema(loader: Loader, plan: LoadPlan, store_id: StateStoreId) -> StateSchema:
    """Columns of a store's newest file; where a version has a delta and a snapshot, each tells them, should the other be damaged."""
    files: tuple[CommitEntry | SnapshotEntry, ...] = (*plan.deltas, *plan.snapshots)
    for parent in () if files or plan.origin is None else plan.origin.parents:
        files += (*parent.plan.deltas, *parent.plan.snapshots)
    if not files:
        raise VersionNotFoundError(
            "the partition has no such store at this version",
            state=store_id.state_name,
            partition=store_id.partition_id,
            store=store_id.store_name,
        )
    newest = max(entry.version for entry in files)
    first, *others = (entry for entry in files if entry.version == newest)
    try:
        return schema_of(loader.read(first))
    except CorruptStateError:
        if not others:
            raise
        return schema_of(loader.read(others[-1]))


class StoredRows:
    """Partitions of one kind of which nothing is held, where no fleet runs; see :class:`~store_actors.serving.reads.Readable`."""

    def __init__(self, loader: Loader, seed: int, *, is_keyed: bool) -> None:
        self._loader, self._seed, self._is_keyed = loader, seed, is_keyed

    def newest(self, store_id: StateStoreId) -> tuple[int, str]:
        return -1, ""

    def view(self, store_id: StateStoreId, store_name: str, version: int, attempt_id: str) -> ReadableRows | None:
        return None

    def using(self, store_id: StateStoreId) -> AbstractContextManager[None]:
        return nullcontext()

    def loaded_view(
        self, store_id: StateStoreId, version: int, loading: LoadPlans, schema: StateSchema | None
    ) -> LoadedView:
        if self._is_keyed:
            return store_view(self._loader, store_id, loading, self._seed)
        assert schema is not None
        return operator_view(self._loader, store_id, loading, schema, self._seed)

    def changes(self, store_id: StateStoreId, loading: LoadPlans, since: int, schema: StateSchema | None) -> Changes:
        if self._is_keyed:
            return store_changes(self._loader, store_id, loading, since)
        assert schema is not None
        return operator_changes(self._loader, store_id, loading, since, schema)

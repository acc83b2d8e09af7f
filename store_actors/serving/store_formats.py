"""Keeping, loading and catching up the rows of a store: an operator's shard in its schema, a keyed store in its columns.

This is the only place where the two differ. All else that is done with a partition's stores is the same.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol, TypeAlias

import pyarrow as pa

from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.errors import CorruptStateError, VersionNotFoundError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan
from coordinator.model.schema import StateSchema
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table_view import ShardView
from store_actors.engine.versioned_store import VersionedStore
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.keyed.shard import KeyedShard
from store_actors.messages import StoreSpec
from store_actors.operators.make_shard import OperatorShard, make_shard, view_of
from store_actors.serving.evolution import EvolvingStore, evolve, groups_adapter
from store_actors.serving.files import schema_of
from store_actors.serving.loading import Adapt, Loader
from store_actors.serving.reading_order import InMemory, nothing_in_memory

__all__ = ["StoreFormat", "StoreDefinition", "newest_spec", "store_format"]

#: What a store is opened as: the schema of an operator's shard, or name and columns of a keyed store.
StoreDefinition: TypeAlias = StateSchema | StoreSpec


class StoreFormat(Protocol):
    """The way in which the rows of one store are kept, loaded and caught up.

    Attributes
    ----------
    definition
        What it was opened as.
    schema
        Schema of its rows.
    """

    @property
    def definition(self) -> StoreDefinition: ...

    @property
    def schema(self) -> StateSchema: ...

    def empty(self) -> VersionedStore:
        """Return a store without rows."""

    def load(
        self, loader: Loader, plan: LoadPlan, in_memory: InMemory = nothing_in_memory
    ) -> tuple[VersionedStore, int]:
        """Return a store at the plan's version, and how many deltas were replayed; see :meth:`Loader.load`."""

    def catch_up(self, loader: Loader, store: VersionedStore, plan: LoadPlan, version: int) -> int | None:
        """Bring a store from a version to the plan's by its deltas; return how many, or None if one of them has other columns."""

    def has_columns_of(self, rows: pa.Table) -> bool:
        """Whether a delta's rows have just the columns of the store."""

    def view(self, store: VersionedStore, version: int) -> ShardView:
        """Return a retained version of a store, to be read."""

    def adapter(self, plan: LoadPlan) -> Adapt:
        """Return what turns the rows of a file of a plan into the store's columns."""

    def adopted(self, rows: pa.Table, file: str) -> pa.Table:
        """Return the rows of another attempt's delta in the store's columns."""


def store_format(definition: StoreDefinition, seed: int, memory: Memory = HEAP) -> StoreFormat:
    """Return the format of what a store is opened as; `seed` and `memory` as of :class:`~store_actors.engine.table.GroupTable`."""
    if isinstance(definition, StoreSpec):
        return _KeyedFormat(definition, seed, memory)
    return _OperatorFormat(definition, seed, memory)


class _OperatorFormat:
    """The format of an operator's shard. A changed query reads what earlier ones wrote, as far as the two are compatible."""

    def __init__(self, schema: StateSchema, seed: int, memory: Memory) -> None:
        self.definition = self.schema = schema
        self._seed, self._memory = seed, memory

    def empty(self) -> OperatorShard:
        return make_shard(self.schema, self._seed, self._memory)

    def load(
        self, loader: Loader, plan: LoadPlan, in_memory: InMemory = nothing_in_memory
    ) -> tuple[VersionedStore, int]:
        return loader.load(self.empty, plan, self.adapter(plan), in_memory)

    def catch_up(self, loader: Loader, store: VersionedStore, plan: LoadPlan, version: int) -> int | None:
        return loader.replay(store, plan, version, self.adapter(plan))

    def has_columns_of(self, rows: pa.Table) -> bool:
        return schema_of(rows) == self.schema

    def view(self, store: VersionedStore, version: int) -> ShardView:
        return view_of(store, version)

    def adapter(self, plan: LoadPlan) -> Adapt:
        return groups_adapter(plan, self.schema)

    def adopted(self, rows: pa.Table, file: str) -> pa.Table:
        # All attempts of a run have one schema.
        return rows


class _OtherColumnsError(Exception):
    """A delta of a store was written with other columns than memory has."""


class _KeyedFormat:
    """The format of a keyed store."""

    def __init__(self, spec: StoreSpec, seed: int, memory: Memory) -> None:
        self.definition = spec
        self._seed, self._memory = seed, memory

    @cached_property
    def schema(self) -> StateSchema:
        return StateSchema.keyed(self.definition.keys, self.definition.values)

    def empty(self) -> KeyedShard:
        spec = self.definition
        return KeyedShard(spec.keys, spec.values, spec.due, self._seed, self._memory)

    def load(
        self, loader: Loader, plan: LoadPlan, in_memory: InMemory = nothing_in_memory
    ) -> tuple[VersionedStore, int]:
        evolving = EvolvingStore(self.empty, self.definition)
        _, replayed = loader.load(evolving.restart, plan, evolving.adapted, in_memory)
        return evolving.loaded(), replayed

    def catch_up(self, loader: Loader, store: VersionedStore, plan: LoadPlan, version: int) -> int | None:
        def same(rows: pa.Table, _: str) -> pa.Table:
            if self.has_columns_of(rows):
                return rows
            raise _OtherColumnsError

        try:
            return loader.replay(store, plan, version, same)
        except _OtherColumnsError:
            return None

    def has_columns_of(self, rows: pa.Table) -> bool:
        return bool(rows.drop_columns([CHANGE_COLUMN]).schema.equals(self.schema.row_schema()))

    def view(self, store: VersionedStore, version: int) -> ShardView:
        assert isinstance(store, KeyedShard)
        return store.view(version)

    def adapter(self, plan: LoadPlan) -> Adapt:
        return self.adopted

    def adopted(self, rows: pa.Table, file: str) -> pa.Table:
        return evolve(rows, self.definition.keys, self.definition.values, file)


def newest_spec(loader: Loader, plan: LoadPlan, store_id: StateStoreId) -> StoreSpec:
    """Return a keyed store's columns as its newest file has them.

    Where a version has a delta and a snapshot, the columns are read from either, should the other be damaged.

    Raises
    ------
    VersionNotFoundError
        The partition has no such store at the version.
    CorruptStateError
        The newest files are missing or damaged.
    """
    entries: list[CommitEntry | SnapshotEntry] = [*plan.deltas, *plan.snapshots]
    for parent in () if entries or plan.origin is None else plan.origin.parents:
        entries += [*parent.plan.deltas, *parent.plan.snapshots]
    if not entries:
        raise VersionNotFoundError(
            "the partition has no such store at this version",
            state=store_id.state_name,
            partition=store_id.partition_id,
            store=store_id.store_name,
        )
    newest = max(entry.version for entry in entries)
    first, *others = (entry for entry in entries if entry.version == newest)
    try:
        written = schema_of(loader.read(first))
    except CorruptStateError:
        if not others:
            raise
        written = schema_of(loader.read(others[-1]))
    return StoreSpec(store_id.store_name, written.keys, written.state_fields)

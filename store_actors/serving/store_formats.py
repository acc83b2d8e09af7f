"""Formats of the rows of operators' shards and keyed stores, in memory and in files.

All differences between the two kinds of stores in loading, catching up and viewing are in this module. All other code of a partition
treats its stores alike.
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
from store_actors.messages.requests import StoreSpec
from store_actors.operators.make_shard import OperatorShard, make_shard, view_of
from store_actors.serving.evolution import EvolvingStore, evolve, groups_adapter
from store_actors.serving.files import schema_of
from store_actors.serving.loading import Adapt, InMemory, Loader, nothing_in_memory

#: The schema of an operator's shard, or the name and columns of a keyed store.
StoreDefinition: TypeAlias = StateSchema | StoreSpec


class StoreFormat(Protocol):
    """Creates, loads, catches up and views one store."""

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
        """Apply the plan's deltas after `version`; return their number, or None if a delta has other columns than the store."""

    def has_columns_of(self, rows: pa.Table) -> bool:
        """Return whether a delta's rows have exactly the columns of the store."""

    def view(self, store: VersionedStore, version: int) -> ShardView:
        """Return a view of a retained version of a store."""

    def adapter(self, plan: LoadPlan) -> Adapt:
        """Return a function that converts the rows of a plan's file to the store's columns."""

    def adopted(self, rows: pa.Table, file: str) -> pa.Table:
        """Convert the rows of another attempt's delta to the store's columns."""


def store_format(definition: StoreDefinition, seed: int, memory: Memory = HEAP) -> StoreFormat:
    """Return the format of a store; for `seed` and `memory` see :class:`~store_actors.engine.word_rows.WordRows`."""
    if isinstance(definition, StoreSpec):
        return _KeyedFormat(definition, seed, memory)
    return _OperatorFormat(definition, seed, memory)


class _OperatorFormat:
    """The format of an operator's shard. A changed query reads the rows of its earlier definitions if they are compatible."""

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
    """A delta was written with other columns than the store in memory has."""


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
        def check_columns(rows: pa.Table, _: str) -> pa.Table:
            if self.has_columns_of(rows):
                return rows
            raise _OtherColumnsError

        try:
            return loader.replay(store, plan, version, check_columns)
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
    """Return a keyed store's name and the columns of its newest file.

    If the newest version has a delta and a snapshot and one of them is damaged, the columns are read from the other.

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
    first, *further = (entry for entry in entries if entry.version == newest)
    try:
        written = schema_of(loader.read(first))
    except CorruptStateError:
        if not further:
            raise
        written = schema_of(loader.read(further[-1]))
    return StoreSpec(store_id.store_name, written.keys, written.state_fields)

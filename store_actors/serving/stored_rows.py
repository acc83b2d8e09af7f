"""Reads versions of stores from their files, without touching the partitions in memory. No Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import VersionNotFoundError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlan, LoadPlans
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Runtime
from store_actors.engine.memory import HEAP, Memory
from store_actors.engine.table_view import ShardView
from store_actors.serving.loading import Loader
from store_actors.serving.store_formats import StoreFormat, newest_spec, store_format
from store_actors.spilling.store_memory import StoreMemory

#: Each commit, the rows that it changed (``__change`` is the last column), and their schema.
Changes: TypeAlias = Iterator[tuple[CommitEntry, pa.Table, StateSchema]]


@dataclass(frozen=True, slots=True)
class LoadedView:
    """A version that was read from its files, and the bytes that its rows take in memory."""

    view: ShardView
    nbytes: int


class StoredRows:
    """Reads versions of stores from their files.

    Parameters
    ----------
    loader, memory
        Reader of files; memory of the process.
    """

    def __init__(self, loader: Loader, runtime: Runtime, memory: StoreMemory) -> None:
        self._loader = loader
        self._seed = runtime.hash_seed
        self.memory = memory

    def view(self, store_id: StateStoreId, version: int, loading: LoadPlans, schema: StateSchema | None) -> LoadedView:
        """Return a store at the version of the load plans.

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
            return LoadedView(row_format.view(store, store.version), store.nbytes)

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

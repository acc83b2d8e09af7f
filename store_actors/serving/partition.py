"""A partition in memory: its stores at one version, their history, and its locks. No Ray.

An operator's shard is a partition with one store. All stores of a partition go to a version together, by the rules of
:mod:`store_actors.serving.lineage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.identities import TaskIdentity
from coordinator.model.load_plans import LoadPlans
from coordinator.runtime.runtime import Lock
from store_actors.engine.table_view import ShardView
from store_actors.engine.versioned_store import VersionedStore
from store_actors.engine.versions import CHANGE_COLUMN, Frozen
from store_actors.messages.requests import TransferredStore
from store_actors.serving.frozen_store import FrozenStore
from store_actors.serving.lineage import Lineage
from store_actors.serving.loading import Loader
from store_actors.serving.readable_rows import Views
from store_actors.serving.store_formats import StoreDefinition, StoreFormat


class Writer(Protocol):
    """A session that changes a partition over several calls.

    Attributes
    ----------
    used_s
        When it was last called, in seconds of a clock that only elapses.
    """

    used_s: float

    @property
    def task(self) -> TaskIdentity: ...

    def end(self, reason: str, *, fenced: bool = False) -> None:
        """Abort the changes; the partition has no writer afterwards."""


@dataclass(slots=True)
class Partition:
    """The stores of one partition, by name, all at the version of its lineage.

    Attributes
    ----------
    lock
        Taken to look at or change anything of the partition but committed versions.
    changing
        Taken, after `lock`, for as long as rows change. Readers of committed versions take only this one, and wait for no commit.
    formats
        What each store was loaded as.
    writer
        The session that updates the stores, if there is one.
    emitted
        Rows that the newest batch of an operator emitted, for a retry of the task that made it.
    """

    lock: Lock
    changing: Lock
    lineage: Lineage = field(default_factory=Lineage)
    views: Views = field(default_factory=Views)
    stores: dict[str, VersionedStore] = field(default_factory=dict)
    formats: dict[str, StoreFormat] = field(default_factory=dict)
    writer: Writer | None = None
    emitted: pa.Table | None = None

    def is_loaded_as(self, name: str, definition: StoreDefinition) -> bool:
        """Return whether memory has a store, as it is asked for now."""
        return name in self.formats and self.formats[name].definition == definition

    def has(self, definitions: Mapping[str, StoreDefinition]) -> bool:
        """Return whether memory has all the stores as they are asked for, at the lineage's version."""
        version = self.lineage.version
        return all(
            self.is_loaded_as(name, definition) and self.stores[name].version == version
            for name, definition in definitions.items()
        )

    def put(self, name: str, store_format: StoreFormat, store: VersionedStore) -> None:
        """Have a store from now on, in place of one of the same name."""
        with self.changing:
            self.views.clear()
            self.stores[name], self.formats[name] = store, store_format

    # -- what memory has ----------------------------------------------------------------------------------------------

    def newest_commits(self) -> Sequence[FrozenStore]:
        """Return the stores as their newest commits made them; none if memory was loaded. The caller has `lock`."""
        return [
            FrozenStore(entry, store.frozen(), store.room(), store.schema)
            for entry in self.lineage.newest
            if (store := self.stores.get(entry.store_name)) is not None
        ]

    def frozen_stores(self) -> Sequence[tuple[TransferredStore, Frozen]]:
        """Return all stores at the lineage's version with their rows as they are now. The caller has `lock`."""
        return [
            (
                TransferredStore(name, self.formats[name].definition, store.room(), store.watermark_ms),
                store.frozen(),
            )
            for name, store in self.stores.items()
            if store.version == self.lineage.version
        ]

    def view(self, store_name: str, version: int) -> ShardView | None:
        """Return a version of a store, to be read; None if memory does not have it. The caller has `changing`."""
        store = self.stores.get(store_name)
        if store is None or version not in store.retained():
            return None
        return self.views.of(store_name, version, lambda: self.formats[store_name].view(store, version))

    # -- to another version -------------------------------------------------------------------------------------------

    def rollback(self, version: int) -> bool:
        """Bring all stores to an earlier version of the same history; return False if memory has no way there."""
        # Also stores that the present task does not ask for.
        with self.changing:
            return all(store.rollback(version) for store in self.stores.values())

    def catch_up(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        """Bring all stores to the version `base` by the commits since; return how many these were.

        Returns
        -------
        int or None
            None if that is not possible: some stores are as they were, or at a version in between.
        """
        with self.changing:
            return self._catch_up(loading, base, loader)

    def _catch_up(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        deltas = 0
        for name, store in list(self.stores.items()):
            if name not in loading.plans:
                # No task asks for it now, and it would stay behind.
                del self.stores[name], self.formats[name]
                continue
            replayed = self.formats[name].catch_up(loader, store, loading.plans[name], self.lineage.version)
            if replayed is None:
                return None
            deltas = max(deltas, replayed)
            catch_up_empty(store, base)
        return deltas

    def replicate(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        """Apply the deltas of a commit, one a store; return False if that is not possible: some stores are as they were."""
        with self.changing:
            return self._replicate(entries, rows)

    def _replicate(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        for entry, delta in zip(entries, rows, strict=True):
            store = self.stores.get(entry.store_name)
            if store is None or not self.formats[entry.store_name].has_columns_of(delta):
                return False
            store.load(delta, entry.version, entry.watermark_ms)
        for store in self.stores.values():
            catch_up_empty(store, entries[0].version)
        return True

    # -- out of memory ------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop everything; what is stored is loaded when it is asked for again."""
        with self.changing:
            self.stores.clear()
            self.formats.clear()
            self.views.clear()
            self.lineage.forget()
            self.emitted = None

    def evict(self) -> None:
        """:meth:`forget` because another store actor has the partition; the session that updates it, if there is one, is fenced."""
        if self.writer is not None:
            self.writer.end("another store actor took the partition over", fenced=True)
        self.forget()


def catch_up_empty(store: VersionedStore, version: int) -> None:
    """Bring a store to its partition's version that none of the last commits changed, or that is empty."""
    if store.version < version:
        nothing = store.schema.row_schema().empty_table().append_column(CHANGE_COLUMN, pa.array([], pa.int8()))
        store.load(nothing, version, 0)

"""A partition in memory: its stores at one version, its history, its locks, and its rows, read beside the batches. No Ray.

An operator's shard is a partition with one store. All stores of a partition go to a version together, by the rules of
:class:`Lineage`, which are the same for operators and keyed stores.

Theory of operation
-------------------
Memory is a cache of what the coordinator counts. A partition that is loaded is at one version, whose lineage is known by the attempts
that made it and the few versions before. A batch brings a lease (its epoch) and the version that it reads, its base:

- Same epoch and run, memory at the base: no other process can have committed since, so memory is right, and none is asked
  (:meth:`Lineage.is_hot`).
- Otherwise the coordinator is asked, once, which attempt made the base. If that is the one that memory knows, memory is kept, or
  rolled back to it; else it is loaded (:meth:`Lineage.sync_action`).
- Memory that is at an earlier version of what counts, as of a partition that was copied from another store actor, catches up by the
  commits since, unless they are in another schema.
- A commit that is counted is the next version, be it that of this attempt or of another one of the run (:meth:`Lineage.committed`).
- After a commit that fails it is not known what counts: memory is forgotten (:meth:`Lineage.forget`).

::

    FORGOTTEN --loaded--> LOADED --committed--> LOADED (next version)
                          LOADED --rolled_back--> LOADED (an earlier one)
                          LOADED --caught_up--> LOADED (a later one)
        ^------------- forget -------|
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.identities import TaskIdentity
from coordinator.model.load_plans import LoadPlans
from coordinator.runtime.runtime import Lock
from store_actors.engine.table_view import Found, ShardView
from store_actors.engine.versions import CHANGE_COLUMN, Frozen, VersionedStore
from store_actors.messages.requests import TransferredStore
from store_actors.serving.loading import Loader
from store_actors.serving.store_formats import StoreDefinition, StoreFormat

#: Versions behind the newest whose attempt is remembered; more than memory can go back.
_KNOWN_ATTEMPTS = 4
#: A snapshot of more than so many bytes in memory waits until its deltas have so small a part of them, or for so many rounds.
_LARGE_BYTES, _DELTA_SHARE, _SPARED_ROUNDS = 1 << 20, 1 / 4, 9
#: Keys that are looked for under the lock at once: a batch waits for no more than these.
_KEYS_AT_ONCE = 1 << 14


class SyncAction(StrEnum):
    """The action that brings memory to a version."""

    #: Nothing: memory is at that version.
    KEEP = "keep"
    #: Undo: memory is at a later one of the same history.
    ROLLBACK = "rollback"
    #: The commits since: memory is at an earlier one of the same history.
    CATCH_UP = "catch up"
    #: Files: memory is of another history, or of none.
    RELOAD = "reload"


@dataclass(slots=True)
class Lineage:
    """The history that memory holds of one partition."""

    #: Whether memory holds anything; all else but `epoch`, `run_id` and `deltas` counts only then.
    is_loaded: bool = False
    version: int = 0
    #: ``epoch``, ``run_id``: Of the lease under which it was last brought to a version; -1 and empty before.
    epoch: int = -1
    run_id: str = ""
    #: Counted attempt of each version that memory may still reach; the empty version has none.
    attempts: dict[int, str] = field(default_factory=dict)
    #: The counted commits, one a store, that made the version; none if it was loaded.
    newest: tuple[CommitEntry, ...] = ()
    #: Commits since the last snapshot: what loading would replay.
    deltas: int = 0
    #: ``delta_bytes``, ``spared``: Bytes of the files of those that were made here, and rounds of maintenance in which there
    #: were too few for a snapshot.
    delta_bytes: int = 0
    spared: int = 0
    #: ``restore_ms``, ``load_bytes``: How long it took to bring memory to the version that the next commit builds on, and bytes
    #: of the files that were read for it.
    restore_ms: int = 0
    load_bytes: int = 0
    #: Commits that failed since the last one that counted, by error.
    failures: Counter[str] = field(default_factory=Counter)

    def is_hot(self, epoch: int, run_id: str, base: int) -> bool:
        """Return whether memory is at a lease's base version beyond doubt.

        An epoch is of one run; of a state that was put back from a backup, epochs are given again, to other runs.
        """
        return self.is_loaded and (self.epoch, self.run_id, self.version) == (epoch, run_id, base)

    def knows(self, version: int, counted: str) -> bool:
        """Return whether the attempt that counts for a version is the one that made it here."""
        return self.is_loaded and self.attempt_of(version) == counted

    def attempt_of(self, version: int) -> str:
        """Return the attempt that made a version here; empty for one that is not remembered, and for the empty one."""
        return self.attempts.get(version, "")

    def sync_action(self, base: int, counted: str, earlier: Mapping[int, str] = MappingProxyType({})) -> SyncAction:
        """Return what brings memory to a lease's base version.

        Parameters
        ----------
        counted
            The attempt that made it, as the coordinator counts; empty for the empty version.
        earlier
            Attempts that made the versions before, from which the base version can be made by their commits.
        """
        if self.version < base and self.version in earlier and self.knows(self.version, earlier[self.version]):
            return SyncAction.CATCH_UP
        if not self.knows(base, counted) or base > self.version:
            return SyncAction.RELOAD
        return SyncAction.KEEP if base == self.version else SyncAction.ROLLBACK

    def recorded(self, run_id: str, version: int) -> bool:
        """Return whether the version in memory is the one asked for, made by this very run: its task is a repeated one."""
        return self.is_loaded and any((entry.run_id, entry.version) == (run_id, version) for entry in self.newest)

    def rolled_back(self, base: int) -> None:
        """Memory is at an earlier version: its rows must not become the snapshot of a newer commit."""
        self.version = base
        self.newest = tuple(entry for entry in self.newest if entry.version == base)

    def caught_up(self, base: int, counted: str, deltas: int) -> None:
        """Note that `deltas` deltas brought memory to a later version."""
        self.loaded(base, counted, self.deltas + deltas)

    def loaded(self, base: int, counted: str, deltas: int) -> None:
        """Note that memory was loaded at version `base` by replaying `deltas` deltas."""
        self.is_loaded, self.version, self.newest, self.deltas = True, base, (), deltas
        # How large the files are that were read is not known here: they are not spared.
        self.delta_bytes, self.spared = 0, _SPARED_ROUNDS if deltas else 0
        self.attempts = {base: counted} if counted else {}

    def leased(self, epoch: int, run_id: str, restore_ms: int = 0, load_bytes: int = 0) -> None:
        """Note that memory was brought to the base version of a lease."""
        self.epoch, self.run_id = epoch, run_id
        self.restore_ms, self.load_bytes = restore_ms, load_bytes

    def unleased(self) -> None:
        """Note that memory is a copy of another store actor's, so that no earlier lease here applies to it."""
        self.epoch, self.run_id = -1, ""

    def committed(self, counted: Sequence[CommitEntry]) -> None:
        """Note that memory is what these commits, one a store, made."""
        self.version, self.newest = counted[0].version, tuple(counted)
        self.attempts[self.version] = counted[0].attempt_id
        for version in [older for older in self.attempts if older < self.version - _KNOWN_ATTEMPTS]:
            del self.attempts[version]
        self.deltas += 1
        self.delta_bytes += sum(entry.file_bytes for entry in counted)
        self.restore_ms = self.load_bytes = 0
        self.failures.clear()

    def is_snapshot_due(self, min_deltas: int) -> bool:
        """Return whether this round of maintenance should write a snapshot; note if it is spared one.

        A snapshot has all rows: where epochs of a second change few of many, one a minute would write all of them each minute. What
        loading replays stays small beside the rows.
        """
        if self.deltas < min_deltas:
            return False
        state_bytes = sum(entry.state_bytes for entry in self.newest)
        is_large = state_bytes > max(_LARGE_BYTES, self.delta_bytes / _DELTA_SHARE)
        self.spared += is_large
        return not is_large or self.spared > _SPARED_ROUNDS

    def snapshot_written(self, deltas: int, delta_bytes: int) -> None:
        """Note a snapshot that covers `deltas` deltas, of which those that were made here have `delta_bytes`."""
        self.deltas = max(0, self.deltas - deltas)
        self.delta_bytes = max(0, self.delta_bytes - delta_bytes)
        self.spared = 0

    def forget(self) -> None:
        """Note that memory holds nothing any more."""
        self.is_loaded, self.epoch, self.newest = False, -1, ()
        self.attempts.clear()


class Views:
    """Views of the versions of a partition's stores. They are kept, with an overlay of what changed since."""

    def __init__(self) -> None:
        self._views: dict[tuple[str, int], ShardView] = {}

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
    """A version of a store."""

    #: Taken while rows are looked for or copied, and never for longer.
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


class Writer(Protocol):
    """A session that changes a partition over several calls."""

    #: When it was last called, in seconds of a clock that only elapses.
    used_s: float

    @property
    def task(self) -> TaskIdentity: ...

    def end(self, reason: str, *, fenced: bool = False) -> None:
        """Abort the changes; the partition has no writer afterwards."""


@dataclass(slots=True)
class Partition:
    """The stores of one partition, by name, all at the version of its lineage."""

    #: Taken to look at or change anything of the partition but committed versions.
    lock: Lock
    #: Taken, after `lock`, for as long as rows change. Readers of committed versions take only this one, and wait for no commit.
    changing: Lock
    lineage: Lineage = field(default_factory=Lineage)
    views: Views = field(default_factory=Views)
    stores: dict[str, VersionedStore] = field(default_factory=dict)
    formats: dict[str, StoreFormat] = field(default_factory=dict)
    writer: Writer | None = None
    #: Rows that the newest batch of an operator emitted, for a retry of the task that made it.
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

    def frozen_stores(self) -> Sequence[tuple[TransferredStore, Frozen]]:
        """Return all stores at the lineage's version with their rows as they are now. The caller has `lock`."""
        return [
            (
                TransferredStore(name, self.formats[name].definition, store.room(), store.watermark_ms),
                self.frozen(name),
            )
            for name, store in self.stores.items()
            if store.version == self.lineage.version
        ]

    def frozen(self, store_name: str) -> Frozen:
        """Return the rows of a store at the lineage's version, as they are now. The caller has `lock`."""
        store = self.stores[store_name]
        if self.writer is None:
            return store.frozen()
        # The store may have rows of versions that are not committed yet.
        with self.changing:
            view = self.view(store_name, self.lineage.version)
            assert view is not None, "a version that is not committed is made on top of the lineage's"
            return view.frozen(store.schema.row_schema().names)

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
        deltas = 0
        with self.changing:
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

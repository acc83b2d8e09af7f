"""Partitions that a process holds in memory: who they are, when they go, when a snapshot of them is written. No Ray."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId, StateStoreProviderId
from coordinator.model.load_plans import LoadPlans, Parent
from coordinator.runtime.logs import about
from coordinator.runtime.runtime import Lock, Runtime
from store_actors.engine.table_view import ShardView
from store_actors.engine.versions import Frozen
from store_actors.messages import ReplicatedCommit, Transfer, TransferredStore
from store_actors.serving.commits import Commits
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import as_snapshot, decode_file
from store_actors.serving.frozen_store import FrozenStore, Locked, tables_of
from store_actors.serving.lineage import Lineage, SyncAction
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.readable_rows import ReadableRows
from store_actors.serving.reading_order import MemoryRows
from store_actors.serving.transfers import Given, Transfers
from store_actors.spilling.store_memory import StoreMemory

__all__ = ["Held", "PartitionCache", "ServedPartitions"]

log = logging.getLogger(__name__)

#: Partitions that are looked at for being elsewhere when another one is opened.
_LOOKED_AT = 64
#: See :meth:`PartitionCache.take`.
_AWAITED_ROUNDS = 10
#: Times the bytes of a delta's file that applying it takes: files are compressed.
_APPLIED = 8


class Held(Locked, Protocol):
    """What memory holds of one partition; `lock` is taken by whoever looks at or changes anything else of it."""

    @property
    def changing(self) -> Lock:
        """Taken, after `lock`, for as long as rows change; who reads counted versions takes only this one, and waits for no commit."""

    @property
    def lineage(self) -> Lineage: ...

    def view(self, store_name: str, version: int) -> ShardView | None:
        """A version of a store, to be read; None if memory does not have it. The caller holds `changing`."""

    @property
    def is_busy(self) -> bool:
        """Whether somebody is in the middle of a change."""

    def frozen(self) -> Sequence[FrozenStore]:
        """Its stores as their newest commits made them; none where memory was loaded."""

    def given(self) -> Sequence[Given]:
        """All that is held, at the lineage's version, as a taker is told of it."""

    def rollback(self, version: int) -> bool:
        """Bring all that is held to a version of the same history; False if memory has no way there."""

    def catch_up(self, loading: LoadPlans, base: int, loader: Loader) -> int | None:
        """Bring all that is held to the version `base`, by the commits since; returns how many these were.

        None if that is no way: some of it is as it was, or at a version in between.
        """

    def replicate(self, entries: Sequence[CommitEntry], rows: Sequence[pa.Table]) -> bool:
        """Apply the deltas of a commit, one a store; False if that is no way: some of it is as it was."""

    def forget(self) -> None:
        """Let go of everything; what is stored is loaded when it is wanted again."""

    def evict(self) -> None:
        """:meth:`forget`, and end who is in the middle of a change: another store actor has the partition."""


Kind = TypeVar("Kind", bound=Held)


class PartitionCache(Generic[Kind]):
    """The partitions of one process, of one kind. Thread-safe.

    Parameters
    ----------
    make
        Makes an empty partition with its two locks.
    coordinator, commits, loader, metrics
        Who says where partitions are; who writes; who reads; what is counted.
    memory
        The process's memory.
    """

    def __init__(
        self,
        make: Callable[[Lock, Lock], Kind],
        runtime: Runtime,
        coordinator: CoordinatorRef,
        commits: Commits,
        loader: Loader,
        metrics: StoreMetrics,
        memory: StoreMemory,
    ) -> None:
        self._memory = memory
        self._make = make
        self._new_lock = runtime.threads.lock
        self._guard = self._new_lock()
        self._coordinator = coordinator
        self._commits = commits
        self._loader = loader
        self._metrics = metrics
        self._held: dict[StateStoreId, Kind] = {}
        #: Place of the partition that is looked at next for being elsewhere.
        self._looked_at = 0
        self._offers = Transfers(self._new_lock(), runtime.new_id, runtime.clock.elapsed_s)
        #: Rounds of maintenance for which partitions that are leased elsewhere stay nevertheless: they are about to be leased here.
        self._awaited: dict[StateStoreId, int] = {}

    def of(self, store_id: StateStoreId) -> Kind:
        """A partition, empty at first."""
        with self._guard:
            held = self._held.get(store_id)
            if held is None:
                held = self._held[store_id] = self._make(self._new_lock(), self._new_lock())
            return held

    def items(self) -> list[tuple[StateStoreId, Kind]]:
        """Partitions that were ever asked for."""
        with self._guard:
            return list(self._held.items())

    def restore(
        self, held: Kind, store_id: StateStoreId, run_id: str, base: int, store_names: Sequence[str]
    ) -> LoadPlans:
        """Report a partition, and bring its memory to a version if it is of the counted history; else it is forgotten.

        Partitions that the coordinator says are elsewhere are let go on the way. The caller holds the partition's lock.

        Returns
        -------
        LoadPlans
            For what is to be loaded.
        """
        self._awaited.pop(store_id, None)
        provider_id = StateStoreProviderId(store_id, run_id)
        opened = self._coordinator.open_instance(provider_id, self._others(store_id, run_id), base, store_names)
        for stale in opened.stale:
            self.unload(stale.store_id, wait=False)
        with self._memory.using(store_id):
            self._bring(held, store_id, base, opened.loading)
        return opened.loading

    def _bring(self, held: Kind, store_id: StateStoreId, base: int, loading: LoadPlans) -> None:
        match held.lineage.sync_action(base, loading.attempt_id, loading.made()):
            case SyncAction.RELOAD:
                held.forget()
            case SyncAction.CATCH_UP:
                self._go_on(held, store_id, base, loading)
            case sync_action:
                self._go_back(held, base, sync_action)

    def _go_back(self, held: Kind, base: int, sync_action: SyncAction) -> None:
        try:
            is_there = held.rollback(base)
        except BaseException:
            # Half way back is no version.
            held.forget()
            raise
        if not is_there:
            held.forget()
        elif sync_action is SyncAction.ROLLBACK:
            held.lineage.rolled_back(base)
            self._metrics.rollbacks += 1

    def _go_on(self, held: Kind, store_id: StateStoreId, base: int, loading: LoadPlans) -> None:
        try:
            deltas = held.catch_up(loading, base, self._loader)
        except CorruptStateError as error:
            # A snapshot may make up for the file.
            log.warning("falling back to loading a shard from its start: %s", error, extra=_fields(store_id, held))
            deltas = None
        except BaseException:
            held.forget()
            raise
        if deltas is None:
            held.forget()
        else:
            held.lineage.caught_up(base, loading.attempt_id, deltas)
            self._metrics.gone_on += 1

    def _others(self, store_id: StateStoreId, run_id: str) -> list[StateStoreProviderId]:
        """Further partitions in memory that were opened by a run; of many some, in turns.

        Only those can be told to be elsewhere. Those of ended runs stay: the next run of their query finds its state in memory (Spark
        would unload them). Spark's stores send all that they have with each report: those of a run's first batch would be quadratic.
        """
        every = self.items()
        begin = self._looked_at
        looked_at = [*every, *every][begin : begin + min(_LOOKED_AT, len(every))]
        self._looked_at = (begin + len(looked_at)) % max(1, len(every))
        return [
            StateStoreProviderId(other, run_id)
            for other, held in looked_at
            if other != store_id and held.lineage.is_loaded and held.lineage.run_id == run_id
        ]

    def rows_in_memory(
        self,
        state: StateStoreId,
        store_name: str,
        is_wanted: Callable[[TransferredStore], bool],
        parent: Parent,
        version: int,
    ) -> MemoryRows | None:
        """Rows of a store of another partition of a state, if it is held at just this version of the counted history.

        Parameters
        ----------
        is_wanted
            Whether its rows have the columns that are wanted.
        """
        held = self._held.get(replace(state, partition_id=parent.partition_id))
        if held is None:
            return None
        with held.lock:
            lineage = held.lineage
            if lineage.version != version or not lineage.knows(version, parent.attempt_id) or held.is_busy:
                return None
            given = held.given()
        found = None
        for store, rows in given:
            if store.name == store_name and is_wanted(store):
                found = MemoryRows(store.watermark_ms, _as_snapshot(held, store, rows))
            else:
                rows.close()
        return found

    # -- reading --------------------------------------------------------------------------------------------------

    def newest(self, store_id: StateStoreId) -> tuple[int, str]:
        """Newest counted version of a partition that memory has, and the attempt that made it; -1 if it has none."""
        held = self._held.get(store_id)
        if held is None:
            return -1, ""
        with held.changing:
            lineage = held.lineage
            return (lineage.version, lineage.attempt_of(lineage.version)) if lineage.is_loaded else (-1, "")

    def view(self, store_id: StateStoreId, store_name: str, version: int, attempt_id: str) -> ReadableRows | None:
        """A version of a store as a counted attempt made it, from memory; None if memory does not have it."""
        held = self._held.get(store_id)
        if held is None:
            return None
        found = self._viewed(held, store_name, version, attempt_id)
        if found is None:
            # A commit that was counted a moment ago is about to be told here.
            with held.lock:
                found = self._viewed(held, store_name, version, attempt_id)
        return found

    @staticmethod
    def _viewed(held: Kind, store_name: str, version: int, attempt_id: str) -> ReadableRows | None:
        with held.changing:
            view = held.view(store_name, version) if held.lineage.knows(version, attempt_id) else None
            return None if view is None else ReadableRows(held.changing, view)

    # -- from one store actor to another --------------------------------------------------------------------------

    def offer(self, store_id: StateStoreId) -> Transfer | None:
        """Offer the rows of a partition as they are now to whoever is to hold it; None if memory does not hold it."""
        held = self._held.get(store_id)
        if held is None:
            return None
        with held.lock:
            lineage = held.lineage
            given = held.given() if lineage.is_loaded else ()
            if not given:
                return None
            self._metrics.handed_over += 1
            made_by = lineage.attempt_of(lineage.version)
            return self._offers.add(held, lineage.version, made_by, lineage.deltas, given)

    def next_piece(self, offer_id: str) -> tuple[int, pa.Table] | None:
        """See :meth:`Transfers.next_piece <store_actors.serving.transfers.Transfers.next_piece>`."""
        return self._offers.next_piece(offer_id)

    def take(self, store_id: StateStoreId, offer: Transfer, put: Callable[[Kind], None]) -> int:
        """Hold what was offered, unless what is held is as new, and what was committed since; returns its version.

        It stays for some rounds of maintenance, though it is leased elsewhere.

        Parameters
        ----------
        put
            Puts the stores that were made of the offer into the partition, which is empty then.
        """
        held = self.of(store_id)
        with held.lock:
            if held.is_busy:
                return held.lineage.version
            if not held.lineage.is_loaded or held.lineage.version < offer.version:
                held.forget()
                put(held)
                held.lineage.loaded(offer.version, offer.attempt_id, offer.deltas)
                held.lineage.unleased()
                self._metrics.taken_over += 1
            self._awaited[store_id] = _AWAITED_ROUNDS
            names = [store.name for store in offer.stores]
            loading = self._coordinator.load_plans(store_id.state_name, store_id.partition_id, sys.maxsize, names)
            with self._memory.using(store_id):
                self._bring(held, store_id, loading.newest_version(), loading)
            return held.lineage.version if held.lineage.is_loaded else 0

    def replicate(self, told: ReplicatedCommit) -> bool:
        """Apply a commit of another store actor to the copy that is held here; False if there is none that it builds on."""
        held, first = self.of(told.store_id), told.entries[0]
        with held.lock:
            self._awaited[told.store_id] = _AWAITED_ROUNDS
            lineage = held.lineage
            if lineage.knows(first.version, first.attempt_id):
                return True
            builds_on = lineage.version == first.base_version and lineage.knows(lineage.version, told.base_attempt)
            if held.is_busy or not builds_on:
                return False
            size = sum(len(file) for file in told.files)
            with self._memory.working(told.store_id, first.version, 2 * size, _APPLIED * size):
                try:
                    rows = [decode_file(file, entry) for file, entry in zip(told.files, told.entries, strict=True)]
                    is_applied = held.replicate(told.entries, rows)
                except BaseException:
                    held.forget()
                    raise
            if is_applied:
                lineage.caught_up(first.version, first.attempt_id, 1)
                lineage.unleased()
                self._metrics.followed += 1
            else:
                held.forget()
            return is_applied

    def unload(self, store_id: StateStoreId, *, wait: bool = True) -> bool:
        """Drop a partition from memory; storage keeps every version. False if it is busy (or not here)."""
        held = self._held.get(store_id)
        if held is None or not held.lock.acquire(blocking=wait):
            return False
        try:
            if held.is_busy and not wait:
                return False
            was_held = held.lineage.is_loaded
            held.forget()
            return was_held
        finally:
            held.lock.release()

    def maintain(self, min_deltas_for_snapshot: int) -> None:
        """One round: write the snapshots that are due, let go of partitions that the coordinator says are elsewhere.

        The failure of one partition is logged and counted, and does not keep the others from their turn.
        """
        self._offers.close_idle()
        elsewhere = self._elsewhere()
        for store_id, held in self.items():
            try:
                if self._is_awaited(store_id):
                    continue
                if store_id in elsewhere:
                    self._take_away(held)
                elif held.lineage.deltas >= min_deltas_for_snapshot:
                    self._write_snapshots(store_id, held)
            except Exception as error:  # whatever it is, the other shards have their turn
                self._metrics.maintenance_failed(store_id.path(), error)
                log.exception(
                    "maintenance of a shard failed; it is tried again in the next round: %s",
                    store_id.path(),
                    extra=_fields(store_id, held),
                )
            else:
                self._metrics.maintenance_succeeded(store_id.path())

    def _is_awaited(self, store_id: StateStoreId) -> bool:
        """Whether a partition is yet to be leased here; each question is a round of its patience."""
        rounds = self._awaited.pop(store_id, 0)
        if rounds > 1:
            self._awaited[store_id] = rounds - 1
        return rounds > 0

    def _elsewhere(self) -> set[StateStoreId]:
        """Partitions in memory that the coordinator says are elsewhere: one question for each state."""
        by_state: dict[str, list[StateStoreId]] = {}
        for store_id, held in self.items():
            if held.lineage.is_loaded:
                by_state.setdefault(store_id.state_name, []).append(store_id)
        found: set[StateStoreId] = set()
        for name, store_ids in by_state.items():
            try:
                found.update(self._coordinator.elsewhere(name, store_ids))
            except Exception as error:  # whatever it is, the other states have their turn
                self._metrics.maintenance_failed(name, error)
                log.exception(
                    "where a state's shards are cannot be learned; it is asked again in the next round: %s",
                    name,
                    extra={"state": name},
                )
            else:
                self._metrics.maintenance_succeeded(name)
        return found

    def _take_away(self, held: Kind) -> None:
        """Let go of a partition that is elsewhere; in a later round if somebody has its lock, which may be for long."""
        if not held.lock.acquire(blocking=False):
            return
        try:
            held.evict()
        finally:
            held.lock.release()
        self._metrics.shards_unloaded += 1

    def _write_snapshots(self, store_id: StateStoreId, held: Kind) -> None:
        # Under the lock only some rows are copied at a time: batches go on while these are encoded and stored.
        with held.lock:
            due = held.frozen() if held.lineage.is_loaded else ()
            deltas = held.lineage.deltas
        for one in due:
            with self._memory.using(store_id), closing(tables_of(held, one.pieces)) as tables:
                self._commits.write_snapshot(
                    replace(store_id, store_name=one.entry.store_name), one.entry, tables, one.schema, one.room
                )
        if due:
            # One that was not counted is of no use any more, or is there already: neither is tried again.
            with held.lock:
                held.lineage.snapshot_written(deltas)


def _fields(store_id: StateStoreId, held: Held) -> dict[str, object]:
    """Fields of a log line about a partition."""
    lineage = held.lineage
    return about(store_id, run=lineage.run_id or None, version=lineage.version, epoch=lineage.epoch)


def _as_snapshot(held: Held, store: TransferredStore, rows: Frozen) -> Iterator[pa.Table]:
    # A store may have no rows, and is at the version nevertheless.
    yield as_snapshot(store.schema.row_schema().empty_table(), store.schema)
    for table in tables_of(held, rows):
        yield as_snapshot(table, store.schema)


class ServedPartitions(Generic[Kind]):
    """What is asked of the partitions of one process alike, whatever their kind; see :class:`PartitionCache`."""

    _held: PartitionCache[Kind]
    _memory: StoreMemory

    def offer(self, store_id: StateStoreId) -> Transfer | None:
        """See :meth:`PartitionCache.offer`."""
        return self._held.offer(store_id)

    def next_piece(self, offer_id: str) -> tuple[int, pa.Table] | None:
        """See :meth:`PartitionCache.next_piece`."""
        return self._held.next_piece(offer_id)

    def count(self) -> int:
        """Partitions in memory."""
        return sum(held.lineage.is_loaded for _, held in self._held.items())

    def newest(self, store_id: StateStoreId) -> tuple[int, str]:
        """See :meth:`PartitionCache.newest`."""
        return self._held.newest(store_id)

    def using(self, store_id: StateStoreId) -> AbstractContextManager[None]:
        """Memory of the process for whoever reads a partition, a piece at a time."""
        return self._memory.using(store_id)

    def view(self, store_id: StateStoreId, store_name: str, version: int, attempt_id: str) -> ReadableRows | None:
        """See :meth:`PartitionCache.view`."""
        return self._held.view(store_id, store_name, version, attempt_id)

    def replicate(self, told: ReplicatedCommit) -> bool:
        """See :meth:`PartitionCache.replicate`."""
        return self._held.replicate(told)

    def maintain(self, min_deltas_for_snapshot: int) -> None:
        """See :meth:`PartitionCache.maintain`."""
        self._held.maintain(min_deltas_for_snapshot)

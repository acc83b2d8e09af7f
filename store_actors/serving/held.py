"""Partitions that a process holds in memory: who they are, when they go, when a snapshot of them is written. No Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from coordinator.model import CommitEntry, LoadPlans, StateStoreId, StateStoreProviderId
from coordinator.surroundings import Lock
from store_actors.engine.versions import Frozen
from store_actors.schema import StateSchema
from store_actors.serving.commits import Commits
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.lineage import Lineage, Stand
from store_actors.serving.metrics import StoreMetrics

__all__ = ["FrozenStore", "Held", "HeldPartitions"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrozenStore:
    """The rows of a counted commit as they are now.

    Attributes
    ----------
    pieces
        Given out under the partition's lock; each is made into tables outside it.
    room
        What the rows need in memory.
    """

    entry: CommitEntry
    pieces: Frozen
    room: Mapping[str, Any]
    schema: StateSchema


class Held(Protocol):
    """What memory holds of one partition; `lock` is taken by whoever looks at or changes anything else of it."""

    @property
    def lock(self) -> Lock: ...

    @property
    def lineage(self) -> Lineage: ...

    @property
    def is_busy(self) -> bool:
        """Whether somebody is in the middle of a change."""

    def frozen(self) -> Sequence[FrozenStore]:
        """Its stores as their newest commits made them; none where memory was loaded."""

    def rollback(self, version: int) -> bool:
        """Bring all that is held to a version of the same history; False if memory has no way there."""

    def forget(self) -> None:
        """Let go of everything; what is stored is loaded when it is wanted again."""

    def taken_away(self) -> None:
        """:meth:`forget`, and end who is in the middle of a change: another store actor has the partition."""


Kind = TypeVar("Kind", bound=Held)


class HeldPartitions(Generic[Kind]):
    """The partitions of one process, of one kind. Thread-safe.

    Parameters
    ----------
    make
        Makes an empty partition with a lock.
    guard
        Lock of the list itself.
    coordinator, commits, metrics
        Who says where partitions are; who writes; what is counted.
    """

    def __init__(
        self,
        make: Callable[[], Kind],
        guard: Lock,
        coordinator: CoordinatorRef,
        commits: Commits,
        metrics: StoreMetrics,
    ) -> None:
        self._make = make
        self._guard = guard
        self._coordinator = coordinator
        self._commits = commits
        self._metrics = metrics
        self._held: dict[StateStoreId, Kind] = {}

    def of(self, store_id: StateStoreId) -> Kind:
        """A partition, empty at first."""
        with self._guard:
            held = self._held.get(store_id)
            if held is None:
                held = self._held[store_id] = self._make()
            return held

    def items(self) -> list[tuple[StateStoreId, Kind]]:
        """Partitions that were ever asked for."""
        with self._guard:
            return list(self._held.items())

    def bring_to(
        self, held: Kind, store_id: StateStoreId, run_id: str, base: int, store_names: Sequence[str]
    ) -> LoadPlans:
        """Report a partition, and bring its memory to a version if it is of the counted history; else it is forgotten.

        Partitions that the coordinator says are elsewhere are let go on the way. The caller holds the partition's lock.

        Returns
        -------
        LoadPlans
            For what is to be loaded.
        """
        provider_id = StateStoreProviderId(store_id, run_id)
        opened = self._coordinator.open_instance(provider_id, self._others(store_id, run_id), base, store_names)
        for stale in opened.stale:
            self.unload(stale.store_id, wait=False)
        stand = held.lineage.stand(base, opened.loading.attempt_id)
        if stand is Stand.LOAD or not held.rollback(base):
            held.forget()
        elif stand is Stand.GO_BACK:
            held.lineage.went_back(base)
            self._metrics.rollbacks += 1
        return opened.loading

    def _others(self, store_id: StateStoreId, run_id: str) -> list[StateStoreProviderId]:
        """Further partitions in memory that were opened by a run.

        Only those can be told to be elsewhere. Those of ended runs stay: the next run of their query finds its state in memory (Spark
        would unload them).
        """
        return [
            StateStoreProviderId(other, run_id)
            for other, held in self.items()
            if other != store_id and held.lineage.is_held and held.lineage.run_id == run_id
        ]

    def unload(self, store_id: StateStoreId, *, wait: bool = True) -> bool:
        """Drop a partition from memory; storage keeps every version. False if it is busy (or not here)."""
        held = self._held.get(store_id)
        if held is None or not held.lock.acquire(blocking=wait):
            return False
        try:
            if held.is_busy and not wait:
                return False
            was_held = held.lineage.is_held
            held.forget()
            return was_held
        finally:
            held.lock.release()

    def maintain(self, min_deltas_for_snapshot: int) -> None:
        """One round: write the snapshots that are due, let go of partitions that the coordinator says are elsewhere.

        The failure of one partition is logged and counted, and does not keep the others from their turn.
        """
        elsewhere = self._elsewhere()
        for store_id, held in self.items():
            try:
                if store_id in elsewhere:
                    self._take_away(held)
                elif held.lineage.deltas >= min_deltas_for_snapshot:
                    self._write_snapshots(store_id, held)
            except Exception as error:  # whatever it is, the other shards have their turn
                self._metrics.maintenance_failed(store_id.path(), error)
                log.exception("maintenance of a shard failed; it is tried again in the next round: %s", store_id.path())
            else:
                self._metrics.maintenance_succeeded(store_id.path())

    def _elsewhere(self) -> set[StateStoreId]:
        """Partitions in memory that the coordinator says are elsewhere: one question for each state."""
        by_state: dict[str, list[StateStoreId]] = {}
        for store_id, held in self.items():
            if held.lineage.is_held:
                by_state.setdefault(store_id.state_name, []).append(store_id)
        found: set[StateStoreId] = set()
        for name, store_ids in by_state.items():
            try:
                found.update(self._coordinator.elsewhere(name, store_ids))
            except Exception as error:  # whatever it is, the other states have their turn
                self._metrics.maintenance_failed(name, error)
                log.exception(
                    "where a state's shards are cannot be learned; it is asked again in the next round: %s", name
                )
            else:
                self._metrics.maintenance_succeeded(name)
        return found

    def _take_away(self, held: Kind) -> None:
        """Let go of a partition that is elsewhere; in a later round if somebody has its lock, which may be for long."""
        if not held.lock.acquire(blocking=False):
            return
        try:
            held.taken_away()
        finally:
            held.lock.release()
        self._metrics.shards_unloaded += 1

    def _write_snapshots(self, store_id: StateStoreId, held: Kind) -> None:
        # Under the lock only some rows are copied at a time: batches go on while these are encoded and stored.
        with held.lock:
            due = held.frozen() if held.lineage.is_held else ()
            deltas = held.lineage.deltas
        for one in due:
            with closing(_tables(held, one)) as tables:
                self._commits.write_snapshot(
                    replace(store_id, store_name=one.entry.store_name), one.entry, tables, one.schema, one.room
                )
        if due:
            # One that was not counted is of no use any more, or is there already: neither is tried again.
            with held.lock:
                held.lineage.snapshot_written(deltas)


def _tables(held: Held, frozen: FrozenStore) -> Generator[pa.Table, None, None]:
    """The rows of a store, a piece at a time."""
    try:
        while True:
            with held.lock:
                made = next(frozen.pieces, None)
            if made is None:
                return
            yield from made()
    finally:
        with held.lock:
            frozen.pieces.close()

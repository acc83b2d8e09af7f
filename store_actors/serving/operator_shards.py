"""The store: shards held by one process, and the commit protocol's half that runs there. No Ray in here.

Life of a request: position the shard at the version the batch reads (in memory if it can, else from the manifest's delta
files), apply, write the delta under a unique name, ask the coordinator to count it. Whatever the coordinator answers is
the truth: the own attempt, or another one of the same run, which is then adopted.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from coordinator.errors import FencedError, StateStoreError
from coordinator.model import DEFAULT_STORE, CommitEntry, LoadPlan, SnapshotEntry, StateStoreId, StateStoreProviderId
from coordinator.storage.protocol import ObjectStore
from store_actors.messages import ApplyRequest, ShardInput
from store_actors.operators.make_shard import OperatorShard, make_shard
from store_actors.schema import StateSchema
from store_actors.serving.commits import describe_commit, discard, write_snapshot
from store_actors.serving.evolution import adapter
from store_actors.serving.loading import Loader, LoadMetrics

__all__ = ["CoordinatorClient", "Store", "StoreMetrics"]

log = logging.getLogger(__name__)


class CoordinatorClient(Protocol):
    """What a store asks of the coordinator; each call may be repeated without harm."""

    def commit(self, state_name: str, entry: CommitEntry) -> CommitEntry:
        """Count a commit; returns the entry that counts."""

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        """Count the commits of all stores of a partition together; returns the entries that count."""

    def load_plan(self, state_name: str, partition_id: int, version: int, store_name: str = DEFAULT_STORE) -> LoadPlan:
        """Files that make the shard's version."""

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        """Count a snapshot; False if its version was superseded meanwhile."""

    def is_elsewhere(self, store_id: StateStoreId) -> bool:
        """Whether another store actor has the shard's lease."""

    def report_active_instance(
        self, provider_id: StateStoreProviderId, ids_to_check: Sequence[StateStoreProviderId]
    ) -> Sequence[StateStoreProviderId]:
        """Say that this store holds a shard; returns which of the others it should unload."""


@dataclass(slots=True)
class StoreMetrics(LoadMetrics):
    """Counters since the process started."""

    bytes_written: int = 0
    commits: int = 0
    replayed_answers: int = 0
    adopted_commits: int = 0
    rollbacks: int = 0
    snapshots_written: int = 0
    shards_unloaded: int = 0
    maintenance_failures: int = 0


@dataclass(slots=True)
class _Held:
    """A shard in memory with what proves which lineage it belongs to."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    shard: OperatorShard | None = None
    epoch: int = -1
    run_id: str = ""
    #: Counted attempt of each version that memory can still reach.
    attempts: dict[int, str] = field(default_factory=dict)
    #: The newest commit with the rows it emitted, for a retry of the task that made it.
    newest: tuple[CommitEntry, pa.Table] | None = None
    #: Deltas that loading the newest version would replay.
    deltas: int = 0

    def forget(self) -> None:
        self.shard, self.newest, self.epoch = None, None, -1
        self.attempts.clear()


class Store:
    """Shards of one process. Thread-safe: one lock a shard, so shards proceed side by side.

    Parameters
    ----------
    objects
        Where deltas are written.
    coordinator
        Who counts commits.
    """

    def __init__(self, objects: ObjectStore, coordinator: CoordinatorClient) -> None:
        self.metrics = StoreMetrics()
        self._objects = objects
        self._coordinator = coordinator
        self._loader = Loader(objects, self.metrics)
        self._held: dict[StateStoreId, _Held] = {}
        self._guard = threading.Lock()

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
        with self._guard:
            held = self._held.setdefault(request.lease.store_id, _Held())
        with held.lock:
            recorded = self._recorded(held, request)
            if recorded is None:
                shard = self._position(held, request)
                recorded = self._commit(held, shard, request, rows)
            entry, emitted = recorded
            if request.schema.output_mode != "complete":
                return emitted, entry
            assert held.shard is not None
            return held.shard.snapshot(), entry

    def _recorded(self, held: _Held, request: ApplyRequest) -> tuple[CommitEntry, pa.Table] | None:
        """The commit of this very version by this very run, if there is one (a retried or doubled task)."""
        if held.newest is None or held.shard is None:
            return None
        entry = held.newest[0]
        if (entry.run_id, entry.version) != (request.task.run_id, request.task.batch_id + 1):
            return None
        self.metrics.replayed_answers += 1
        return held.newest

    def _position(self, held: _Held, request: ApplyRequest) -> OperatorShard:
        """The shard at the version that the batch reads."""
        base = request.base_version
        if held.shard is not None and held.shard.schema != request.schema:
            # The query was changed: its state is read again, in the new schema.
            held.forget()
        if held.epoch != request.lease.epoch or held.shard is None or held.shard.version != base:
            self._verify_lineage(held, request)
        if held.shard is None:
            held.shard = self._load(held, request)
        held.epoch, held.run_id = request.lease.epoch, request.task.run_id
        return held.shard

    def _verify_lineage(self, held: _Held, request: ApplyRequest) -> None:
        """Keep what memory holds only if it is the counted history, moved back to the base version."""
        store_id, base = request.lease.store_id, request.base_version
        provider_id = StateStoreProviderId(store_id, request.task.run_id)
        # Only shards of this run can be told to be elsewhere. Those of ended runs stay: the next run of their query finds its
        # state in memory (Spark would unload them).
        with self._guard:
            others = [
                StateStoreProviderId(other, one.run_id)
                for other, one in self._held.items()
                if one.shard is not None and other != store_id and one.run_id == request.task.run_id
            ]
        for stale in self._coordinator.report_active_instance(provider_id, others):
            self.unload(stale.store_id, wait=False)
        if held.shard is None:
            return
        newest = held.shard.version
        deltas = self._coordinator.load_plan(store_id.state_name, store_id.partition_id, base).deltas
        counted = deltas[-1].attempt_id if deltas else ""
        if held.attempts.get(base, "") != counted or not held.shard.rollback(base):
            held.forget()
            return
        held.newest = None
        self.metrics.rollbacks += newest != base

    def _load(self, held: _Held, request: ApplyRequest) -> OperatorShard:
        """Read the base version from storage."""
        store_id = request.lease.store_id
        plan = self._coordinator.load_plan(store_id.state_name, store_id.partition_id, request.base_version)
        shard, held.deltas = self._loader.load(lambda: make_shard(request.schema), plan, adapter(plan, request.schema))
        held.attempts = {entry.version: entry.attempt_id for entry in plan.deltas[-1:]}
        return shard

    def read(self, store_id: StateStoreId, version: int, schema: StateSchema) -> pa.Table:
        """All rows of any retained version, in ``row_schema``, from storage; what is in memory is not touched.

        Raises
        ------
        InvalidRequestError
            The version is not retained.
        CorruptStateError
            A file that it needs is missing or damaged.
        """
        plan = self._coordinator.load_plan(store_id.state_name, store_id.partition_id, version)
        return self._loader.load(lambda: make_shard(schema), plan, adapter(plan, schema))[0].snapshot()

    def _commit(
        self, held: _Held, shard: OperatorShard, request: ApplyRequest, rows: ShardInput
    ) -> tuple[CommitEntry, pa.Table]:
        entry: CommitEntry | None = None
        try:
            watermarks = request.watermarks
            change = shard.apply(rows, watermarks.input_ms, request.task.batch_id + 1)
            entry, data = describe_commit(
                change,
                task=request.task,
                lease=request.lease,
                store_id=request.lease.store_id,
                attempt_id=uuid.uuid4().hex,
                schema=request.schema,
                state_rows=len(shard),
                state_bytes=shard.nbytes,
                watermarks=replace(
                    watermarks, output_ms=max(watermarks.output_ms, shard.output_watermark_ms(watermarks.input_ms))
                ),
            )
            self._objects.put(entry.file, data)
            counted = self._coordinator.commit(request.task.state_name, entry)
        except BaseException as error:
            # The shard may be half changed, or the commit counted after all: memory is no longer the truth, so it goes.
            held.forget()
            if entry is not None and isinstance(error, FencedError):
                discard(self._objects, entry.file)
            raise
        if counted.attempt_id == entry.attempt_id:
            shard.commit()
            emitted = self._emitted(shard, change.emitted, change.delta)
            self.metrics.commits += 1
            self.metrics.bytes_written += len(data)
        else:
            # What cannot be read off a delta is the same for every attempt: it follows from the version and the rows.
            emitted = self._emitted(shard, change.emitted, self._adopt(shard, counted))
            discard(self._objects, entry.file)
        held.attempts[counted.version] = counted.attempt_id
        for version in [v for v in held.attempts if v < shard.version - 4]:
            del held.attempts[version]
        held.newest = (counted, emitted)
        held.deltas += 1
        return held.newest

    @staticmethod
    def _emitted(shard: OperatorShard, emitted: pa.Table | None, delta: pa.Table) -> pa.Table:
        # In complete mode the whole version is emitted, which is nothing to keep beside the shard.
        if shard.schema.output_mode == "complete":
            return delta.slice(0, 0)
        return shard.output(delta) if emitted is None else emitted

    def _adopt(self, shard: OperatorShard, counted: CommitEntry) -> pa.Table:
        """Another attempt of the same run was counted first: take its delta instead of the own."""
        shard.abort()
        delta = self._loader.read(counted)
        shard.load(delta, counted.version, counted.watermark_ms)
        self.metrics.adopted_commits += 1
        return delta

    # -- maintenance ----------------------------------------------------------------------------------------------

    def maintain(self, min_deltas_for_snapshot: int) -> None:
        """One round: write the snapshots that are due, let go of shards that the coordinator says are elsewhere.

        The failure of one shard is logged and counted, and does not keep the others from their turn.
        """
        with self._guard:
            held_shards = list(self._held.items())
        for store_id, held in held_shards:
            try:
                if held.shard is not None and self._coordinator.is_elsewhere(store_id):
                    self.metrics.shards_unloaded += self.unload(store_id, wait=False)
                elif held.deltas >= min_deltas_for_snapshot:
                    self._write_snapshot(store_id, held)
            except (StateStoreError, OSError):
                self.metrics.maintenance_failures += 1
                log.exception("maintenance of a shard failed; it is tried again in the next round: %s", store_id.path())

    def _write_snapshot(self, store_id: StateStoreId, held: _Held) -> None:
        # Under the lock only a copy of the rows is taken: batches go on while it is encoded and stored.
        with held.lock:
            if held.shard is None or held.newest is None:
                return
            entry, schema = held.newest[0], held.shard.schema
            frozen = held.shard.frozen()
        size = write_snapshot(self._objects, self._coordinator, store_id, entry, frozen(), schema)
        if size is None:
            return
        self.metrics.snapshots_written += 1
        self.metrics.bytes_written += size
        with held.lock:
            if held.newest is not None:
                held.deltas = max(0, held.newest[0].version - entry.version)

    def unload(self, store_id: StateStoreId, *, wait: bool = True) -> bool:
        """Drop a shard from memory; storage keeps every version. False if it is busy (or not here)."""
        held = self._held.get(store_id)
        if held is None or not held.lock.acquire(blocking=wait):
            return False
        try:
            was_loaded = held.shard is not None
            held.forget()
            return was_loaded
        finally:
            held.lock.release()

    def loaded(self) -> list[tuple[StateStoreId, int, int]]:
        """(shard, version, rows) of every shard in memory."""
        with self._guard:
            items = list(self._held.items())
        return [(key, one.shard.version, len(one.shard)) for key, one in items if one.shard is not None]

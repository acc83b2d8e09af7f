"""The store: shards held by one process, and the commit protocol's half that runs there. No Ray in here.

Life of a request: position the shard at the version the batch reads (in memory if it can, else from the manifest's delta
files), apply, write the delta under a unique name, ask the coordinator to count it. Whatever the coordinator answers is
the truth: the own attempt, or another one of the same run, which is then adopted.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from coordinator.errors import FencedError, StorageUnavailableError
from coordinator.model import CommitEntry, StateStoreId, StateStoreProviderId
from coordinator.storage import ObjectStore
from store_actors.delta import corrupt_delta, decode_delta, delta_path, encode_delta
from store_actors.messages import ApplyRequest, ShardInput
from store_actors.shard import Change, Shard, output_of

__all__ = ["CoordinatorClient", "Store", "StoreMetrics"]

log = logging.getLogger(__name__)


class CoordinatorClient(Protocol):
    """What a store asks of the coordinator; each call may be repeated without harm."""

    def commit(self, state_name: str, entry: CommitEntry) -> CommitEntry:
        """Count a commit; returns the entry that counts."""

    def commit_chain(self, state_name: str, partition_id: int, version: int) -> Sequence[CommitEntry]:
        """Entries whose deltas, in order, make the shard's version."""

    def report_active_instance(
        self, provider_id: StateStoreProviderId, ids_to_check: Sequence[StateStoreProviderId]
    ) -> Sequence[StateStoreProviderId]:
        """Say that this store holds a shard; returns which of the others it should unload."""


@dataclass(slots=True)
class StoreMetrics:
    """Counters since the process started."""

    bytes_loaded: int = 0
    deltas_loaded: int = 0
    bytes_written: int = 0
    commits: int = 0
    replayed_answers: int = 0
    adopted_commits: int = 0
    rollbacks: int = 0


@dataclass(slots=True)
class _Held:
    """A shard in memory with what proves which lineage it belongs to."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    shard: Shard | None = None
    epoch: int = -1
    run_id: str = ""
    #: Counted attempt of each version that memory can still reach.
    attempts: dict[int, str] = field(default_factory=dict)
    #: The newest commit with its delta, for a retry of the task that made it.
    newest: tuple[CommitEntry, pa.Table] | None = None

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
        self._objects = objects
        self._coordinator = coordinator
        self._held: dict[StateStoreId, _Held] = {}
        self._guard = threading.Lock()
        self.metrics = StoreMetrics()

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
            entry, delta = recorded
            if request.schema.output_mode != "complete":
                return output_of(delta, request.schema.output_mode), entry
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

    def _position(self, held: _Held, request: ApplyRequest) -> Shard:
        """The shard at the version that the batch reads."""
        base = request.base_version
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
        chain = self._coordinator.commit_chain(store_id.state_name, store_id.partition_id, base)
        counted = chain[-1].attempt_id if chain else ""
        if held.attempts.get(base, "") != counted or not held.shard.rollback(base):
            held.forget()
            return
        held.newest = None
        self.metrics.rollbacks += newest != base

    def _load(self, held: _Held, request: ApplyRequest) -> Shard:
        """Read the base version's deltas from storage."""
        store_id = request.lease.store_id
        shard = Shard(request.schema)
        held.attempts = {}
        for entry in self._coordinator.commit_chain(store_id.state_name, store_id.partition_id, request.base_version):
            shard.load(self._read(entry), entry.version, entry.watermark_ms)
            held.attempts = {entry.version: entry.attempt_id}
        return shard

    def _read(self, entry: CommitEntry) -> pa.Table:
        try:
            data = self._objects.get(entry.file)
        except FileNotFoundError as error:
            raise corrupt_delta(entry, "it is missing from the object store") from error
        self.metrics.bytes_loaded += len(data)
        self.metrics.deltas_loaded += 1
        return decode_delta(data, entry)

    def _commit(
        self, held: _Held, shard: Shard, request: ApplyRequest, rows: ShardInput
    ) -> tuple[CommitEntry, pa.Table]:
        entry: CommitEntry | None = None
        try:
            change = shard.apply(rows, request.max_event_ms, request.task.batch_id + 1)
            entry, data = _describe(change, request, shard)
            self._objects.put(entry.file, data)
            counted = self._coordinator.commit(request.task.state_name, entry)
        except BaseException as error:
            # The shard may be half changed, or the commit counted after all: memory is no longer the truth, so it goes.
            held.forget()
            if entry is not None and isinstance(error, FencedError):
                self._discard(entry)
            raise
        if counted.attempt_id == entry.attempt_id:
            shard.commit()
            delta = change.delta
            self.metrics.commits += 1
            self.metrics.bytes_written += len(data)
        else:
            delta = self._adopt(shard, counted)
            self._discard(entry)
        held.attempts[counted.version] = counted.attempt_id
        for version in [v for v in held.attempts if v < shard.version - 4]:
            del held.attempts[version]
        held.newest = (counted, delta)
        return held.newest

    def _adopt(self, shard: Shard, counted: CommitEntry) -> pa.Table:
        """Another attempt of the same run was counted first: take its delta instead of the own."""
        shard.abort()
        delta = self._read(counted)
        shard.load(delta, counted.version, counted.watermark_ms)
        self.metrics.adopted_commits += 1
        return delta

    def _discard(self, entry: CommitEntry) -> None:
        """Remove the file of a commit that certainly does not count."""
        try:
            self._objects.delete(entry.file)
        except (StorageUnavailableError, FileNotFoundError):
            log.warning("an uncounted delta file stays behind: %s", entry.file)

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


def _describe(change: Change, request: ApplyRequest, shard: Shard) -> tuple[CommitEntry, bytes]:
    attempt_id = uuid.uuid4().hex
    data, checksum = encode_delta(change, request.schema)
    task = request.task
    entry = CommitEntry(
        partition_id=task.partition_id,
        version=change.version,
        base_version=change.base_version,
        epoch=request.lease.epoch,
        run_id=task.run_id,
        attempt_id=attempt_id,
        file=delta_path(request.lease.store_id, change.version, attempt_id),
        file_bytes=len(data),
        checksum=checksum,
        delta_rows=change.delta.num_rows,
        rows_updated=change.rows_updated,
        rows_removed=change.rows_removed,
        state_rows=len(shard),
        state_bytes=shard.nbytes,
        rows_in=change.rows_in,
        rows_late=change.rows_late,
        watermark_ms=change.watermark_ms,
        committed_at_ms=int(time.time() * 1000),
        executor=task.executor,
    )
    return entry, data

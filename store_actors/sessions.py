"""Keyed state stores of one process: sessions that read and update them, and their half of the commit protocol. No Ray.

A session is one handle on all named stores of one partition, at one version. It updates (at most one session a partition, and
its stores commit together, as one version) or reads (any number, any retained version). What is in memory and what is counted
is kept in step as in :mod:`store_actors.store`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from coordinator.errors import (
    FencedError,
    InvalidRequestError,
    OperationOutOfOrderError,
    StateStoreError,
    WriterBusyError,
)
from coordinator.model import CommitEntry, StateStoreId
from coordinator.storage import ObjectStore
from store_actors.commits import describe_commit, discard, write_snapshot
from store_actors.evolution import evolve
from store_actors.keyed import KeyedShard, ReadHandle, UpdateHandle
from store_actors.loading import Loader
from store_actors.messages import OpenRequest, StoreSpec
from store_actors.store import CoordinatorClient, StoreMetrics
from store_actors.versions import CHANGE_COLUMN

__all__ = ["KeyedStores"]

log = logging.getLogger(__name__)

#: Methods of handles that a session may be asked for; scans are pulled batch by batch.
_CALLS = frozenset({"get", "multi_get", "put", "put_row", "remove", "remove_key", "remove_where", "updates", "metrics"})
_SCANS = frozenset({"iterator", "prefix_scan", "range_scan"})
#: Seconds without a call after which a session is taken for abandoned.
_IDLE_S = 600.0


@dataclass(slots=True)
class _Partition:
    """The named stores of one partition in memory, with what proves which lineage they belong to."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    shards: dict[str, KeyedShard] = field(default_factory=dict)
    specs: dict[str, StoreSpec] = field(default_factory=dict)
    #: Counted attempt of each version that memory can still reach.
    attempts: dict[int, str] = field(default_factory=dict)
    writer: _Session | None = None
    newest: dict[str, CommitEntry] = field(default_factory=dict)
    deltas: int = 0

    def forget(self) -> None:
        self.shards.clear()
        self.attempts.clear()
        self.newest.clear()


@dataclass(slots=True)
class _Session:
    request: OpenRequest
    partition: _Partition
    handles: dict[str, UpdateHandle] | dict[str, ReadHandle]
    used_s: float
    committed: int | None = None
    ended: str = ""
    #: Whether somebody newer ended it.
    fenced: bool = False
    scans: dict[str, Iterator[pa.RecordBatch]] = field(default_factory=dict)


class KeyedStores:
    """Sessions on the keyed stores of this process. Thread-safe: one lock a partition.

    Parameters
    ----------
    objects
        Where deltas are written.
    coordinator
        Who counts commits.
    metrics
        Counters shared with the process's other stores.
    """

    def __init__(self, objects: ObjectStore, coordinator: CoordinatorClient, metrics: StoreMetrics) -> None:
        self._objects = objects
        self._coordinator = coordinator
        self._metrics = metrics
        self._loader = Loader(objects, metrics)
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._sessions: dict[str, _Session] = {}
        self._guard = threading.Lock()

    # -- opening --------------------------------------------------------------------------------------------------

    def open_update(self, request: OpenRequest) -> tuple[str, int]:
        """Begin the version after the request's base; returns the session's id and the base version.

        A newer attempt of the same task, and a newer run, take over from a session that is still open.

        Raises
        ------
        WriterBusyError
            Another session is updating the partition.
        StateMismatchError, CorruptStateError, StorageUnavailableError
            The base version cannot be read into the stores asked for.
        """
        partition = self._partition(request)
        with partition.lock:
            self._take_over(partition, request)
            try:
                self._position(partition, request)
            except BaseException:
                partition.forget()
                raise
            handles = {
                spec.name: partition.shards[spec.name].begin(request.base_version, request.task.batch_id + 1)
                for spec in request.stores
            }
            session = _Session(request, partition, handles, time.monotonic())
            partition.writer = session
            return self._register(session), request.base_version

    def open_read(self, request: OpenRequest) -> tuple[str, int]:
        """Read the request's base version, from memory if it is there, else from storage.

        Raises
        ------
        InvalidRequestError
            The version is not retained.
        """
        partition = self._partition(request)
        with partition.lock:
            handles = {spec.name: self._reader(partition, request, spec) for spec in request.stores}
            return self._register(_Session(request, partition, handles, time.monotonic())), request.base_version

    def _reader(self, partition: _Partition, request: OpenRequest, spec: StoreSpec) -> ReadHandle:
        plan = self._coordinator.load_plan(
            request.lease.store_id.state_name, request.task.partition_id, request.base_version, spec.name
        )
        counted = plan.deltas[-1].attempt_id if plan.deltas else ""
        shard = partition.shards.get(spec.name)
        known = partition.attempts.get(request.base_version, "")
        if (
            shard is not None
            and partition.specs[spec.name] == spec
            and known == counted
            and request.base_version in shard.retained
        ):
            return shard.read(request.base_version)
        return self._loader.load(_maker(spec), plan, _adapter(spec))[0].read()

    def _partition(self, request: OpenRequest) -> _Partition:
        names = [spec.name for spec in request.stores]
        if not names or len(set(names)) != len(names):
            raise InvalidRequestError("name each store once, and at least one", stores=names)
        key = (request.lease.store_id.state_name, request.task.partition_id)
        with self._guard:
            self._drop_abandoned()
            return self._partitions.setdefault(key, _Partition())

    def _register(self, session: _Session) -> str:
        session_id = uuid.uuid4().hex
        with self._guard:
            self._sessions[session_id] = session
        return session_id

    def _drop_abandoned(self) -> None:
        """Forget read sessions and ended ones that nobody has used for long; an abandoned writer is taken over."""
        horizon = time.monotonic() - _IDLE_S
        for session_id, session in list(self._sessions.items()):
            if session.used_s < horizon and session.partition.writer is not session:
                del self._sessions[session_id]

    def _take_over(self, partition: _Partition, request: OpenRequest) -> None:
        writer = partition.writer
        if writer is None:
            return
        former, asked = writer.request.task, request.task
        is_newer = former.run_id != asked.run_id or former.batch_id != asked.batch_id or former.attempt < asked.attempt
        if not is_newer and time.monotonic() - writer.used_s < _IDLE_S:
            raise WriterBusyError(
                "another handle is changing this partition; nothing was changed; commit or abort that one first",
                state=asked.state_name,
                partition=asked.partition_id,
                version=request.base_version,
            )
        self._end(writer, "a newer attempt took the partition over", fenced=True)

    def _position(self, partition: _Partition, request: OpenRequest) -> None:
        """Bring every store to the base version, in memory if it is the counted one."""
        base, state_name = request.base_version, request.lease.store_id.state_name
        plans = {
            spec.name: self._coordinator.load_plan(state_name, request.task.partition_id, base, spec.name)
            for spec in request.stores
        }
        counted = next((plan.deltas[-1].attempt_id for plan in plans.values() if plan.deltas), "")
        # Every store of the partition goes along, also those that this session did not ask for.
        in_memory = (
            bool(partition.shards)
            and partition.attempts.get(base, "") == counted
            and all(shard.rollback(base) for shard in partition.shards.values())
        )
        if not in_memory:
            partition.forget()
        for spec in request.stores:
            if partition.specs.get(spec.name) != spec or spec.name not in partition.shards:
                shard, deltas = self._loader.load(_maker(spec), plans[spec.name], _adapter(spec))
                if shard.version < base:
                    # A store without versions, or added later than its siblings, is empty at the base version.
                    shard.load(_empty(shard), base)
                partition.shards[spec.name], partition.specs[spec.name] = shard, spec
                partition.deltas = max(partition.deltas, deltas)
        partition.attempts[base] = counted

    # -- using ----------------------------------------------------------------------------------------------------

    def call(self, session_id: str, store_name: str, method: str, args: tuple[Any, ...]) -> Any:
        """Result of a handle's method.

        Raises
        ------
        OperationOutOfOrderError
            The session has ended.
        InvalidRequestError
            There is no such store or method in this session.
        """
        session = self._session(session_id)
        with session.partition.lock:
            handle = self._handle(session, store_name)
            if method in _SCANS:
                scan_id = uuid.uuid4().hex
                session.scans[scan_id] = iter(getattr(handle, method)(*args))
                return scan_id
            if method not in _CALLS or not hasattr(handle, method):
                raise InvalidRequestError("this handle has no such operation", operation=method, store=store_name)
            return getattr(handle, method)(*args)

    def next_batch(self, session_id: str, scan_id: str) -> pa.RecordBatch | None:
        """Next batch of a scan, None after the last."""
        session = self._session(session_id)
        with session.partition.lock:
            self._check_open(session)
            batch = next(session.scans[scan_id], None)
            if batch is None:
                del session.scans[scan_id]
            return batch

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise OperationOutOfOrderError(
                "the handle is not known to the store actor any more (it was restarted, or the handle was not used for long); nothing "
                "of it was committed unless commit said so; open a new one"
            )
        session.used_s = time.monotonic()
        return session

    @staticmethod
    def _check_open(session: _Session) -> None:
        if session.ended:
            task = session.request.task
            kind = FencedError if session.fenced else OperationOutOfOrderError
            raise kind(
                f"the handle has ended: {session.ended}; nothing was changed; open a new one",
                state=task.state_name,
                partition=task.partition_id,
                version=session.request.base_version,
            )

    def _handle(self, session: _Session, store_name: str) -> UpdateHandle | ReadHandle:
        self._check_open(session)
        if store_name not in session.handles:
            raise InvalidRequestError(
                "the handle was opened without this store", store=store_name, stores=sorted(session.handles)
            )
        return session.handles[store_name]

    # -- ending ---------------------------------------------------------------------------------------------------

    def commit(self, session_id: str, watermark_ms: int | None = None) -> int:
        """Make the session's updates the next version, durably, of all its stores together; returns the version.

        Asked again after a lost answer, gives the same.

        Raises
        ------
        FencedError
            A newer owner or attempt holds the partition; nothing was counted.
        """
        session = self._session(session_id)
        partition = session.partition
        with partition.lock:
            if session.committed is not None:
                return session.committed
            self._check_open(session)
            if partition.writer is not session:
                raise InvalidRequestError("a read handle cannot commit; release it")
            entries: list[CommitEntry] = []
            try:
                size = self._write(session, watermark_ms, entries)
                counted = self._coordinator.commit_all(session.request.task.state_name, entries)
            except BaseException as error:
                self._end(session, "its commit failed")
                partition.forget()
                if isinstance(error, FencedError):
                    for entry in entries:
                        discard(self._objects, entry.file)
                raise
            self._settle(session, entries, counted)
            self._metrics.bytes_written += size
            session.committed = counted[0].version
            session.ended, partition.writer = "it is committed", None
            return session.committed

    def _write(self, session: _Session, watermark_ms: int | None, entries: list[CommitEntry]) -> int:
        """Write the deltas of all stores, adding their entries; returns the bytes written."""
        attempt_id, size = uuid.uuid4().hex, 0
        for name, handle in session.handles.items():
            assert isinstance(handle, UpdateHandle)
            change = handle.prepare(watermark_ms)
            shard, request = session.partition.shards[name], session.request
            entry, data = describe_commit(
                change,
                task=request.task,
                lease=request.lease,
                store_id=replace(request.lease.store_id, store_name=name),
                attempt_id=attempt_id,
                schema=shard.schema,
                state_rows=len(handle),
                state_bytes=shard.nbytes,
            )
            self._objects.put(entry.file, data)
            entries.append(entry)
            size += len(data)
        return size

    def _settle(self, session: _Session, entries: list[CommitEntry], counted: Sequence[CommitEntry]) -> None:
        """Bring memory to what counts: the own commit, or another attempt's of the same run."""
        partition = session.partition
        if counted[0].attempt_id == entries[0].attempt_id:
            for handle in session.handles.values():
                assert isinstance(handle, UpdateHandle)
                handle.commit()
            self._metrics.commits += 1
        else:
            for handle in session.handles.values():
                assert isinstance(handle, UpdateHandle)
                handle.abort()
            for entry in counted:
                rows = _adapter(partition.specs[entry.store_name])(self._loader.read(entry), entry.file)
                partition.shards[entry.store_name].load(rows, entry.version, entry.watermark_ms)
            for entry in entries:
                discard(self._objects, entry.file)
            self._metrics.adopted_commits += 1
        newest = counted[0].version
        partition.attempts[newest] = counted[0].attempt_id
        for version in [v for v in partition.attempts if v < newest - 4]:
            del partition.attempts[version]
        partition.newest = {entry.store_name: entry for entry in counted}
        partition.deltas += 1

    def committed(self, session_id: str) -> bool:
        """Whether a session's version was made."""
        return self._session(session_id).committed is not None

    def end(self, session_id: str) -> None:
        """Abort an update or release a read; ending twice is harmless.

        Raises
        ------
        OperationOutOfOrderError
            The update is committed.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return
        with session.partition.lock:
            if session.committed is not None:
                raise OperationOutOfOrderError(
                    "the handle is committed and cannot be aborted", version=session.committed
                )
            if not session.ended:
                self._end(session, "it was aborted" if session.partition.writer is session else "it was released")

    def _end(self, session: _Session, reason: str, *, fenced: bool = False) -> None:
        for handle in session.handles.values():
            if isinstance(handle, UpdateHandle):
                handle.abort()
            else:
                handle.release()
        session.ended, session.fenced = reason, fenced
        session.scans.clear()
        if session.partition.writer is session:
            session.partition.writer = None

    # -- maintenance ----------------------------------------------------------------------------------------------

    def maintain(self, min_deltas_for_snapshot: int) -> None:
        """One round: write the snapshots that are due, let go of partitions that the coordinator says are elsewhere.

        The failure of one partition is logged and counted, and does not keep the others from their turn.
        """
        with self._guard:
            partitions = list(self._partitions.items())
        for (state_name, partition_id), partition in partitions:
            store_id = StateStoreId(f"{self._objects.uri}/{state_name}", 0, partition_id)
            try:
                if partition.shards and self._coordinator.is_elsewhere(store_id):
                    self._unload(partition)
                elif partition.deltas >= min_deltas_for_snapshot:
                    self._write_snapshots(store_id, partition)
            except (StateStoreError, OSError):
                self._metrics.maintenance_failures += 1
                log.exception(
                    "maintenance of keyed stores failed; it is tried again in the next round: %s", store_id.path()
                )

    def _unload(self, partition: _Partition) -> None:
        with partition.lock:
            if partition.writer is not None:
                self._end(partition.writer, "another store actor took the partition over", fenced=True)
            partition.forget()
        self._metrics.shards_unloaded += 1

    def _write_snapshots(self, store_id: StateStoreId, partition: _Partition) -> None:
        with partition.lock:
            due = [
                (entry, partition.shards[name].snapshot(), partition.shards[name].schema)
                for name, entry in partition.newest.items()
                if name in partition.shards
            ]
            piled_up = partition.deltas
        for entry, rows, schema in due:
            named = replace(store_id, store_name=entry.store_name)
            size = write_snapshot(self._objects, self._coordinator, named, entry, rows, schema)
            if size is not None:
                self._metrics.snapshots_written += 1
                self._metrics.bytes_written += size
        with partition.lock:
            partition.deltas = max(0, partition.deltas - piled_up)


def _maker(spec: StoreSpec) -> Callable[[], KeyedShard]:
    return lambda: KeyedShard(spec.keys, spec.values)


def _adapter(spec: StoreSpec) -> Callable[[pa.Table, str], pa.Table]:
    return lambda rows, file: evolve(rows, spec.keys, spec.values, file)


def _empty(shard: KeyedShard) -> pa.Table:
    return shard.schema.row_schema().empty_table().append_column(CHANGE_COLUMN, pa.array([], pa.int8()))

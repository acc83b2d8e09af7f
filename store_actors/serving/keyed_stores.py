"""Keyed state stores of one process: sessions that read and update them. No Ray.

A session is one handle on all named stores of one partition, at one version. It updates (at most one session a partition, and
its stores commit together, as one version) or reads (any number, any retained version).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, OperationOutOfOrderError, WriterBusyError
from coordinator.model.identities import StateStoreId
from coordinator.model.load_plans import LoadPlans
from coordinator.model.schema import StateSchema
from coordinator.runtime.runtime import Runtime
from coordinator.storage.protocol import ObjectStore
from store_actors.keyed.shard import KeyedShard, ReadHandle, UpdateHandle
from store_actors.messages import BatchFacts, OpenRequest, Transfer, Write
from store_actors.serving.commits import CommitReplicator, Commits, Delta, describe_commit
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import PIECE_BYTES
from store_actors.serving.keyed_partition import Ended, Partition, Positioner, Session
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition_cache import PartitionCache, ServedPartitions
from store_actors.serving.sessions import IDLE_S, Sessions
from store_actors.serving.stored_rows import Changes, LoadedView, store_changes, store_view
from store_actors.serving.transfers import fill
from store_actors.spilling.store_memory import StoreMemory, UnlimitedMemory

__all__ = ["KeyedStores"]

#: Methods of handles that a session may be asked for; scans are pulled batch by batch.
_CALLS = frozenset(
    {"get", "multi_get", "put", "put_row", "remove", "remove_key", "remove_where", "due", "updates", "metrics"}
)
_SCANS = frozenset({"iterator", "prefix_scan", "range_scan"})
#: Times the bytes of rows that are given: as words, their keys, and what they overwrite.
_GIVEN = 4
#: Times the bytes that a version overwrote: its rows as they are, what of them differs, as Arrow data, and in a delta.
_CHANGED = 6


class KeyedStores(ServedPartitions[Partition]):
    """Sessions on the keyed stores of this process. Thread-safe: one lock a partition.

    Parameters
    ----------
    objects
        Where deltas are written.
    coordinator
        Who counts commits.
    metrics
        Counters shared with the process's other stores.
    piece_bytes, memory
        As of :class:`~store_actors.serving.operator_shards.OperatorShards`.
    """

    def __init__(
        self,
        objects: ObjectStore,
        coordinator: CoordinatorRef,
        metrics: StoreMetrics,
        runtime: Runtime | None = None,
        piece_bytes: int = PIECE_BYTES,
        standbys: CommitReplicator | None = None,
        memory: StoreMemory | None = None,
    ) -> None:
        self._memory = memory = memory or UnlimitedMemory()
        piece_bytes = min(piece_bytes, memory.file_bytes)
        runtime = runtime or Runtime()
        self._clock = runtime.clock
        self._new_id = runtime.new_id
        self._hash_seed = runtime.hash_seed
        self._loader = loader = Loader(objects, metrics, runtime, memory.ahead_bytes)
        lock = runtime.threads.lock
        self._commits = Commits(
            objects, coordinator, loader, metrics, runtime, piece_bytes, is_keyed=True, standbys=standbys
        )
        self._held = PartitionCache(Partition, runtime, coordinator, self._commits, loader, metrics, memory)
        self._positioner = Positioner(self._held, coordinator, loader, runtime, memory)
        self._sessions = Sessions(lock(), self._new_id, self._clock.elapsed_s)

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
                self._positioner.position(partition, request)
                with partition.changing:
                    handles = {
                        spec.name: partition.shards[spec.name].begin(request.base_version, request.task.batch_id + 1)
                        for spec in request.stores
                    }
            except BaseException:
                partition.forget()
                raise
            session = Session(request, partition, handles, self._clock.elapsed_s())
            partition.writer = session
            return self._sessions.add(session), request.base_version

    def open_read(self, request: OpenRequest) -> tuple[str, int]:
        """Read the request's base version, from memory if it is there, else from storage.

        Raises
        ------
        InvalidRequestError
            The version is not retained.
        """
        partition = self._partition(request)
        with partition.lock:
            handles = self._positioner.readers(partition, request)
            session = Session(request, partition, handles, self._clock.elapsed_s())
            return self._sessions.add(session), request.base_version

    def _partition(self, request: OpenRequest) -> Partition:
        names = [spec.name for spec in request.stores]
        if not names or len(set(names)) != len(names):
            raise InvalidRequestError("name each store once, and at least one", stores=names)
        return self._held.of(request.lease.store_id)

    def _take_over(self, partition: Partition, request: OpenRequest) -> None:
        writer = partition.writer
        if writer is None:
            return
        former, asked = writer.request.task, request.task
        is_newer = former.run_id != asked.run_id or former.batch_id != asked.batch_id or former.attempt < asked.attempt
        if not is_newer and self._clock.elapsed_s() - writer.used_s < IDLE_S:
            raise WriterBusyError(
                "another handle is changing this partition; nothing was changed; commit or abort that one first",
                state=asked.state_name,
                partition=asked.partition_id,
                version=request.base_version,
            )
        writer.end("a newer attempt took the partition over", fenced=True)

    # -- using ----------------------------------------------------------------------------------------------------

    def call(
        self, session_id: str, store_name: str, method: str, args: tuple[Any, ...], writes: Sequence[Write] = ()
    ) -> Any:
        """Result of a handle's method, after the writes that its caller kept back so far.

        Raises
        ------
        OperationOutOfOrderError
            The session has ended.
        InvalidRequestError
            There is no such store or method in this session.
        """
        session = self._session(session_id)
        with session.partition.lock, self._working(session, [*writes, (store_name, method, args)]):
            for write in writes:
                self._do(session, *write)
            if method in _SCANS:
                scan_id = self._new_id()
                session.scans[scan_id] = iter(getattr(self._handle(session, store_name), method)(*args))
                return scan_id
            return self._do(session, store_name, method, args)

    def _working(self, session: Session, calls: Sequence[Write]) -> AbstractContextManager[None]:
        """Memory for calls, by the rows that are given to them."""
        request = session.request
        given = sum(arg.nbytes for _, _, args in calls for arg in args if isinstance(arg, pa.RecordBatch | pa.Table))
        return self._memory.working(request.lease.store_id, request.task.batch_id + 1, 2 * given, _GIVEN * given)

    def _do(self, session: Session, store_name: str, method: str, args: tuple[Any, ...]) -> Any:
        handle = self._handle(session, store_name)
        if method not in _CALLS or not hasattr(handle, method):
            raise InvalidRequestError("this handle has no such operation", operation=method, store=store_name)
        try:
            with session.partition.changing:
                return getattr(handle, method)(*args)
        except BaseException:
            partition = session.partition
            if any(shard.is_broken for shard in partition.shards.values()):
                # No retry goes on from what an error left behind: it loads what counts.
                partition.forget()
                session.leave("an error in the middle of a change left its stores broken")
            raise

    def next_batch(self, session_id: str, scan_id: str) -> pa.RecordBatch | None:
        """Next batch of a scan, None after the last."""
        session = self._session(session_id)
        with session.partition.lock:
            self._check_open(session)
            batch = next(session.scans[scan_id], None)
            if batch is None:
                del session.scans[scan_id]
            return batch

    def _found(self, session_id: str) -> Session | Ended:
        session = self._sessions.find(session_id)
        if session is None:
            raise OperationOutOfOrderError(
                "the handle is not known to the store actor any more (it was restarted, or the handle was not used for long); nothing "
                "of it was committed unless commit said so; open a new one"
            )
        return session

    def _session(self, session_id: str) -> Session:
        session = self._found(session_id)
        if isinstance(session, Ended):
            raise session.error()
        return session

    @staticmethod
    def _check_open(session: Session) -> None:
        if session.ended is not None:
            raise session.ended.error()

    def _handle(self, session: Session, store_name: str) -> UpdateHandle | ReadHandle:
        self._check_open(session)
        if store_name not in session.handles:
            raise InvalidRequestError(
                "the handle was opened without this store", store=store_name, stores=sorted(session.handles)
            )
        return session.handles[store_name]

    # -- ending ---------------------------------------------------------------------------------------------------

    def commit(self, session_id: str, facts: BatchFacts | int | None = None, writes: Sequence[Write] = ()) -> int:
        """Make the session's updates, the last of which are `writes`, the next version, durably, of all its stores together; returns
        the version.

        `facts` is what goes with the version: of a batch, or only a watermark in milliseconds (by default that of the base). Asked
        again after a lost answer, gives the same.

        Raises
        ------
        FencedError
            A newer owner or attempt holds the partition; nothing was counted.
        """
        session = self._found(session_id)
        if isinstance(session, Ended):
            return _version_made(session)
        partition = session.partition
        with partition.lock:
            if session.ended is not None:
                return _version_made(session.ended)
            if partition.writer is not session:
                raise InvalidRequestError("a read handle cannot commit; release it")
            with self._working(session, writes):
                for write in writes:
                    self._do(session, *write)
            changed = sum(handle.pending_bytes for handle in session.updates.values())
            request = session.request
            with self._memory.working(request.lease.store_id, request.task.batch_id + 1, 0, _CHANGED * changed):
                return self._commit(session, facts)

    def _commit(self, session: Session, facts: BatchFacts | int | None) -> int:
        partition = session.partition

        def describe(attempt_id: str, now_ms: int) -> Sequence[Delta]:
            with partition.changing:
                return [
                    _delta(session, name, handle, facts, attempt_id, now_ms) for name, handle in session.updates.items()
                ]

        try:
            counted = self._commits.commit(session.request.lease, partition.lineage, session, describe)
        except BaseException:
            # Memory may be ahead of what counts, or behind it.
            partition.forget()
            session.leave("its commit failed")
            raise
        version = counted[0].version
        session.leave("it is committed", committed=version)
        return version

    def committed(self, session_id: str) -> bool:
        """Whether a session's version was made."""
        found = self._found(session_id)
        ended = found.ended if isinstance(found, Session) else found
        return ended is not None and ended.committed is not None

    def end(self, session_id: str) -> None:
        """Abort an update or release a read; ending twice is harmless.

        Raises
        ------
        OperationOutOfOrderError
            The update is committed.
        """
        session = self._sessions.find(session_id)
        if isinstance(session, Session):
            with session.partition.lock:
                if session.ended is None:
                    session.end("it was aborted" if session.partition.writer is session else "it was released")
                    return
                session = session.ended
        if session is not None and session.committed is not None:
            raise OperationOutOfOrderError("the handle is committed and cannot be aborted", version=session.committed)

    def loaded_view(
        self, store_id: StateStoreId, version: int, loading: LoadPlans, schema: StateSchema | None
    ) -> LoadedView:
        """See :meth:`OperatorShards.loaded_view <store_actors.serving.operator_shards.OperatorShards.loaded_view>`; the columns are
        those of the store's newest file, whatever the operator's `schema` is.
        """
        with self._memory.loading(store_id, version):
            region = self._memory.region(store_id)
            return store_view(self._loader, store_id, loading, self._hash_seed, region)

    def changes(self, store_id: StateStoreId, loading: LoadPlans, since: int, schema: StateSchema | None) -> Changes:
        """See :func:`~store_actors.serving.stored_rows.store_changes`."""
        return store_changes(self._loader, store_id, loading, since)

    # -- from one store actor to another --------------------------------------------------------------------------

    def take(self, store_id: StateStoreId, offer: Transfer, pieces: Iterable[tuple[int, pa.Table]]) -> tuple[int, int]:
        """See :meth:`PartitionCache.take`; returns the version that is held then, and the bytes of the pieces."""
        specs = {store.name: store.spec for store in offer.stores if store.spec is not None}
        memory = self._memory.region(store_id)
        shards = {
            name: KeyedShard(spec.keys, spec.values, spec.due, self._hash_seed, memory) for name, spec in specs.items()
        }
        with self._memory.using(store_id):
            size = fill(list(shards.values()), offer, pieces)

        def put(partition: Partition) -> None:
            partition.shards.update(shards)
            partition.specs.update(specs)

        return self._held.take(store_id, offer, put), size


def _version_made(ended: Ended) -> int:
    """Version that a session made."""
    if ended.committed is None:
        raise ended.error()
    return ended.committed


def _delta(
    session: Session,
    name: str,
    handle: UpdateHandle,
    facts: BatchFacts | int | None,
    attempt_id: str,
    now_ms: int,
) -> Delta:
    """What a session changed in one of its stores."""
    request = session.request
    # Before the changes are prepared, after which nobody reads them.
    due_ms = _due_ms(handle, facts) if name == request.stores[0].name else None
    if isinstance(facts, BatchFacts):
        marks = facts.watermarks
        change = handle.prepare(marks.input_ms, rows_in=facts.rows_in, rows_late=facts.rows_late)
    else:
        marks, change = None, handle.prepare(facts)
    shard = session.partition.shards[name]
    entry, data = describe_commit(
        change,
        task=request.task,
        lease=request.lease,
        store_id=replace(request.lease.store_id, store_name=name),
        attempt_id=attempt_id,
        committed_at_ms=now_ms,
        schema=shard.schema,
        state_rows=len(handle),
        state_bytes=shard.nbytes,
        watermarks=marks,
    )
    return replace(entry, due_ms=due_ms), data


def _due_ms(handle: UpdateHandle, facts: BatchFacts | int | None) -> int | None:
    """Earliest time at which a row falls due by processing time, if the batch says that rows do."""
    if not isinstance(facts, BatchFacts) or facts.due_per_ms is None:
        return None
    earliest = handle.earliest_due()
    return None if earliest is None else earliest // facts.due_per_ms

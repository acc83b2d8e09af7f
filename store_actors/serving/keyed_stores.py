"""Sessions that read and update the keyed state stores of one process. No Ray.

A session is a handle on named stores of one partition at one version. A partition has at most one session that updates; all stores of
that session commit together, as one version. It has any number of sessions that read, each at any retained version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import pyarrow as pa

from coordinator.model.errors import InvalidRequestError, OperationOutOfOrderError, WriterBusyError
from coordinator.runtime.logs import about
from store_actors.engine.versions import VersionedStore
from store_actors.keyed.read_handle import ReadHandle
from store_actors.keyed.shard import KeyedShard
from store_actors.keyed.update_handle import UpdateHandle
from store_actors.messages.requests import BatchFacts, OpenRequest, Write
from store_actors.serving.commits import Prepared, PreparedWrite, Transaction, check_first_version
from store_actors.serving.partition import Partition
from store_actors.serving.partitions import Partitions
from store_actors.serving.sealed_version import COMMITS_AT_ONCE, SealedVersion
from store_actors.serving.sessions import IDLE_S, Ended, Session, Sessions

AnyTransaction = TypeVar("AnyTransaction", bound=Transaction)
log = logging.getLogger(__name__)
#: Methods of handles that a client may call through a session. A scan (below) is read batch by batch.
_CALLS = frozenset(
    {"get", "multi_get", "put", "put_row", "remove", "remove_key", "remove_where", "due", "updates", "metrics"}
)
_SCANS = frozenset({"iterator", "prefix_scan", "range_scan"})
#: Memory of a call, in multiples of the bytes of its input rows: they exist as words, with their keys, and beside old rows.
_CALL_FACTOR = 4
#: Memory of a commit, in multiples of the bytes that it overwrote: new rows, their differences, Arrow data, and a delta.
_COMMIT_FACTOR = 6


class KeyedStores:
    """Sessions on the keyed stores of this process. Thread-safe."""

    def __init__(self, partitions: Partitions) -> None:
        self.partitions = partitions
        self._memory = partitions.memory
        runtime = partitions.runtime
        self._clock = runtime.clock
        self._new_id = runtime.new_id
        self._sessions = Sessions(runtime.threads.lock(), self._new_id, self._clock.elapsed_s)
        self._commits = runtime.threads.pool(COMMITS_AT_ONCE, "statefleet-seal")

    # -- opening --------------------------------------------------------------------------------------------------

    def open_update(self, request: OpenRequest) -> tuple[str, int]:
        """Begin the version after the request's base; return the session's id and the base version.

        A newer attempt of the same task, or a newer run, replaces a session that is still open.

        Raises
        ------
        WriterBusyError
            Another session is updating the partition.
        StateMismatchError, CorruptStateError, StorageUnavailableError
            The base version cannot be read into the requested stores.
        InvalidRequestError
            The update is an import, and the partition has an earlier version.
        """
        if request.task.is_import:
            check_first_version(request.task, request.base_version)
        partition = self._partition(request)
        with partition.lock:
            self._take_over(partition, request)
            definitions = {spec.name: spec for spec in request.stores}
            try:
                self.partitions.restorer.restore(
                    partition, request.lease, request.task.run_id, request.base_version, definitions
                )
                handles = self._begun(partition, request)
            except BaseException:
                partition.forget()
                raise
            session = Session(request, partition, handles, self._clock.elapsed_s())
            partition.writer = session
            return self._sessions.add(session), request.base_version

    @staticmethod
    def _begun(partition: Partition, request: OpenRequest) -> dict[str, UpdateHandle]:
        with partition.changing:
            return {
                spec.name: _keyed_store(partition, spec.name).begin(request.base_version, request.task.batch_id + 1)
                for spec in request.stores
            }

    def open_read(self, request: OpenRequest) -> tuple[str, int]:
        """Open the request's base version for reading, from memory or else from storage; return the session's id and the version.

        Raises
        ------
        InvalidRequestError
            The version is not retained.
        """
        partition = self._partition(request)
        with partition.lock:
            handles = self._readers(partition, request)
            session = Session(request, partition, handles, self._clock.elapsed_s())
            return self._sessions.add(session), request.base_version

    def _readers(self, partition: Partition, request: OpenRequest) -> dict[str, ReadHandle]:
        """Return handles on stores at the request's base version. Stores loaded for that belong to the handles alone."""
        task, base = request.task, request.base_version
        names = [spec.name for spec in request.stores]
        loading = self.partitions.coordinator.load_plans(task.state_name, task.partition_id, base, names)
        in_memory = partition.lineage.knows(base, loading.attempt_id)
        handles = {}
        for spec in request.stores:
            if in_memory and partition.is_loaded_as(spec.name, spec):
                store = _keyed_store(partition, spec.name)
                if base in store.retained():
                    handles[spec.name] = store.read(base)
                    continue
            restorer, store_id = self.partitions.restorer, request.lease.store_id
            row_format = restorer.format_of(store_id, spec)
            loaded, _ = restorer.load(store_id, base, row_format, loading.plans[spec.name])
            handles[spec.name] = cast(KeyedShard, loaded).read()
        return handles

    def _partition(self, request: OpenRequest) -> Partition:
        names = [spec.name for spec in request.stores]
        if not names or len(set(names)) != len(names):
            raise InvalidRequestError("name each store once, and at least one", stores=names)
        return self.partitions.cache.of(request.lease.store_id)

    def _take_over(self, partition: Partition, request: OpenRequest) -> None:
        writer = partition.writer
        if writer is None:
            return
        previous, task = writer.task, request.task
        is_newer = (
            previous.run_id != task.run_id or previous.batch_id != task.batch_id or previous.attempt < task.attempt
        )
        if not is_newer and self._clock.elapsed_s() - writer.used_s < IDLE_S:
            raise WriterBusyError(
                "another handle is changing this partition; nothing was changed; commit or abort that one first",
                state=task.state_name,
                partition=task.partition_id,
                version=request.base_version,
            )
        writer.end("a newer attempt took the partition over", fenced=True)

    # -- using ----------------------------------------------------------------------------------------------------

    def call(
        self, session_id: str, store_name: str, method: str, args: tuple[Any, ...], writes: Sequence[Write] = ()
    ) -> Any:
        """Return the result of a handle's method, after applying the `writes` that the client has buffered.

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
                # A prefix's strings are entered into the table's, in which readers look others up.
                with session.partition.changing if method == "prefix_scan" else nullcontext():
                    session.scans[scan_id] = iter(getattr(self._handle(session, store_name), method)(*args))
                return scan_id
            return self._do(session, store_name, method, args)

    def _working(self, session: Session, calls: Sequence[Write]) -> AbstractContextManager[None]:
        """Reserve memory for calls, by the bytes of their input rows."""
        request = session.request
        input_bytes = sum(
            arg.nbytes for _, _, args in calls for arg in args if isinstance(arg, pa.RecordBatch | pa.Table)
        )
        return self._memory.working(
            request.lease.store_id, request.task.batch_id + 1, 2 * input_bytes, _CALL_FACTOR * input_bytes
        )

    def _do(self, session: Session, store_name: str, method: str, args: tuple[Any, ...]) -> Any:
        handle = self._handle(session, store_name)
        if method not in _CALLS or not hasattr(handle, method):
            raise InvalidRequestError("this handle has no such operation", operation=method, store=store_name)
        try:
            with session.partition.changing:
                return getattr(handle, method)(*args)
        except BaseException:
            partition = session.partition
            if any(_keyed_store(partition, name).is_broken for name in partition.stores):
                # A retry must not continue from broken stores: it loads the committed version.
                partition.forget()
                session.leave("an error in the middle of a change left its stores broken")
            raise

    def next_batch(self, session_id: str, scan_id: str) -> pa.RecordBatch | None:
        """Return the next batch of a scan; None after the last."""
        session = self._session(session_id)
        with session.partition.lock:
            self._check_open(session)
            batch = next(session.scans[scan_id], None)
            if batch is None:
                del session.scans[scan_id]
            return batch

    def _find(self, session_id: str) -> Session | Ended:
        session = self._sessions.find(session_id)
        if session is None:
            raise OperationOutOfOrderError(
                "the handle is not known to the store actor any more (it was restarted, or the handle was not used for long); nothing "
                "of it was committed unless commit said so; open a new one"
            )
        return session

    def _session(self, session_id: str) -> Session:
        session = self._find(session_id)
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
        """Commit the session's updates, and `writes` after them, durably as the next version of all its stores; return the version.

        `facts` is recorded with the version: the facts of a batch, or only a watermark in milliseconds (by default that of the base
        version). A repeated call after a lost reply returns the same version.

        Raises
        ------
        FencedError
            A newer owner or attempt has the partition; nothing was committed.
        """
        session = self._find(session_id)
        if isinstance(session, Ended):
            return _committed_version(session)
        session.wait_for_sealed()
        partition = session.partition
        with partition.lock:
            if session.ended is not None:
                return _committed_version(session.ended)
            with self._making(session, facts, writes, Transaction) as transaction:
                version = self.partitions.commits.commit(transaction)[0].version
            session.leave("it is committed", committed=version)
            return version

    def seal(
        self,
        session_id: str,
        facts: BatchFacts,
        writes: Sequence[Write],
        tell_failed: Callable[[BaseException], object],
    ) -> int:
        """Do :meth:`commit`, but return as the version is made in memory, and have the session go on with the next one.

        The version is committed meanwhile; one that was sealed before is waited for first.

        Parameters
        ----------
        tell_failed
            Is told why the version was not committed, once the session has ended for that.

        Raises
        ------
        StateStoreError
            The version before was not committed, or as of :meth:`commit`.
        """
        session = self._session(session_id)
        session.wait_for_sealed()
        partition = session.partition
        with partition.lock:
            self._check_open(session)
            with self._making(session, facts, writes, SealedVersion) as transaction:
                transaction.writer = session
                prepared = self.partitions.commits.prepare(transaction)
                session.goes_on(self._begun(partition, following := session.request.following), following)
            session.sealed = self._commits.submit(self._finish, session, transaction, prepared, tell_failed)
            return following.base_version

    def _finish(
        self,
        session: Session,
        transaction: SealedVersion,
        prepared: Prepared,
        tell_failed: Callable[[BaseException], object],
    ) -> None:
        try:
            self.partitions.commits.finish(transaction, prepared)
        except BaseException as error:
            with session.partition.lock:
                if session.ended is None:
                    session.partition.forget()
                    session.leave(f"the version before was not committed: {error}", fenced=True)
            log.exception("a version of an epoch was not committed", extra=about(transaction.lease.store_id))
            tell_failed(error)
            raise

    @contextmanager
    def _making(
        self,
        session: Session,
        facts: BatchFacts | int | None,
        last: Sequence[Write],
        kind: type[AnyTransaction],
    ) -> Generator[AnyTransaction]:
        """Do the last writes of a session's version, and yield the transaction of all; without an error it is made then."""
        partition, request = session.partition, session.request
        if partition.writer is not session:
            raise InvalidRequestError("a read handle cannot commit; release it")
        with self._working(session, last):
            for write in last:
                self._do(session, *write)
        changed_bytes = sum(handle.pending_bytes for handle in session.updates.values())
        first = request.stores[0].name
        writes = {
            name: partial(_prepared, partition.stores[name], handle, facts, is_first=name == first)
            for name, handle in session.updates.items()
        }
        version = request.task.batch_id + 1
        with self._memory.working(request.lease.store_id, version, 0, _COMMIT_FACTOR * changed_bytes):
            try:
                yield kind(partition, request.task, request.lease, writes)
            except BaseException:
                # Memory may be ahead of the committed version, or behind it.
                partition.forget()
                session.leave("its commit failed")
                raise

    def committed(self, session_id: str) -> bool:
        """Return whether a session's version was committed."""
        session = self._find(session_id)
        ended = session.ended if isinstance(session, Session) else session
        return ended is not None and ended.committed is not None

    def end(self, session_id: str) -> None:
        """Abort an update or release a read. A session may be ended twice.

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


def _keyed_store(partition: Partition, name: str) -> KeyedShard:
    return cast(KeyedShard, partition.stores[name])


def _committed_version(ended: Ended) -> int:
    """Return the version that a session committed; raise its error if it did not."""
    if ended.committed is None:
        raise ended.error()
    return ended.committed


def _prepared(
    store: VersionedStore, handle: UpdateHandle, facts: BatchFacts | int | None, *, is_first: bool
) -> PreparedWrite:
    """Prepare the write of a session to one of its stores. Only of the first one may rows fall due by processing time."""
    if not isinstance(facts, BatchFacts):
        return PreparedWrite(handle.prepare(facts), store.schema, len(store), store.nbytes)
    due_ms = None
    # Comes first: a handle does not look for due rows once its changes are prepared.
    if is_first and facts.due_per_ms is not None and (earliest := handle.earliest_due()) is not None:
        due_ms = earliest // facts.due_per_ms
    watermarks = facts.watermarks
    change = handle.prepare(watermarks.input_ms, rows_in=facts.rows_in, rows_late=facts.rows_late)
    return PreparedWrite(change, store.schema, len(store), store.nbytes, watermarks=watermarks, due_ms=due_ms)

"""What is written of a partition's keyed stores: the deltas of a session's commit, counted together, and snapshots. No Ray."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from coordinator.errors import FencedError
from coordinator.model import CommitEntry, StateStoreId
from coordinator.storage.protocol import ObjectStore
from store_actors.keyed.shard import UpdateHandle
from store_actors.messages import BatchFacts
from store_actors.serving.commits import describe_commit, discard, write_snapshot
from store_actors.serving.keyed_partition import Partition, Session, adapter
from store_actors.serving.loading import Loader
from store_actors.serving.operator_shards import CoordinatorClient, StoreMetrics

__all__ = ["SessionCommits"]

#: Deltas that are on their way to storage at once.
_AT_ONCE = 8


class SessionCommits:
    """Writes what sessions changed, has it counted, and keeps memory in step with what counts.

    Parameters
    ----------
    objects
        Where files are written.
    coordinator
        Who counts commits.
    loader
        Reads another attempt's deltas, should those count instead.
    metrics
        Counters of the process.
    """

    def __init__(
        self, objects: ObjectStore, coordinator: CoordinatorClient, loader: Loader, metrics: StoreMetrics
    ) -> None:
        self._objects = objects
        self._coordinator = coordinator
        self._loader = loader
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="statefleet-write")

    def commit(self, session: Session, facts: BatchFacts | int | None) -> int:
        """Make the updates of a partition's writer its next version, and end the session; the caller holds the lock.

        `facts` is what goes with the version: of a batch, or only a watermark in milliseconds (by default that of the base).

        Whatever is raised, the session has ended and memory is forgotten: it may be ahead of what counts, or behind it.

        Returns
        -------
        int
            The version.

        Raises
        ------
        FencedError
            A newer owner or attempt holds the partition; nothing was counted.
        CorruptStateError, StorageUnavailableError
            Another attempt's commit counts, and its files cannot be read.
        """
        entries: list[CommitEntry] = []
        try:
            deltas = self._deltas(session, facts)
            entries = [entry for entry, _ in deltas]
            self._write(deltas)
            counted = self._coordinator.commit_all(session.request.task.state_name, entries)
            self._settle(session, entries, counted)
        except BaseException as error:
            session.end("its commit failed")
            session.partition.forget()
            if isinstance(error, FencedError):
                for entry in entries:
                    discard(self._objects, entry.file)
            raise
        self._metrics.bytes_written += sum(entry.file_bytes for entry in entries)
        session.committed = counted[0].version
        session.ended, session.partition.writer = "it is committed", None
        return session.committed

    def _deltas(self, session: Session, facts: BatchFacts | int | None) -> list[tuple[CommitEntry, bytes]]:
        """The delta of each store: its entry, and the bytes of its file."""
        attempt_id = uuid.uuid4().hex
        deltas = []
        for name, handle in session.handles.items():
            assert isinstance(handle, UpdateHandle)
            if isinstance(facts, BatchFacts):
                marks = facts.watermarks
                change = handle.prepare(marks.input_ms, rows_in=facts.rows_in, rows_late=facts.rows_late)
            else:
                marks, change = None, handle.prepare(facts)
            shard, request = session.partition.shards[name], session.request
            delta = describe_commit(
                change,
                task=request.task,
                lease=request.lease,
                store_id=replace(request.lease.store_id, store_name=name),
                attempt_id=attempt_id,
                schema=shard.schema,
                state_rows=len(handle),
                state_bytes=shard.nbytes,
                watermarks=marks,
            )
            deltas.append(delta)
        return deltas

    def _write(self, deltas: Sequence[tuple[CommitEntry, bytes]]) -> None:
        """Write the files of all stores, side by side."""
        *others, (entry, data) = deltas
        waiting = [self._pool.submit(self._objects.put, other.file, its_data) for other, its_data in others]
        self._objects.put(entry.file, data)
        for one in waiting:
            one.result()

    def _settle(self, session: Session, entries: list[CommitEntry], counted: Sequence[CommitEntry]) -> None:
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
                rows = adapter(partition.specs[entry.store_name])(self._loader.read(entry), entry.file)
                partition.shards[entry.store_name].load(rows, entry.version, entry.watermark_ms)
            for entry in entries:
                discard(self._objects, entry.file)
            self._metrics.adopted_commits += 1
        partition.remember(counted)

    def write_snapshots(self, store_id: StateStoreId, partition: Partition) -> None:
        """Store the newest version of each store; rows are copied under the lock, encoded and written outside of it."""
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

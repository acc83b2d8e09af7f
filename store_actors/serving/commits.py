"""Makes the next version of a partition, from its writes to its commit, and snapshots of versions. No Ray.

A batch of an operator is a transaction with one write; a session on keyed stores is one with a write for each of its stores. A
transaction begins when it is made, over stores that are at its base version, and is then prepared, once. It ends with
:meth:`Transaction.commit`, or with :meth:`Transaction.abort`, which :meth:`Transaction.adopt` may follow.

Operators and keyed stores have the same commit protocol. Each store's delta is written under a unique name. The coordinator accepts or
refuses all of them together. If it has accepted another attempt of the same run instead, memory adopts the deltas of that attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
from msgspec import structs

from coordinator.model.commits import CommitEntry, SnapshotEntry, StoredFile
from coordinator.model.errors import FencedError, InvalidRequestError, StateReplacedError, StorageUnavailableError
from coordinator.model.identities import StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.schema import StateSchema
from coordinator.model.watermarks import Watermarks
from coordinator.runtime.runtime import Runtime, now_ms
from coordinator.storage.protocol import ObjectStore
from store_actors.engine.versions import Change, VersionedStore
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import (
    PIECE_BYTES,
    delta_path,
    encode_delta,
    encode_snapshot,
    identity_in_state,
    snapshot_path,
)
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.partition import Partition

log = logging.getLogger(__name__)

#: Manifest entry and file of one store's delta.
Delta: TypeAlias = tuple[CommitEntry, bytes]
#: Number of deltas that are written in parallel.
_WRITERS = 8


@dataclass(frozen=True, slots=True)
class PreparedWrite:
    """The change of one store, which is pending there."""

    change: Change
    schema: StateSchema
    state_rows: int
    state_bytes: int
    #: Watermarks that go with the version; that of the change by default.
    watermarks: Watermarks | None = None
    #: Earliest time at which a row falls due by processing time, in milliseconds since the epoch, if rows do.
    due_ms: int | None = None


#: The part of a transaction that changes one store: makes the change, not yet committed.
Write: TypeAlias = Callable[[], PreparedWrite]
#: Sends a committed version to the standbys of a lease; see :meth:`store_actors.actor.replicator.Replicator.send`.
#: Arguments: the lease, the attempt that made the version before, the entries, and the deltas.
Replicate: TypeAlias = Callable[[Lease, str, Sequence[CommitEntry], Sequence[bytes]], None]


class Transaction:
    """An attempt to make the next version of a partition.

    Parameters
    ----------
    partition
        The partition. The caller has its lock until the transaction has ended.
    """

    #: ``waited_ms``, ``pieces``: As of a commit.
    waited_ms: int | None = None
    pieces: int = 0

    def __init__(self, partition: Partition, task: TaskIdentity, lease: Lease, writes: Mapping[str, Write]) -> None:
        self.partition, self.task, self.lease = partition, task, lease
        self._writes = writes
        self._prepared: dict[str, PreparedWrite] = {}
        self._adopted: dict[str, pa.Table] = {}

    @property
    def is_in_memory(self) -> bool:
        """Whether memory is still what the transaction began with, or made."""
        return True

    def prepare(self) -> None:
        """Make the changes in memory."""
        partition = self.partition
        with partition.changing:
            try:
                self._prepared = {name: write() for name, write in self._writes.items()}
            except BaseException:
                # No reader may see what is half changed.
                partition.forget()
                raise

    def deltas(self, attempt_id: str, committed_at_ms: int) -> list[Delta]:
        """Return the prepared delta of each store."""
        return [
            self._delta(structs.replace(self.lease.store_id, store_name=name), prepared, attempt_id, committed_at_ms)
            for name, prepared in self._prepared.items()
        ]

    def commit(self) -> None:
        """Make the prepared changes the newest version of their stores."""
        with self.partition.changing:
            for store in self._stores():
                store.commit()

    def abort(self) -> None:
        """Put all stores back to the version before."""
        with self.partition.changing:
            for store in self._stores():
                store.abort()

    def _stores(self) -> Sequence[VersionedStore]:
        # An import has no store: memory has no part in it.
        return [self.partition.stores[name] for name in self._prepared if name in self.partition.stores]

    def adopt(self, entry: CommitEntry, rows: pa.Table) -> None:
        """After :meth:`abort`: apply the delta of another attempt of the same run, whose commit counts instead."""
        self._adopted[entry.store_name] = rows
        partition = self.partition
        if partition.lineage.is_loaded:
            adopted = partition.formats[entry.store_name].adopted(rows, entry.file)
            with partition.changing:
                partition.stores[entry.store_name].load(adopted, entry.version, entry.watermark_ms)

    def committed_delta(self, store_name: str) -> pa.Table:
        """Return what the commit that counts changed in a store."""
        return self._adopted.get(store_name, self._prepared[store_name].change.delta)

    def emitted(self, store_name: str) -> pa.Table | None:
        """Return the rows that a batch emits, if these cannot be read off its delta: they are the same for every attempt."""
        return self._prepared[store_name].change.emitted

    def _delta(self, store_id: StateStoreId, prepared: PreparedWrite, attempt_id: str, committed_at_ms: int) -> Delta:
        change, task = prepared.change, self.task
        data, checksum = encode_delta(change, prepared.schema, identity_in_state(store_id, attempt_id))
        watermarks = prepared.watermarks or Watermarks(change.watermark_ms, change.watermark_ms)
        entry = CommitEntry(
            partition_id=task.partition_id,
            version=change.version,
            base_version=change.base_version,
            epoch=self.lease.epoch,
            run_id=task.run_id,
            attempt_id=attempt_id,
            file=delta_path(store_id, change.version, attempt_id),
            file_bytes=len(data),
            checksum=checksum,
            delta_rows=change.delta.num_rows,
            rows_updated=change.rows_updated,
            rows_removed=change.rows_removed,
            state_rows=prepared.state_rows,
            state_bytes=prepared.state_bytes,
            rows_in=change.rows_in,
            rows_late=change.rows_late,
            watermark_ms=change.watermark_ms,
            output_watermark_ms=watermarks.output_ms,
            committed_at_ms=committed_at_ms,
            executor=task.executor,
            batch_time_ms=task.batch_time_ms,
            is_import=task.is_import,
            store_name=store_id.store_name,
            due_ms=prepared.due_ms,
        )
        return entry, data


@dataclass(frozen=True, slots=True)
class Prepared:
    """Changes that are made in memory, and what is told of the way there."""

    attempt_id: str
    made_at_ms: int
    #: The attempt that made the version before.
    base_attempt: str
    #: Fields of the first store's manifest entry: they are those of all stores together.
    facts: Mapping[str, Any]


def check_first_version(task: TaskIdentity, base_version: int) -> None:
    """Check that an import makes the first version of a partition.

    Raises
    ------
    InvalidRequestError
        The partition has an earlier version.
    """
    if base_version:
        raise InvalidRequestError(
            "a state is imported as its first version, and this one has others; nothing was changed; use another name",
            state=task.state_name,
            version=base_version,
        )


class Commits:
    """Makes versions durable, commits them, and keeps memory at the committed version.

    Parameters
    ----------
    loader
        Reads the deltas of another attempt, if that attempt was committed first.
    piece_bytes
        Bytes of rows at which a file of a snapshot is closed.
    """

    def __init__(
        self,
        objects: ObjectStore,
        coordinator: CoordinatorRef,
        loader: Loader,
        metrics: StoreMetrics,
        runtime: Runtime,
        piece_bytes: int = PIECE_BYTES,
        replicate: Replicate | None = None,
    ) -> None:
        self._replicate = replicate
        self._piece_bytes = piece_bytes
        self._objects = objects
        self._coordinator = coordinator
        self._loader = loader
        self._metrics = metrics
        self._runtime = runtime
        self._pool = runtime.threads.pool(_WRITERS, "statefleet-write")

    def commit(self, transaction: Transaction) -> tuple[CommitEntry, ...]:
        """Commit a transaction's changes as the next version of its partition; return the committed entries, one for each store.

        After any error, memory may be ahead of the committed version, or behind it: the caller must forget the partition.

        Raises
        ------
        FencedError
            A newer owner or run has the partition; nothing was committed.
        CorruptStateError, StorageUnavailableError, CommitUnknownError, StoreUnavailableError
            Storage or coordinator failed, or another attempt was committed and its files cannot be read.
        """
        return self.finish(transaction, self.prepare(transaction))

    def prepare(self, transaction: Transaction) -> Prepared:
        """Make a transaction's changes in memory; nothing is encoded or written yet, and errors are as of :meth:`commit`."""
        lineage = transaction.partition.lineage
        started_s, base = self._runtime.clock.elapsed_s(), lineage.version
        try:
            attempt_id, made_at_ms = self._runtime.new_id(), now_ms(self._runtime.clock)
            transaction.prepare()
        except BaseException as error:
            lineage.failures[type(error).__name__] += 1
            raise
        facts = {
            "apply_ms": _ms(self._runtime.clock.elapsed_s() - started_s),
            "restore_ms": lineage.restore_ms,
            "load_bytes": lineage.load_bytes,
            "failures": dict(lineage.failures),
            "waited_ms": transaction.waited_ms,
            "pieces": transaction.pieces,
        }
        return Prepared(attempt_id, made_at_ms, lineage.attempt_of(base), facts)

    def finish(self, transaction: Transaction, prepared: Prepared) -> tuple[CommitEntry, ...]:
        """Write prepared changes and commit them; result and errors as of :meth:`commit`.

        The lock of the partition is taken where memory is changed only: the next changes may be made meanwhile, if the transaction
        can be committed in memory beside them.
        """
        lease, lineage = transaction.lease, transaction.partition.lineage
        entries: list[CommitEntry] = []
        started_s = self._runtime.clock.elapsed_s()
        try:
            deltas = transaction.deltas(prepared.attempt_id, prepared.made_at_ms)
            files, entries = [data for _, data in deltas], [entry for entry, _ in deltas]
            self._write(deltas)
            write_ms = _ms(self._runtime.clock.elapsed_s() - started_s)
            entries[0] = structs.replace(entries[0], write_ms=write_ms, **prepared.facts)
            committed = tuple(self._coordinator.commit_all(lease.store_id.state_name, entries))
            is_own = committed[0].attempt_id == entries[0].attempt_id
            with transaction.partition.lock:
                if is_own and transaction.is_in_memory:
                    transaction.commit()
                elif not is_own:
                    self._adopt(transaction, committed, entries)
                if transaction.is_in_memory:
                    lineage.committed(committed)
            self._metrics.commits += is_own
            if is_own and self._replicate is not None:
                self._replicate(lease, prepared.base_attempt, entries, files)
        except BaseException as error:
            lineage.failures[type(error).__name__] += 1
            if self._is_refusal(error):
                self._discard([entry.file for entry in entries])
            raise
        self._metrics.bytes_written += sum(entry.file_bytes for entry in entries)
        return committed

    @staticmethod
    def _is_refusal(error: BaseException) -> bool:
        """Return whether the log refused a commit that failed with this error; after any other error it may have been committed."""
        return isinstance(error, FencedError)

    def _write(self, deltas: Sequence[Delta]) -> None:
        *further, (entry, data) = deltas
        waiting = [
            self._pool.submit(self._objects.put, further_entry.file, further_data)
            for further_entry, further_data in further
        ]
        self._objects.put(entry.file, data)
        for write in waiting:
            write.result()

    def _adopt(
        self, transaction: Transaction, committed: Sequence[CommitEntry], entries: Sequence[CommitEntry]
    ) -> None:
        """Replace this attempt's changes in memory by the deltas of another attempt of the run, which was committed first."""
        transaction.abort()
        for entry in committed:
            transaction.adopt(entry, self._loader.read(entry))
        self._discard([entry.file for entry in entries])
        self._metrics.adopted_commits += 1

    def _discard(self, files: Iterable[str]) -> None:
        """Delete files that are certainly not committed. If that fails, cleaning deletes them, as all files that no record names."""
        for file in files:
            with suppress(StorageUnavailableError, FileNotFoundError):
                self._objects.delete(file)

    def write_snapshot(
        self,
        store_id: StateStoreId,
        entry: CommitEntry,
        tables: Iterable[pa.Table],
        schema: StateSchema,
        room: Mapping[str, Any],
    ) -> bool:
        """Store all rows of a committed version as a snapshot; return False if that version is not in the history any more.

        Parameters
        ----------
        tables
            All rows in ``row_schema``, in pieces. A piece is encoded and stored before the next but one is taken.
        """
        created_at_ms = now_ms(self._runtime.clock)
        attempt_id = self._runtime.new_id()
        stored: list[StoredFile] = []
        rows = 0
        try:
            identity = identity_in_state(store_id, entry.attempt_id)
            facts = (entry.version, entry.watermark_ms, schema, room, identity, self._piece_bytes)
            for piece in encode_snapshot(tables, *facts):
                file = snapshot_path(store_id, entry.version, attempt_id, piece.number)
                stored.append(StoredFile(file, len(piece.data), piece.checksum))
                self._objects.put(file, piece.data)
                rows += piece.rows
            first, *further = stored
            snapshot = SnapshotEntry(
                partition_id=entry.partition_id,
                version=entry.version,
                attempt_id=entry.attempt_id,
                file=first.file,
                file_bytes=first.file_bytes,
                checksum=first.checksum,
                rows=rows,
                watermark_ms=entry.watermark_ms,
                created_at_ms=created_at_ms,
                store_name=entry.store_name,
                further=tuple(further),
            )
        except BaseException:
            # No record names these files.
            self._discard([file_entry.file for file_entry in stored])
            raise
        try:
            is_accepted = self._coordinator.add_snapshot(store_id.state_name, snapshot)
        except StateReplacedError:
            # The folder was deleted or replaced since the coordinator was asked where the shard is.
            self._discard(snapshot.files)
            raise
        if not is_accepted:
            self._discard(snapshot.files)
            return False
        self._metrics.snapshots_written += 1
        self._metrics.bytes_written += sum(file_entry.file_bytes for file_entry in stored)
        return True


def _ms(seconds: float) -> int:
    return round(1000 * seconds)

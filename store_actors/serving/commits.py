"""What is written for a version of a partition: the deltas of a commit with their manifest entries, and snapshots. No Ray.

One commit protocol for operators and keyed stores: write each store's delta under a unique name, have them counted together, and bring
memory to what counts, which is the own attempt, or another one of the same run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa

from coordinator.model.commits import CommitEntry, SnapshotEntry, StoredFile
from coordinator.model.errors import FencedError, StorageUnavailableError
from coordinator.model.identities import StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.schema import StateSchema
from coordinator.model.watermarks import Watermarks
from coordinator.runtime.runtime import Runtime, now_ms
from coordinator.storage.protocol import ObjectStore
from store_actors.engine.versions import Change
from store_actors.serving.coordinator_ref import CoordinatorRef
from store_actors.serving.files import (
    PIECE_BYTES,
    delta_path,
    encode_delta,
    encode_snapshot,
    place_in_state,
    snapshot_path,
)
from store_actors.serving.lineage import Lineage
from store_actors.serving.loading import Loader
from store_actors.serving.metrics import StoreMetrics

__all__ = ["Commits", "Delta", "Pending", "CommitReplicator", "describe_commit"]

log = logging.getLogger(__name__)

#: Manifest entry and file of one store's delta.
Delta = tuple[CommitEntry, bytes]
#: Deltas that are on their way to storage at once.
_AT_ONCE = 8


class Pending(Protocol):
    """The changes of a partition's stores that wait for their commit."""

    def commit(self) -> None:
        """They count: make them the newest version."""

    def abort(self) -> None:
        """They do not: be what was before."""

    def adopt(self, entry: CommitEntry, rows: pa.Table) -> None:
        """After :meth:`abort`: take another attempt's delta of a store."""


class CommitReplicator(Protocol):
    """Who follows what is committed; see :class:`store_actors.replicator.Replicator`."""

    def send(
        self,
        lease: Lease,
        base_attempt: str,
        entries: Sequence[CommitEntry],
        files: Sequence[bytes],
        *,
        is_keyed: bool,
    ) -> None:
        """Tell the lease's standbys of a counted commit; nobody waits for them."""


class Commits:
    """Makes versions durable, has them counted, and keeps memory in step with what counts.

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
    piece_bytes
        Bytes of rows from which on a file of a snapshot is closed.
    is_keyed
        Whether partitions are of keyed stores, or of operators.
    standbys
        Who is told of what counts.
    """

    def __init__(
        self,
        objects: ObjectStore,
        coordinator: CoordinatorRef,
        loader: Loader,
        metrics: StoreMetrics,
        runtime: Runtime,
        piece_bytes: int = PIECE_BYTES,
        *,
        is_keyed: bool = False,
        standbys: CommitReplicator | None = None,
    ) -> None:
        self._is_keyed = is_keyed
        self._standbys = standbys
        self._piece_bytes = piece_bytes
        self._objects = objects
        self._coordinator = coordinator
        self._loader = loader
        self._metrics = metrics
        self._runtime = runtime
        self._pool = runtime.threads.pool(_AT_ONCE, "statefleet-write")

    def commit(
        self,
        lease: Lease,
        lineage: Lineage,
        pending: Pending,
        describe: Callable[[str, int], Sequence[Delta]],
    ) -> tuple[CommitEntry, ...]:
        """Make a partition's pending changes its next version; returns the entries that count, one a store.

        Whatever is raised, memory may be ahead of what counts, or behind it: the caller forgets it.

        Parameters
        ----------
        describe
            Makes the deltas, given the attempt's id and the time in milliseconds.

        Raises
        ------
        FencedError
            A newer owner or run holds the partition; nothing was counted.
        CorruptStateError, StorageUnavailableError, CommitUnknownError, StoreUnavailableError
            Storage or coordinator failed, or another attempt's commit counts and its files cannot be read.
        """
        entries: list[CommitEntry] = []
        try:
            clock = self._runtime.clock
            begun_s = clock.elapsed_s()
            deltas = describe(self._runtime.new_id(), now_ms(clock))
            applied_s = clock.elapsed_s()
            entries = [entry for entry, _ in deltas]
            self._write(deltas)
            # Of all the stores together, so told with one of them.
            apply_ms, write_ms = _ms(applied_s - begun_s), _ms(clock.elapsed_s() - applied_s)
            entries[0] = replace(
                entries[0],
                apply_ms=apply_ms,
                write_ms=write_ms,
                restore_ms=lineage.restore_ms,
                load_bytes=lineage.load_bytes,
                failures=dict(lineage.failures),
            )
            counted = tuple(self._coordinator.commit_all(lease.store_id.state_name, entries))
            if counted[0].attempt_id == entries[0].attempt_id:
                pending.commit()
                self._metrics.commits += 1
                self._tell_standbys(lease, lineage, deltas)
            else:
                self._adopt(pending, counted, entries)
        except BaseException as error:
            lineage.failures[type(error).__name__] += 1
            if self._counts_for_sure_not(error):
                self._discard([entry.file for entry in entries])
            raise
        lineage.committed(counted)
        self._metrics.bytes_written += sum(entry.file_bytes for entry in entries)
        return counted

    def _tell_standbys(self, lease: Lease, lineage: Lineage, deltas: Sequence[Delta]) -> None:
        if self._standbys is not None:
            base_attempt = lineage.attempt_of(deltas[0][0].base_version)
            entries, files = zip(*deltas, strict=True)
            self._standbys.send(lease, base_attempt, entries, files, is_keyed=self._is_keyed)

    @staticmethod
    def _counts_for_sure_not(error: BaseException) -> bool:
        """Whether a commit that failed so was refused by what is in the log; any other one may have been counted after all."""
        return isinstance(error, FencedError)

    def _write(self, deltas: Sequence[Delta]) -> None:
        """Write the files of all stores, side by side."""
        *others, (entry, data) = deltas
        waiting = [self._pool.submit(self._objects.put, other.file, its_data) for other, its_data in others]
        self._objects.put(entry.file, data)
        for one in waiting:
            one.result()

    def _adopt(self, pending: Pending, counted: Sequence[CommitEntry], entries: Sequence[CommitEntry]) -> None:
        """Another attempt of the same run was counted first: take its deltas instead of the own."""
        pending.abort()
        for entry in counted:
            pending.adopt(entry, self._loader.read(entry))
        self._discard([entry.file for entry in entries])
        self._metrics.adopted_commits += 1

    def _discard(self, files: Iterable[str]) -> None:
        """Remove files that certainly do not count; what is left is cleaned away later, as any that no record names."""
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
        """Store all rows of a committed version as a snapshot; False if the commit counts no more.

        Parameters
        ----------
        entry
            The commit that made the version.
        tables
            All rows in ``row_schema``, a piece after the other: each is encoded and stored before the next but one is asked for.
        room
            See :func:`~store_actors.serving.files.encode_snapshot`.
        """
        created_at_ms = now_ms(self._runtime.clock)
        attempt_id = self._runtime.new_id()
        stored: list[StoredFile] = []
        rows = 0
        try:
            place = place_in_state(store_id, entry.attempt_id)
            facts = (entry.version, entry.watermark_ms, schema, room, place, self._piece_bytes)
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
            # Nobody was told of them.
            self._discard([one.file for one in stored])
            raise
        if not self._coordinator.add_snapshot(store_id.state_name, snapshot):
            self._discard(snapshot.files)
            return False
        self._metrics.snapshots_written += 1
        self._metrics.bytes_written += sum(one.file_bytes for one in stored)
        return True


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def describe_commit(
    change: Change,
    *,
    task: TaskIdentity,
    lease: Lease,
    store_id: StateStoreId,
    attempt_id: str,
    committed_at_ms: int,
    schema: StateSchema,
    state_rows: int,
    state_bytes: int,
    watermarks: Watermarks | None = None,
) -> Delta:
    """Manifest entry and delta file of a change; nothing is written yet."""
    data, checksum = encode_delta(change, schema, place_in_state(store_id, attempt_id))
    if watermarks is None:
        watermarks = Watermarks(change.watermark_ms, change.watermark_ms)
    entry = CommitEntry(
        partition_id=task.partition_id,
        version=change.version,
        base_version=change.base_version,
        epoch=lease.epoch,
        run_id=task.run_id,
        attempt_id=attempt_id,
        file=delta_path(store_id, change.version, attempt_id),
        file_bytes=len(data),
        checksum=checksum,
        delta_rows=change.delta.num_rows,
        rows_updated=change.rows_updated,
        rows_removed=change.rows_removed,
        state_rows=state_rows,
        state_bytes=state_bytes,
        rows_in=change.rows_in,
        rows_late=change.rows_late,
        watermark_ms=change.watermark_ms,
        output_watermark_ms=watermarks.output_ms,
        source_watermarks_ms=dict(watermarks.sources),
        committed_at_ms=committed_at_ms,
        executor=task.executor,
        batch_time_ms=task.batch_time_ms,
        is_import=task.is_import,
        store_name=store_id.store_name,
    )
    return entry, data

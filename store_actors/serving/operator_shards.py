"""Stateful operators' shards in one process. No Ray.

A request restores the shard to the version that the batch reads, applies the rows, and commits (:mod:`store_actors.serving.commits`).
The version is restored in memory if possible, and otherwise from the files that the manifest names. A repeated request gets the
recorded rows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import pyarrow as pa
from msgspec import structs

from coordinator.model.commits import CommitEntry
from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.leases import Lease
from coordinator.model.schema import StateSchema
from coordinator.model.watermarks import Watermarks
from store_actors.engine.versions import Change
from store_actors.messages.requests import ApplyRequest, ShardInput
from store_actors.operators.aggregate_results import results_of
from store_actors.operators.make_shard import OperatorShard
from store_actors.serving.commits import PreparedWrite, Transaction, check_first_version
from store_actors.serving.files import as_snapshot
from store_actors.serving.partition import Partition
from store_actors.serving.partitions import Partitions

#: Memory of a batch, in multiples of the bytes of the rows that it changes. They are kept with their old values, with their new values,
#: as Arrow data, in a delta, and in the reply to the task.
_CHANGE_FACTOR = 6


class OperatorShards:
    """The operators' shards of one process. Thread-safe; different shards work in parallel."""

    def __init__(self, partitions: Partitions) -> None:
        self.partitions = partitions
        self.metrics = partitions.metrics
        self._memory = partitions.memory

    def apply(self, request: ApplyRequest, rows: ShardInput) -> tuple[pa.Table, CommitEntry]:
        """Fold a task's rows into its shard, commit, and return what the batch emits with its manifest entry.

        A repeated call for a version that the same run has committed changes nothing and returns the same rows.

        Raises
        ------
        FencedError
            A newer owner or run has the shard; nothing was committed.
        CorruptStateError
            A delta that the shard needs is missing or damaged.
        StorageUnavailableError, StoreUnavailableError, CommitUnknownError
            Storage or coordinator failed. The shard is dropped from memory, and the next call reads it again.
        """
        partition = self.partitions.cache.of(request.lease.store_id)
        with partition.lock:
            if partition.lineage.recorded(request.task.run_id, request.task.batch_id + 1):
                # The task was retried, or runs twice.
                self.metrics.replayed_answers += 1
            else:
                shard = restored(
                    self.partitions, partition, request.lease, request.task.run_id, request.base_version, request.schema
                )
                with self._working(shard, request, rows):
                    self._commit(partition, shard, request, rows)
            assert partition.emitted is not None
            (entry,) = partition.lineage.newest
            if request.schema.output_mode == "complete":
                with self._memory.using(request.lease.store_id):
                    return results_of(_shard_of(partition).snapshot(), request.schema), entry
            return partition.emitted, entry

    def _working(self, shard: OperatorShard, request: ApplyRequest, rows: ShardInput) -> AbstractContextManager[None]:
        """Reserve memory for a batch: for its input rows as words, and for the rows that it changes; see ``_CHANGE_FACTOR``."""
        input_bytes, count = (sum(measure(table) for table in rows.tables) for measure in (_bytes, len))
        size = shard.row_bytes + input_bytes // max(1, count)
        if len(shard) > count:
            size = max(size, shard.nbytes // len(shard))
        version = request.task.batch_id + 1
        likely = 3 * input_bytes + _CHANGE_FACTOR * count * size
        return self._memory.working(request.lease.store_id, version, 2 * input_bytes, likely)

    def _commit(self, partition: Partition, shard: OperatorShard, request: ApplyRequest, rows: ShardInput) -> None:
        write = partial(_folded, shard, request, rows)
        transaction = Transaction(partition, request.task, request.lease, {DEFAULT_STORE: write})
        try:
            self.partitions.commits.commit(transaction)
            emitted = _emitted(shard, transaction)
        except BaseException:
            # The shard may be half changed, or the commit may have succeeded after all: memory cannot be relied on any more.
            partition.forget()
            raise
        partition.emitted = self._memory.kept(request.lease.store_id, emitted)

    def import_rows(self, request: ApplyRequest, rows: pa.Table) -> CommitEntry:
        """Commit rows of state, unchanged, as a shard's first version; the query kept its state in another store before.

        A repeated call changes nothing. The rows are not kept in memory: the query's first batch reads the file.

        Raises
        ------
        InvalidRequestError
            The shard has an earlier version.
        FencedError
            A newer owner or run has the shard; nothing was committed.
        StorageUnavailableError, StoreUnavailableError, CommitUnknownError
            Storage or coordinator failed; repeat the import.
        """
        task = request.task
        # Standbys copy what the owner has in memory, and no process has these rows there.
        lease = structs.replace(request.lease, standbys=())
        check_first_version(task, request.base_version)
        partition = self.partitions.cache.of(lease.store_id)
        transaction = Transaction(partition, task, lease, {DEFAULT_STORE: partial(_imported, request, rows)})
        with partition.lock:
            partition.forget()
            try:
                with self._memory.working(lease.store_id, task.batch_id + 1, 0, 2 * _bytes(rows)):
                    (committed,) = self.partitions.commits.commit(transaction)
            finally:
                partition.forget()
        return committed

    def loaded(self) -> list[tuple[StateStoreId, int, int]]:
        """Return (shard, version, number of rows) of every shard in memory."""
        return [
            (store_id, store.version, len(store))
            for store_id, partition in self.partitions.cache.items()
            for name, row_format in list(partition.formats.items())
            if isinstance(row_format.definition, StateSchema) and (store := partition.stores.get(name)) is not None
        ]


def restored(
    partitions: Partitions, partition: Partition, lease: Lease, run_id: str, base: int, schema: StateSchema
) -> OperatorShard:
    """Return an operator's shard at the base version of a lease; errors as of :meth:`Restorer.restore`. The caller has the lock."""
    if not partition.is_loaded_as(DEFAULT_STORE, schema):
        # The query was changed: its state is read again, in the new schema.
        partition.forget()
    partitions.restorer.restore(partition, lease, run_id, base, {DEFAULT_STORE: schema})
    return _shard_of(partition)


def _shard_of(partition: Partition) -> OperatorShard:
    return cast(OperatorShard, partition.stores[DEFAULT_STORE])


def _emitted(shard: OperatorShard, transaction: Transaction) -> pa.Table:
    delta = transaction.committed_delta(DEFAULT_STORE)
    # Complete mode emits the whole version, which the shard has: no second copy is kept.
    if shard.schema.output_mode == "complete":
        return delta.slice(0, 0)
    emitted = transaction.emitted(DEFAULT_STORE)
    return results_of(shard.output(delta) if emitted is None else emitted, shard.schema)


def _folded(shard: OperatorShard, request: ApplyRequest, rows: ShardInput) -> PreparedWrite:
    watermarks = request.watermarks
    change = shard.apply(rows, watermarks.input_ms, request.task.batch_id + 1, request.late_ms)
    return write_of(shard, change, watermarks)


def write_of(shard: OperatorShard, change: Change, watermarks: Watermarks) -> PreparedWrite:
    """Return the write of a shard's change, with the watermarks after it."""
    output_ms = max(watermarks.output_ms, shard.output_watermark_ms(watermarks.input_ms))
    watermarks = structs.replace(watermarks, output_ms=output_ms)
    return PreparedWrite(change, shard.schema, len(shard), shard.nbytes, watermarks=watermarks)


def _imported(request: ApplyRequest, rows: pa.Table) -> PreparedWrite:
    """Make the write of an import: its rows go to a file unchanged, and are not loaded into memory."""
    change = Change(
        version=request.task.batch_id + 1,
        base_version=0,
        delta=as_snapshot(rows, request.schema),
        rows_updated=rows.num_rows,
        rows_removed=0,
        rows_in=0,
        rows_late=0,
        watermark_ms=request.watermarks.input_ms,
    )
    return PreparedWrite(change, request.schema, rows.num_rows, _bytes(rows), watermarks=request.watermarks)


def _bytes(table: pa.Table) -> int:
    return int(table.nbytes)

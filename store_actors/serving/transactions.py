"""The next version of a partition, from its writes to its commit. No Ray.

A batch of an operator is a transaction with one write; a session on keyed stores is one with a write for each of its stores. A
transaction begins when it is made, over stores that are at its base version, and is then prepared, once. It ends with
:meth:`Transaction.commit`, or with :meth:`Transaction.abort`, which :meth:`Transaction.adopt` may follow.
:class:`~store_actors.serving.commits.Commits` takes it through that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import pyarrow as pa
from msgspec import structs

from coordinator.model.commits import CommitEntry
from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import StateStoreId, TaskIdentity
from coordinator.model.leases import Lease
from coordinator.model.schema import StateSchema
from coordinator.model.watermarks import Watermarks
from store_actors.engine.versioned_store import VersionedStore
from store_actors.engine.versions import Change
from store_actors.serving.files import delta_path, encode_delta, identity_in_state
from store_actors.serving.partition import Partition

#: Manifest entry and file of one store's delta.
Delta: TypeAlias = tuple[CommitEntry, bytes]


@dataclass(frozen=True, slots=True)
class PreparedWrite:
    """The change of one store, which is pending there.

    Attributes
    ----------
    state_rows, state_bytes
        Rows and memory of the store with the change.
    watermarks
        Watermarks that go with the version; that of the change by default.
    due_ms
        Earliest time at which a row falls due by processing time, in milliseconds since the epoch, if rows do.
    """

    change: Change
    schema: StateSchema
    state_rows: int
    state_bytes: int
    watermarks: Watermarks | None = None
    due_ms: int | None = None


class Write(Protocol):
    """The part of a transaction that changes one store."""

    def prepare(self) -> PreparedWrite:
        """Make the change, not yet committed."""


class Transaction:
    """An attempt to make the next version of a partition.

    Parameters
    ----------
    partition
        The partition. The caller has its lock until the transaction has ended.
    task, lease
        Who makes the version, and under which lease.
    writes
        By store name.
    """

    def __init__(self, partition: Partition, task: TaskIdentity, lease: Lease, writes: Mapping[str, Write]) -> None:
        self.partition, self.task, self.lease = partition, task, lease
        self._writes = writes
        self._prepared: dict[str, PreparedWrite] = {}
        self._adopted: dict[str, pa.Table] = {}

    def prepare(self, attempt_id: str, committed_at_ms: int) -> Sequence[Delta]:
        """Make the changes, and return the delta of each store; nothing is written yet.

        Parameters
        ----------
        attempt_id, committed_at_ms
            Id of the attempt, and the time in milliseconds since the epoch.
        """
        partition = self.partition
        with partition.changing:
            try:
                self._prepared = {name: write.prepare() for name, write in self._writes.items()}
            except BaseException:
                # No reader may see what is half changed.
                partition.forget()
                raise
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
        """Return manifest entry and delta file of a change."""
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

"""What is written for a version of a shard: its delta with the manifest entry, or a snapshot of it."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import suppress
from typing import Protocol

import pyarrow as pa

from coordinator.errors import StorageUnavailableError
from coordinator.model import CommitEntry, Lease, SnapshotEntry, StateStoreId, TaskIdentity
from coordinator.storage.protocol import ObjectStore
from coordinator.watermarks import Watermarks
from store_actors.engine.versions import Change
from store_actors.schema import StateSchema
from store_actors.serving.files import delta_path, encode_delta, encode_snapshot, snapshot_path

__all__ = ["SnapshotCounter", "describe_commit", "discard", "write_snapshot"]

log = logging.getLogger(__name__)


class SnapshotCounter(Protocol):
    """Whoever counts snapshots."""

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        """Count a snapshot; False if its version was superseded meanwhile."""


def describe_commit(
    change: Change,
    *,
    task: TaskIdentity,
    lease: Lease,
    store_id: StateStoreId,
    attempt_id: str,
    schema: StateSchema,
    state_rows: int,
    state_bytes: int,
    watermarks: Watermarks | None = None,
) -> tuple[CommitEntry, bytes]:
    """Manifest entry and delta file of a change; nothing is written yet."""
    data, checksum = encode_delta(change, schema)
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
        committed_at_ms=_now_ms(),
        executor=task.executor,
        store_name=store_id.store_name,
    )
    return entry, data


def write_snapshot(
    objects: ObjectStore,
    counter: SnapshotCounter,
    store_id: StateStoreId,
    entry: CommitEntry,
    rows: pa.Table,
    schema: StateSchema,
) -> int | None:
    """Store all rows of a committed version as a snapshot; its size in bytes, None if the commit counts no more.

    Parameters
    ----------
    entry
        The commit that made the version.
    rows
        In ``row_schema``.
    """
    created_at_ms = _now_ms()
    data, checksum = encode_snapshot(rows, entry.version, entry.watermark_ms, schema)
    snapshot = SnapshotEntry(
        partition_id=entry.partition_id,
        version=entry.version,
        attempt_id=entry.attempt_id,
        file=snapshot_path(store_id, entry.version, uuid.uuid4().hex),
        file_bytes=len(data),
        checksum=checksum,
        rows=rows.num_rows,
        watermark_ms=entry.watermark_ms,
        created_at_ms=created_at_ms,
        store_name=entry.store_name,
    )
    objects.put(snapshot.file, data)
    if not counter.add_snapshot(store_id.state_name, snapshot):
        discard(objects, snapshot.file)
        return None
    return len(data)


def discard(objects: ObjectStore, file: str) -> None:
    """Remove a file that certainly does not count; if that fails it is cleaned away later, as any that no record names."""
    with suppress(StorageUnavailableError, FileNotFoundError):
        objects.delete(file)


def _now_ms() -> int:
    return int(time.time() * 1000)

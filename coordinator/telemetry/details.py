"""What the dashboard is told of a query beyond its status: how its newest batches went, and the files and moves of its shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.copy_result import ShardMove
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.move_planner import MovePlanner
from coordinator.telemetry.batch_times import BatchTimes, PartitionTime, moments
from coordinator.telemetry.status import query_status

__all__ = ["query_details"]

#: Newest batches, and moves of each shard, that are told of each time.
_BATCHES = 6
_MOVES = 4
#: What is not told of a shard that is at no work.
_NO_TIME = PartitionTime()


def query_details(
    ledger: StateLedger, metadata: StateMetadata, placing: MovePlanner, times: BatchTimes, *, active: bool
) -> dict[str, Any]:
    """:func:`~coordinator.telemetry.status.query_status` with ``batches``, ``refusals``, ``slow_batches``, and more of each shard.

    Times are milliseconds since the epoch, of the clock of whoever took them: ``planned_ms`` is the driver's, ``begun_ms`` a store
    actor's, all others the coordinator's. Durations of commits before this coordinator started are not known: None.
    """
    status = query_status(ledger, metadata, placing, active=active)
    generation = ledger.generations.newest(ShardLayout(metadata.num_shards))
    for shard, partition_id in zip(status["shards"], generation.partitions, strict=True):
        shard |= _shard_details(ledger, partition_id, times)
    batches = [] if ledger.is_of_python else _batches(ledger, generation, times)
    refusals = [{**asdict(one), "shard": one.partition_id - generation.first_partition} for one in times.refusals()]
    slow = [asdict(one) for one in times.slow_batches()]
    return {**status, "epoch": ledger.epoch, "batches": batches, "refusals": refusals, "slow_batches": slow}


def _shard_details(ledger: StateLedger, partition_id: int, times: BatchTimes) -> dict[str, Any]:
    entry = ledger.newest(partition_id)
    files = ledger.retained_files(partition_id)
    return {
        **moments(entry, _time_of(times, entry)),
        "oldest_version": ledger.oldest_readable(partition_id),
        "snapshot_version": files.snapshot_version,
        "delta_files": files.deltas,
        "snapshot_files": files.snapshots,
        "file_bytes": files.file_bytes,
        "moves": [_move(one) for one in ledger.assignments.moves(partition_id)[-_MOVES:]],
    }


def _time_of(times: BatchTimes, entry: CommitEntry | None) -> PartitionTime:
    found = None if entry is None else times.of(entry.version)
    return _NO_TIME if found is None or entry is None else found.partitions.get(entry.partition_id, _NO_TIME)


def _move(move: ShardMove) -> dict[str, Any]:
    preparation = move.preparation
    return {
        "epoch": move.epoch,
        "version": move.version,
        "from": move.former.actor_name if move.former else None,
        "from_instance": move.former.instance_id if move.former else None,
        "to": move.location.actor_name,
        "reason": move.reason,
        "moved_bytes": preparation.moved_bytes if preparation else None,
        "moved_ms": preparation.duration_ms if preparation else None,
        "error": move.error,
    }


def _batches(ledger: StateLedger, generation: ShardLayout, times: BatchTimes) -> list[dict[str, Any]]:
    """The newest batches, oldest first, also the one that is being made."""
    made: defaultdict[int, list[CommitEntry]] = defaultdict(list)
    for partition in generation.partitions:
        for entry in ledger.newest_entries(partition, _BATCHES):
            made[entry.version].append(entry)
    return [_batch(made[version], generation, times) for version in sorted(made)[-_BATCHES:]]


def _batch(entries: Sequence[CommitEntry], generation: ShardLayout, times: BatchTimes) -> dict[str, Any]:
    """One batch: totals of its shards, and the moments of the one that was counted last, which the others waited for."""

    def total(name: str) -> int:
        return sum(getattr(entry, name) for entry in entries)

    of_batch = times.of(entries[0].version)
    last = max(entries, key=lambda entry: (_time_of(times, entry).counted_ms or 0, entry.committed_at_ms))
    is_known = _time_of(times, last).counted_ms is not None
    return {
        "batch_id": last.version - 1,
        "version": last.version,
        "run_id": last.run_id,
        "planned_ms": last.batch_time_ms,
        "first_begun_ms": min(entry.committed_at_ms for entry in entries),
        "last_begun_ms": max(entry.committed_at_ms for entry in entries),
        "ended_ms": of_batch.ended_ms if of_batch else None,
        "shards_counted": len(entries),
        "rows_in": total("rows_in"),
        "rows_late": total("rows_late"),
        "rows_updated": total("rows_updated"),
        "rows_removed": total("rows_removed"),
        "state_rows": total("state_rows"),
        "state_bytes": total("state_bytes"),
        "delta_bytes": total("file_bytes"),
        "watermark_ms": min(entry.watermark_ms for entry in entries),
        "apply_total_ms": total("apply_ms") if is_known else None,
        "write_total_ms": total("write_ms") if is_known else None,
        "last_shard": last.partition_id - generation.first_partition,
        **moments(last, _time_of(times, last)),
    }

"""A fleet and its ledgers as the dashboard and the command line show them: plain JSON data, computed from accepted commits. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from msgspec import structs

from coordinator.ledger.batch_stats import BatchStats
from coordinator.ledger.rescaling import first_layout
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.leases import ShardMove
from coordinator.model.memory_options import MemoryUse
from coordinator.model.names import fleet_id_of
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.telemetry.slow_batches import moments, phases
from coordinator.telemetry.state_record import StateRecord
from coordinator.telemetry.state_stats import LOCAL, ShardStats, StateStats, TaskLocality

#: Newest versions that rows per second are computed from, and newest batches that are shown.
_BATCHES = 6
#: Newest moves of each shard that are shown.
_MOVES = 4


def fleet_status(
    uri: str,
    coordinator: Mapping[str, Any],
    actors: ActorRegistry,
    queries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return store actors, queries and shards of a fleet."""
    return {
        "fleet_id": fleet_id_of(uri),
        "uri": uri,
        "coordinator": coordinator,
        "store_actors": [
            {
                **structs.asdict(actor),
                "alive": not actors.is_dead(actor),
                **_memory(actors.memory(actor)),
            }
            for actor in actors.all()
        ],
        "queries": queries,
    }


def _memory(use: MemoryUse | None) -> dict[str, int | None]:
    """Return a store actor's memory as it reported it last; it reports none if it has no limit."""
    if use is None:
        return dict.fromkeys(field.name for field in fields(MemoryUse))
    return asdict(use)


@dataclass(frozen=True, slots=True)
class _Batch:
    version: int
    entries: Sequence[CommitEntry]
    stats: BatchStats


def query_status(
    ledger: StateLedger,
    metadata: StateMetadata,
    locality: TaskLocality,
    *,
    active: bool,
    record: StateRecord | None = None,
) -> dict[str, Any]:
    """Return one query's row, with a row for each shard.

    ``version`` and ``watermark_ms`` are those of the newest version that every shard has. ``rows_per_second`` is over the last few
    batches. ``locality`` is the share of state operations since the coordinator started whose task ran on the node of its shard. Each
    is None where it is not known yet. ``is_continuous`` says that the batches are epochs of a continuous query.

    Parameters
    ----------
    record
        Given for details: ``batches``, ``refusals``, ``slow_batches``, and more of each shard. Times are milliseconds since the epoch:
        ``planned_ms`` by the driver's clock, ``begun_ms`` by a store actor's, all others by the coordinator's. Durations of commits
        before this coordinator started are None. ``phases`` of a batch are those of
        :func:`~coordinator.telemetry.slow_batches.phases`.
    """
    layout = ledger.layouts.newest(first_layout(metadata))
    first = layout.first_partition
    shards = [ShardStats.of(ledger, locality, partition) for partition in layout.partitions]
    rows, batches = [_shard(shard, first) for shard in shards], _newest_batches(ledger, layout)
    stats = StateStats()
    stats.add(metadata, shards)
    version, operations = stats.version or 0, stats.operations.total()
    query = {
        "name": metadata.state_name,
        "query_id": ledger.query_id,
        "run_id": ledger.run_id,
        "output_mode": metadata.output_mode,
        "branch_of": None if ledger.origin is None else {"state": ledger.origin[0], "version": ledger.origin[1]},
        "num_shards": layout.num_shards,
        "batch_id": version - 1 if version else None,
        # Batches that follow epochs are finished beyond the last one.
        "is_continuous": ledger.epoch_end is not None and ledger.epoch_end[0] + 1 >= ledger.finished,
        "version": version,
        "watermark_ms": stats.watermark_ms,
        "rows_per_second": _rows_per_second(batches),
        "state_rows": stats.rows,
        "state_bytes": stats.bytes,
        "locality": stats.operations[LOCAL] / operations if operations else None,
        "rows_late": ledger.total_rows_late(),
        "last_commit_ms": stats.last_commit_ms,
        "active": active,
        "shards": rows,
    }
    if record is None:
        return query
    return {
        **query,
        "shards": [{**row, **_shard_details(ledger, shard, record)} for row, shard in zip(rows, shards, strict=True)],
        "epoch": ledger.epoch,
        "batches": [] if ledger.is_of_python else [_batch(batch, first, record) for batch in batches[-_BATCHES:]],
        "refusals": [{**asdict(refusal), "shard": refusal.partition_id - first} for refusal in record.refusals],
        "slow_batches": [asdict(batch) for batch in record.slow_batches],
    }


def _newest_batches(ledger: StateLedger, layout: ShardLayout) -> list[_Batch]:
    """Return the versions that are among the newest of some shard, oldest first; the newest may still be in progress."""
    entries: defaultdict[int, list[CommitEntry]] = defaultdict(list)
    for partition in layout.partitions:
        for entry in ledger.newest_entries(partition, _BATCHES):
            entries[entry.version].append(entry)
    return [
        _Batch(version, entries[version], BatchStats([(entry,) for entry in entries[version]]))
        for version in sorted(entries)
    ]


def _rows_per_second(batches: Sequence[_Batch]) -> float | None:
    if len(batches) < 2:
        return None
    elapsed_ms = (batches[-1].stats.last_begun_ms or 0) - (batches[0].stats.last_begun_ms or 0)
    return sum(batch.stats.rows_in for batch in batches[1:]) * 1000 / elapsed_ms if elapsed_ms > 0 else None


def _shard(shard: ShardStats, first_partition: int) -> dict[str, Any]:
    entry = shard.entry
    location = None if shard.lease is None else shard.lease.location
    return {
        "actor_name": location.actor_name if location else None,
        "node_id": location.node_id if location else None,
        "epoch": None if shard.lease is None else shard.lease.epoch,
        "executor": entry.executor if entry else None,
        "version": shard.version,
        "state_rows": shard.rows,
        "state_bytes": shard.bytes,
        "rows_in": entry.rows_in if entry else 0,
        "last_commit_ms": entry.committed_at_ms if entry else None,
        "partition_id": shard.partition_id - first_partition,
        "operations": sum(shard.operations.values()),
        "operations_local": shard.operations.get(LOCAL, 0),
        "operations_elsewhere": {why: count for why, count in shard.operations.items() if why != LOCAL},
    }


def _shard_details(ledger: StateLedger, shard: ShardStats, record: StateRecord) -> dict[str, Any]:
    return {
        **moments(shard.entry, record.time_of(shard.entry)),
        "oldest_version": ledger.oldest_readable(shard.partition_id),
        **ledger.retained_files(shard.partition_id),
        "moves": [_move(move) for move in ledger.moves(shard.partition_id)[-_MOVES:]],
    }


def _move(move: ShardMove) -> dict[str, Any]:
    copied = move.preparation
    return {
        "epoch": move.epoch,
        "version": move.version,
        "from": move.former.actor_name if move.former else None,
        "from_instance": move.former.instance_id if move.former else None,
        "to": move.location.actor_name,
        "reason": move.reason,
        "moved_bytes": copied.moved_bytes if copied else None,
        "moved_ms": copied.duration_ms if copied else None,
        "error": move.error,
    }


def _batch(batch: _Batch, first_partition: int, record: StateRecord) -> dict[str, Any]:
    """Return one batch: sums over its shards, and the moments of the shard that committed last, which the others waited for."""
    stats, recorded = batch.stats, record.batch(batch.version)
    last = max(batch.entries, key=lambda entry: (record.time_of(entry).counted_ms or 0, entry.committed_at_ms))
    time = record.time_of(last)
    is_known = time.counted_ms is not None
    times = {
        "planned_ms": last.batch_time_ms,
        "ended_ms": recorded.ended_ms if recorded else None,
        **moments(last, time),
    }
    return {
        "batch_id": batch.version - 1,
        "version": batch.version,
        "run_id": last.run_id,
        "first_begun_ms": stats.first_begun_ms,
        "last_begun_ms": stats.last_begun_ms,
        "shards_counted": stats.commits,
        **stats.counts(),
        "state_rows": stats.total("state_rows"),
        "state_bytes": stats.total("state_bytes"),
        "watermark_ms": stats.watermark_ms,
        # Every shard has what the tasks told all of them.
        "waited_ms": last.waited_ms,
        "apply_total_ms": stats.total("apply_ms") if is_known else None,
        "write_total_ms": stats.total("write_ms") if is_known else None,
        "last_shard": last.partition_id - first_partition,
        **times,
        "phases": phases(times),
    }

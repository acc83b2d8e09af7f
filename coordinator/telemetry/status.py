"""What the dashboard and the command line show of a fleet and its ledgers: plain JSON data, computed from counted commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.commits import CommitEntry
from coordinator.model.memory_options import MemoryUse
from coordinator.model.names import fleet_id_of
from coordinator.model.state_metadata import StateMetadata
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.move_planner import LOCAL, MovePlanner

__all__ = ["fleet_status", "has_watermark", "query_status"]

#: Newest versions over which rows per second is taken.
_RATE_VERSIONS = 6


def fleet_status(
    uri: str,
    coordinator: Mapping[str, Any],
    lives: ActorRegistry,
    queries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Store actors, queries and shards of a fleet.

    Parameters
    ----------
    coordinator
        What is shown of the coordinator itself.
    queries
        Those whose states are open, as of :func:`query_status`.
    """
    return {
        "fleet_id": fleet_id_of(uri),
        "uri": uri,
        "coordinator": coordinator,
        "store_actors": [
            {
                "actor_name": actor.actor_name,
                "instance_id": actor.instance_id,
                "node_id": actor.node_id,
                "host": actor.host,
                "pid": actor.pid,
                "alive": not lives.is_over(actor),
                **_memory(lives.memory(actor)),
            }
            for actor in lives.all()
        ],
        "queries": queries,
    }


def _memory(use: MemoryUse | None) -> dict[str, int | None]:
    """A store actor's memory as it told it last; of one without a limit, nothing is known."""
    if use is None:
        return dict.fromkeys(field.name for field in fields(MemoryUse))
    return asdict(use)


def query_status(ledger: StateLedger, metadata: StateMetadata, placing: MovePlanner, *, active: bool) -> dict[str, Any]:
    """One query's row, with a row a shard.

    ``version`` and ``watermark_ms`` are those of the newest version that every shard has; ``rows_per_second`` is over the
    last few batches; ``locality`` is the part of state operations since the coordinator started whose task ran on the node of its
    shard; None where nothing is known yet.
    """
    generation = ledger.generations.newest(ShardLayout(metadata.num_shards))
    entries = {partition: ledger.newest(partition) for partition in generation.partitions}
    present = [entry for entry in entries.values() if entry is not None]
    complete = len(present) == generation.num_shards
    version = ledger.committed_version(generation)
    shards = [
        {
            **_shard_status(ledger, partition, entry),
            "partition_id": partition - generation.first_partition,
            **_locality(placing.operations(metadata.state_name, partition)),
        }
        for partition, entry in entries.items()
    ]
    operations = sum(shard["operations"] for shard in shards)
    return {
        "name": metadata.state_name,
        "query_id": ledger.query_id,
        "run_id": ledger.run_id,
        "output_mode": metadata.output_mode,
        "branch_of": None if ledger.origin is None else {"state": ledger.origin[0], "version": ledger.origin[1]},
        "num_shards": generation.num_shards,
        "batch_id": version - 1 if version else None,
        "version": version,
        "watermark_ms": min(entry.watermark_ms for entry in present) if complete and has_watermark(metadata) else None,
        "rows_per_second": _rows_per_second(ledger, generation.partitions),
        "state_rows": sum(shard["state_rows"] for shard in shards),
        "state_bytes": sum(shard["state_bytes"] for shard in shards),
        "locality": sum(shard["operations_local"] for shard in shards) / operations if operations else None,
        "rows_late": ledger.total_rows_late(),
        "last_commit_ms": max((entry.committed_at_ms for entry in present), default=None),
        "active": active,
        "shards": shards,
    }


def has_watermark(metadata: StateMetadata) -> bool:
    """Whether event time ends the rows of a state."""
    return metadata.schema is not None and metadata.schema.delay_ms is not None


def _shard_status(ledger: StateLedger, partition_id: int, entry: CommitEntry | None) -> dict[str, Any]:
    located = ledger.location(partition_id)
    rows, size = ledger.held(partition_id)
    return {
        "actor_name": located[1].actor_name if located else None,
        "node_id": located[1].node_id if located else None,
        "epoch": located[0] if located else None,
        "executor": entry.executor if entry else None,
        "version": ledger.newest_version(partition_id),
        "state_rows": rows,
        "state_bytes": size,
        "rows_in": entry.rows_in if entry else 0,
        "last_commit_ms": entry.committed_at_ms if entry else None,
    }


def _locality(operations: Mapping[str, int]) -> dict[str, Any]:
    misses = {why: count for why, count in operations.items() if why != LOCAL}
    return {
        "operations": sum(operations.values()),
        "operations_local": operations.get(LOCAL, 0),
        "operations_elsewhere": misses,
    }


def _rows_per_second(ledger: StateLedger, partitions: range) -> float | None:
    rows: dict[int, int] = defaultdict(int)
    finished_ms: dict[int, int] = defaultdict(int)
    for partition in partitions:
        for entry in ledger.newest_entries(partition, _RATE_VERSIONS):
            rows[entry.version] += entry.rows_in
            finished_ms[entry.version] = max(finished_ms[entry.version], entry.committed_at_ms)
    versions = sorted(rows)
    if len(versions) < 2:
        return None
    elapsed_ms = finished_ms[versions[-1]] - finished_ms[versions[0]]
    return sum(rows[version] for version in versions[1:]) * 1000 / elapsed_ms if elapsed_ms > 0 else None

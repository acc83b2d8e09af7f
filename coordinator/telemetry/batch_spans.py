"""A batch of a state as spans of a trace: the batch, its slowest shards, and the commit of each. Pure."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.ledger.batch_stats import BatchStats
from coordinator.model.commits import CommitEntry
from coordinator.telemetry.slow_batches import PartitionTime

Attributes = Mapping[str, str | int]
#: Shards of a batch that have spans of their own: those that took longest.
MAX_SHARDS = 256


class TracedShard(NamedTuple):
    """A shard of a batch that has ended."""

    shard: int
    #: Name of its store actor.
    actor: str
    #: One a store.
    commits: Sequence[CommitEntry]
    time: PartitionTime

    @property
    def begin_ms(self) -> int:
        """When it asked for its lease, or began where it had that."""
        return self.commits[0].committed_at_ms if self.time.asked_ms is None else self.time.asked_ms

    @property
    def counted_ms(self) -> int:
        """When its commit was in the log, or was written if another coordinator accepted it."""
        first = self.commits[0]
        return self.time.counted_ms or first.committed_at_ms + first.apply_ms + first.write_ms


class TracedBatch(NamedTuple):
    """A batch of a state that has ended."""

    state: str
    query_id: str
    #: When Spark planned it, in milliseconds since the epoch; None where that may have been in an earlier run.
    planned_ms: int | None
    ended_ms: int
    #: At least one.
    shards: Sequence[TracedShard]


class Span(NamedTuple):
    """A span with those below it; times in milliseconds since the epoch."""

    name: str
    begin_ms: int
    end_ms: int
    attributes: Attributes
    children: Sequence[Span] = ()


def trace_id(batch: TracedBatch) -> int:
    """Return the 128 bits that all states of a query have in common in a batch: of the SHA-256 of run and batch."""
    commit = batch.shards[0].commits[0]
    return int.from_bytes(hashlib.sha256(f"{commit.run_id}/{commit.version - 1}".encode()).digest()[:16])


def batch_span(batch: TracedBatch) -> Span:
    """Return the span of a batch, from Spark's plan to the end of the sink.

    Below it each shard is a span from its first request to the coordinator until its commit is in the log, and below that the commit,
    from the beginning of its write on. Clocks of several machines take part, as in :func:`~coordinator.telemetry.slow_batches.phases`.
    """
    commit = batch.shards[0].commits[0]
    stats = BatchStats([shard.commits for shard in batch.shards])
    # Of many shards spans are made of those only that have some.
    slowest = heapq.nlargest(MAX_SHARDS, batch.shards, key=lambda shard: shard.counted_ms - shard.begin_ms)
    planned_ms = batch.planned_ms
    begin_ms = min(shard.begin_ms for shard in batch.shards) if planned_ms is None else planned_ms
    attributes: Attributes = {
        "state": batch.state,
        "query": batch.query_id,
        "run": commit.run_id,
        "batch": commit.version - 1,
        "version": commit.version,
        "shards": len(batch.shards),
    }
    spans = [_shard_span(shard) for shard in slowest]
    return _span(f"batch {batch.state}", begin_ms, batch.ended_ms, {**attributes, **_sums(stats)}, spans)


def _shard_span(shard: TracedShard) -> Span:
    first, stats = shard.commits[0], BatchStats([shard.commits])
    apply_ms = stats.total("apply_ms")
    written: Attributes = {
        "shard": shard.shard,
        "file": first.file,
        "delta_bytes": stats.total("file_bytes"),
        "write_ms": stats.total("write_ms"),
    }
    attributes: Attributes = {
        "shard": shard.shard,
        "store_actor": shard.actor,
        "version": first.version,
        "epoch": first.epoch,
        "restore_ms": stats.total("restore_ms"),
        "load_bytes": stats.total("load_bytes"),
        "apply_ms": apply_ms,
    }
    commit = _span("commit", first.committed_at_ms + apply_ms, shard.counted_ms, written)
    return _span("shard", shard.begin_ms, shard.counted_ms, {**attributes, **_sums(stats)}, (commit,))


def _sums(stats: BatchStats) -> dict[str, int]:
    return {
        **stats.counts(),
        "state_rows": stats.total("state_rows"),
        "state_bytes": stats.total("state_bytes"),
        "watermark_ms": stats.watermark_ms or 0,
    }


def _span(name: str, begin_ms: int, end_ms: int, attributes: Attributes, children: Sequence[Span] = ()) -> Span:
    named = {f"statefleet.{key}": value for key, value in attributes.items()}
    return Span(name, begin_ms, max(begin_ms, end_ms), named, children)

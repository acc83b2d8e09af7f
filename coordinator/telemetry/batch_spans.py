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
    """A shard of a batch that has ended.

    Attributes
    ----------
    actor
        Name of its store actor.
    commits
        One a store.
    """

    shard: int
    actor: str
    commits: Sequence[CommitEntry]
    time: PartitionTime


class TracedBatch(NamedTuple):
    """A batch of a state that has ended.

    Attributes
    ----------
    planned_ms
        When Spark planned it, in milliseconds since the epoch; None where that may have been in an earlier run.
    shards
        At least one.
    """

    state: str
    query_id: str
    planned_ms: int | None
    ended_ms: int
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
    shards = [_shard_span(shard) for shard in batch.shards]
    begin_ms = min(span.begin_ms for span in shards) if batch.planned_ms is None else batch.planned_ms
    slowest = heapq.nlargest(MAX_SHARDS, shards, key=lambda span: span.end_ms - span.begin_ms)
    attributes: Attributes = {
        "state": batch.state,
        "query": batch.query_id,
        "run": commit.run_id,
        "batch": commit.version - 1,
        "version": commit.version,
        "shards": len(shards),
    }
    return _span(f"batch {batch.state}", begin_ms, batch.ended_ms, {**attributes, **_sums(stats)}, slowest)


def _shard_span(shard: TracedShard) -> Span:
    first, stats = shard.commits[0], BatchStats([shard.commits])
    begun_ms, apply_ms = first.committed_at_ms, stats.total("apply_ms")
    counted_ms = shard.time.counted_ms or begun_ms + apply_ms + stats.total("write_ms")
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
    begin_ms = begun_ms if shard.time.asked_ms is None else shard.time.asked_ms
    commit = _span("commit", begun_ms + apply_ms, counted_ms, written)
    return _span("shard", begin_ms, counted_ms, {**attributes, **_sums(stats)}, (commit,))


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

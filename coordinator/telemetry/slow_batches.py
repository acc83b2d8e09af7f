"""When the parts of a batch began and ended, how long each phase took, and where the time of slow batches went, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from humanize import naturalsize

from coordinator.model.commits import CommitEntry
from coordinator.model.leases import ShardMove
from coordinator.model.memory_options import MemoryUse
from coordinator.telemetry.drivers import ExecutorState, LongBatch

#: Phases of a batch, in order.
PHASES = ("spark", "lease", "hand_over", "apply", "write", "commit", "end")
#: A batch is slow if it takes this many times as long as the median, and this many milliseconds longer.
_TIMES = 3
_LONGER_MS = 1000
#: A running batch is overdue after this many times the median, and this many milliseconds more.
_OVERDUE_TIMES = 10
_OVERDUE_LONGER_MS = 5000
#: Batches that a median is computed from: at most, and at least.
RECENT = 20
_LEAST = 5
#: Phases are named that have at least this share of the lost time, and at most this many.
_NAMED_SHARE = 0.15
_NAMED = 3
#: A batch with more than this many times the median of rows has many.
_MANY_ROWS = 2
#: Shards that are named among those that a batch waits for.
_SHARDS_NAMED = 8


@dataclass(slots=True)
class PartitionTime:
    """Moments of one partition's task, in milliseconds since the epoch."""

    #: ``asked_ms``, ``leased_ms``: When it asked for a lease, and had it; None where the lease came with the commit before.
    asked_ms: int | None = None
    leased_ms: int | None = None
    #: When its commit was in the log; None until then.
    counted_ms: int | None = None


def moments(entry: CommitEntry | None, time: PartitionTime) -> dict[str, int | None]:
    """Return the moments of a shard's newest commit, as JSON data.

    Durations are None unless this coordinator accepted the commit: the log does not have them.
    """
    is_known = entry is not None and time.counted_ms is not None
    return {
        "asked_ms": time.asked_ms,
        "leased_ms": time.leased_ms,
        "begun_ms": entry.committed_at_ms if entry else None,
        "apply_ms": entry.apply_ms if entry and is_known else None,
        "write_ms": entry.write_ms if entry and is_known else None,
        "counted_ms": time.counted_ms,
    }


def phases(batch: Mapping[str, Any]) -> list[int | None]:
    """Return how long each phase of a batch took, in milliseconds, in the order of :data:`PHASES`; None where it is not known.

    It is the time of the shard whose commit came last, which all others waited for:

    - ``spark``: from Spark's plan of the batch until the task asked for a lease, or until the store actor began if the lease came with
      the commit before: source, Spark's plan, map side, exchange, waiting for a core;
    - ``lease``: the coordinator's answer;
    - ``hand_over``: rows on their way to the store actor, which restores the shard at its version;
    - ``apply``, ``write``: the store actor at the rows, and at the delta file;
    - ``commit``: until the version is in the log;
    - ``end``: until Spark is at the end of the batch, after the sink.

    Clocks of several machines take part: where they disagree, a phase is shorter or longer, and never less than 0.

    Parameters
    ----------
    batch
        Moments as of :func:`moments`, with ``planned_ms`` and ``ended_ms``.
    """
    planned, requested, leased = batch.get("planned_ms"), batch.get("asked_ms"), batch.get("leased_ms")
    begun, counted, ended = batch.get("begun_ms"), batch.get("counted_ms"), batch.get("ended_ms")
    apply, write = batch.get("apply_ms"), batch.get("write_ms")
    written = None if None in (begun, apply, write) else begun + apply + write  # type: ignore[operator]
    spark_end = begun if requested is None else requested
    return [
        _between(planned, spark_end),
        _between(requested, leased),
        _between(leased, begun),
        apply,
        write,
        _between(written, counted),
        _between(counted, ended),
    ]


def _between(begin_ms: int | None, end_ms: int | None) -> int | None:
    return None if begin_ms is None or end_ms is None else max(0, end_ms - begin_ms)


@dataclass(frozen=True, slots=True)
class EndedBatch:
    """A batch, after its sink."""

    #: From Spark's plan to the end.
    took_ms: int
    phases: tuple[int | None, ...]
    rows_in: int
    #: The commit that came last: the batch waited for it.
    last: CommitEntry


@dataclass(frozen=True, slots=True)
class SlowBatch:
    """A batch that took much longer than usual."""

    #: Number of the batch among the slow ones of the state since the coordinator started, from 1.
    number: int
    at_ms: int
    batch_id: int
    shard: int
    took_ms: int
    text: str


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The events in the time in which a batch was made."""

    #: ``shard``, ``host``: The shard that committed last, by its number, and where it is.
    shard: int
    host: str | None = None
    #: How it came to that store actor, if it did with this batch; `was_lost` if the store actor that had it was lost.
    move: ShardMove | None = None
    was_lost: bool = False
    memory: MemoryUse | None = None
    #: How many leases and commits were refused meanwhile, by error.
    refusals: Mapping[str, int] = field(default_factory=dict)
    #: How many of the coordinator's own requests to the object store failed meanwhile, by error, and were ``repeated``.
    storage: Mapping[str, int] = field(default_factory=dict)
    lost_executors: Sequence[ExecutorState] = ()


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """A batch that has been running for some seconds."""

    batch_id: int
    #: ``running_ms``, ``median_ms``: How long it has been running, and how long batches usually take; None while too few are
    #: known.
    running_ms: int
    median_ms: int | None
    is_overdue: bool
    text: str


def running_batch(
    state_name: str,
    batch: LongBatch,
    recent: Sequence[EndedBatch],
    missing: Sequence[int],
    num_shards: int,
    lost_executors: Sequence[ExecutorState],
) -> RunningBatch:
    """Return a running batch, with what it waits for as far as that is known."""
    usual_ms = int(median(earlier.took_ms for earlier in recent)) if len(recent) >= _LEAST else None
    is_overdue = usual_ms is not None and (
        batch.running_ms > _OVERDUE_TIMES * usual_ms and batch.running_ms - usual_ms >= _OVERDUE_LONGER_MS
    )
    usual = "" if usual_ms is None else f" (median {_s(usual_ms)})"
    parts = [executor.loss_text() for executor in lost_executors]
    if batch.waits_for:
        parts.append(batch.waits_for)
    if missing:
        named = ", ".join(map(str, missing[:_SHARDS_NAMED])) + (", …" if len(missing) > _SHARDS_NAMED else "")
        parts.append(f"not committed yet by {len(missing)} of {num_shards} shards: {named}")
    else:
        parts.append("all shards have committed it, so it is in the sink, or in another operator of the query")
    text = (
        f"batch {batch.batch_id} of {state_name} has been running for {_s(batch.running_ms)}{usual}: {'; '.join(parts)}"
    )
    return RunningBatch(batch.batch_id, batch.running_ms, usual_ms, is_overdue, text)


def is_slow(took_ms: int, recent: Sequence[EndedBatch]) -> bool:
    """Return whether a batch took much longer than the median of `recent`; False if these are too few."""
    if len(recent) < _LEAST:
        return False
    usual_ms = median(batch.took_ms for batch in recent)
    return took_ms > _TIMES * usual_ms and took_ms - usual_ms >= _LONGER_MS


def explanation(state_name: str, batch: EndedBatch, recent: Sequence[EndedBatch], context: BatchContext) -> str:
    """Return a sentence that says where the time of a slow batch went, and why, as far as that is known."""
    usual_ms = median(earlier.took_ms for earlier in recent)
    summary = f"batch {batch.last.version - 1} of {state_name} took {_s(batch.took_ms)} (median {_s(usual_ms)})"
    where = ", ".join(_lost(batch, recent, context)) or "it is not known where its time went"
    reasons = [*_reasons(batch, recent, context)]
    if context.was_lost and "was lost" not in where:
        reasons.insert(0, f"the store actor that had shard {context.shard} was lost")
    reasons[:0] = [text for executor in context.lost_executors if (text := executor.loss_text()) not in where]
    return "; ".join((f"{summary}: {where}", *reasons))


def _lost(batch: EndedBatch, recent: Sequence[EndedBatch], context: BatchContext) -> Iterator[str]:
    """Describe the phases in which most of the time was lost, the largest first."""
    lost_by_phase = {
        phase: (took_ms, took_ms - _usual_phase(recent, index))
        for index, (phase, took_ms) in enumerate(zip(PHASES, batch.phases, strict=True))
        if took_ms is not None
    }
    total_ms = sum(max(0.0, lost_ms) for _, lost_ms in lost_by_phase.values())
    worst = sorted(lost_by_phase.items(), key=lambda item: -item[1][1])[:_NAMED]
    for phase, (took_ms, lost_ms) in worst:
        if lost_ms > _NAMED_SHARE * total_ms:
            yield f"{_s(took_ms)} {_words(phase, took_ms, batch.last, context)}"


def _usual_phase(recent: Sequence[EndedBatch], index: int) -> float:
    durations = [took_ms for batch in recent if (took_ms := batch.phases[index]) is not None]
    return median(durations) if durations else 0.0


def _words(phase: str, took_ms: int, last: CommitEntry, context: BatchContext) -> str:
    shard = f"shard {context.shard}" + (f" on {context.host}" if context.host else "")
    match phase:
        case "spark" if context.was_lost:
            # Tasks that had its lease call the lost store actor first, and wait until there is another.
            return f"before {shard} was asked for again, after its store actor was lost"
        case "spark" if context.lost_executors:
            lost = ", ".join(executor.loss_text() for executor in context.lost_executors)
            return f"in Spark before {shard} was asked: {lost}, and its tasks had to run again"
        case "spark":
            return f"in Spark before {shard} was asked (source, shuffle, waiting for a core)"
        case "lease":
            return f"until the coordinator gave the lease of {shard}"
        case "hand_over":
            return _hand_over(shard, took_ms, last, context)
        case "apply":
            return f"working on {last.rows_in:,} rows in {shard}"
        case "write":
            return f"writing {naturalsize(last.file_bytes)} of {shard} to the object store"
        case "commit":
            return f"until the commit of {shard} was in the state's log"
        case _:
            return "in the sink and at the batch's end"


def _hand_over(shard: str, took_ms: int, last: CommitEntry, context: BatchContext) -> str:
    if last.restore_ms < took_ms / 2:
        return f"handing rows over to {shard} (on their way, or waiting for its threads or memory)"
    action = f"loading {naturalsize(last.load_bytes)}" if last.load_bytes else f"coming to version {last.base_version}"
    if context.was_lost:
        return f"in {shard} {action} after its store actor was lost"
    return f"in {shard} {action}" + (f" after it was moved ({context.move.reason})" if context.move else "")


def _reasons(batch: EndedBatch, recent: Sequence[EndedBatch], context: BatchContext) -> Iterator[str]:
    usual_rows = median(earlier.rows_in for earlier in recent)
    if batch.rows_in > _MANY_ROWS * max(1, usual_rows):
        yield f"it had {batch.rows_in:,} rows (median {usual_rows:,.0f})"
    if batch.last.failures:
        yield f"commits of shard {context.shard} failed before: {_counts(batch.last.failures)}"
    if context.refusals:
        yield f"tasks were refused: {_counts(context.refusals)}"
    if context.storage:
        yield f"the coordinator's requests to the object store: {_counts(context.storage)}"
    memory = context.memory
    if memory is not None and memory.spilled_bytes:
        spilled = f"the store actor of shard {context.shard} has spilled {naturalsize(memory.spilled_bytes)}"
        yield spilled + (f" (limit {naturalsize(memory.memory_limit)})" if memory.memory_limit else "")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count} {'time' if count == 1 else 'times'}" for name, count in sorted(counts.items()))


def _s(took_ms: float) -> str:
    return f"{took_ms / 1000:.1f} s"

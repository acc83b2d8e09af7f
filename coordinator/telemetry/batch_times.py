"""When the parts of a batch began and ended, and how long each phase took. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.model.commits import CommitEntry

#: Phases of a batch, in order.
PHASES = ("spark", "lease", "hand_over", "apply", "write", "commit", "end")


@dataclass(slots=True)
class PartitionTime:
    """Moments of one partition's task, in milliseconds since the epoch.

    Attributes
    ----------
    asked_ms, leased_ms
        When it asked for a lease, and had it; None where the lease came with the commit before.
    counted_ms
        When its commit was in the log; None until then.
    """

    asked_ms: int | None = None
    leased_ms: int | None = None
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

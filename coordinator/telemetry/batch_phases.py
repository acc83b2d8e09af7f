"""Where the time of a batch goes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PHASES", "phases"]

#: Where the time of a batch goes, in order.
PHASES = ("spark", "lease", "hand_over", "apply", "write", "commit", "end")


def phases(batch: Mapping[str, Any]) -> list[int | None]:
    """How long a batch was at what, in milliseconds, in the order of :data:`PHASES`; None for what nobody knows.

    It is the time of the shard that was counted last, which all others had been waited for with:

    - ``spark``: from Spark's plan of the batch until the task asked for a lease, or until the store actor began if nobody asked, as
      the lease came with the commit before: source, Spark's plan, map side, exchange, waiting for a core;
    - ``lease``: the coordinator's answer;
    - ``hand_over``: rows on their way to the store actor, which brings the shard to its version;
    - ``apply``, ``write``: the store actor at the rows, and at the delta file;
    - ``commit``: until the version is in the log;
    - ``end``: until Spark is at the end of the batch, after the sink.

    Clocks of several machines take part: where they disagree, a phase is shorter or longer, and never less than nothing.
    """
    planned, asked, leased = batch.get("planned_ms"), batch.get("asked_ms"), batch.get("leased_ms")
    begun, counted, ended = batch.get("begun_ms"), batch.get("counted_ms"), batch.get("ended_ms")
    apply, write = batch.get("apply_ms"), batch.get("write_ms")
    written = None if None in (begun, apply, write) else begun + apply + write  # type: ignore[operator]
    spark_end = begun if asked is None else asked
    return [
        _between(planned, spark_end),
        _between(asked, leased),
        _between(leased, begun),
        apply,
        write,
        _between(written, counted),
        _between(counted, ended),
    ]


def _between(begin_ms: int | None, end_ms: int | None) -> int | None:
    return None if begin_ms is None or end_ms is None else max(0, end_ms - begin_ms)

"""The rows of the dashboard's tables, from the coordinator's reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.telemetry.batch_times import phases
from statefleet.dashboard.differences import Row

__all__ = ["actor_row", "batch_row", "executor_row", "query_row", "shard_id", "shard_row"]

_QUERY = (
    "name", "query_id", "run_id", "output_mode", "num_shards", "active", "version", "batch_id", "watermark_ms",
    "rows_per_second", "state_rows", "state_bytes", "locality", "rows_late", "last_commit_ms",
)  # fmt: skip
_SHARD = (
    "actor_name", "node_id", "executor", "version", "epoch", "state_rows", "state_bytes", "rows_in",
    "begun_ms", "apply_ms", "write_ms", "counted_ms",
)  # fmt: skip
_BATCH = (
    "batch_id", "version", "planned_ms", "first_begun_ms", "ended_ms", "shards_counted", "rows_in", "rows_late",
    "rows_updated", "rows_removed", "state_rows", "state_bytes", "delta_bytes", "watermark_ms",
    "apply_total_ms", "write_total_ms", "last_shard",
)  # fmt: skip
_EXECUTOR = ("executor_id", "host", "alive", "lost_at_ms", "reason", "is_expected")
_RUNNING = ("batch_id", "running_ms", "is_overdue", "text")
_ACTOR = ("actor_name", "instance_id", "node_id", "host", "pid", "memory_limit", "resident_bytes", "spilled_bytes")


def shard_id(state_name: str, shard: int) -> str:
    """Return the id of a shard's row; a state's name has no slash."""
    return f"{state_name}/{shard}"


def _picked(report: Mapping[str, Any], names: Iterable[str]) -> Row:
    return {name: report.get(name) for name in names}


def executor_row(report: Mapping[str, Any]) -> Row:
    """Return the row of a Spark executor."""
    return _picked(report, _EXECUTOR)


def query_row(report: Mapping[str, Any], running: Mapping[str, Any] | None = None) -> Row:
    """Return the row of a query, without its shards and batches.

    Parameters
    ----------
    running
        Its batch that has been running for some seconds, if there is one.
    """
    rate, locality = report.get("rows_per_second"), report.get("locality")
    return {
        **_picked(report, _QUERY),
        "rows_per_second": None if rate is None else round(rate, 1),
        "locality": None if locality is None else round(locality, 4),
        "running": None if running is None else _picked(running, _RUNNING),
    }


def shard_row(state_name: str, report: Mapping[str, Any]) -> Row:
    """Return the row of a shard. ``locality`` is the share of its state operations whose task ran on its node; None without any."""
    operations = report.get("operations")
    return {
        "state": state_name,
        "shard": report["partition_id"],
        **_picked(report, _SHARD),
        "locality": round(report["operations_local"] / operations, 4) if operations else None,
    }


def batch_row(state_name: str, report: Mapping[str, Any]) -> Row:
    """Return the row of a batch, with its :func:`~coordinator.telemetry.batch_times.phases`."""
    return {"state": state_name, **_picked(report, _BATCH), "phases": phases(report)}


def actor_row(report: Mapping[str, Any], *, answers: bool | None, is_drained: bool) -> Row:
    """Return the row of a store actor.

    Parameters
    ----------
    answers
        Whether it answered the last ping; None if it was not pinged yet.
    """
    alive = bool(report.get("alive")) and answers is not False
    return {**_picked(report, _ACTOR), "alive": alive, "drained": is_drained}

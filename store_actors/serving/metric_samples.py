"""A store actor's statistics as metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.model.memory_options import MemoryUse
from coordinator.model.metric_table import Sample
from store_actors.serving.metrics import StoreMetrics

#: Fields of :class:`~store_actors.serving.metrics.StoreMetrics` by the metrics that they are.
COUNTERS = {
    "statefleet_store_commits_total": "commits",
    "statefleet_written_bytes_total": "bytes_written",
    "statefleet_snapshots_written_total": "snapshots_written",
    "statefleet_loaded_bytes_total": "bytes_loaded",
    "statefleet_loaded_rows_total": "rows_loaded",
    "statefleet_loading_seconds_total": "loading_s",
    "statefleet_loaded_deltas_total": "deltas_loaded",
    "statefleet_loaded_snapshots_total": "snapshots_loaded",
    "statefleet_skipped_snapshots_total": "snapshots_skipped",
    "statefleet_replayed_answers_total": "replayed_answers",
    "statefleet_adopted_commits_total": "adopted_commits",
    "statefleet_rollbacks_total": "rollbacks",
    "statefleet_caught_up_total": "caught_up",
    "statefleet_handed_over_total": "handed_over",
    "statefleet_taken_over_total": "taken_over",
    "statefleet_taken_over_bytes_total": "bytes_taken_over",
    "statefleet_unloaded_shards_total": "shards_unloaded",
    "statefleet_rescaled_from_memory_total": "made_of_memory",
    "statefleet_between_nodes_bytes_total": "bytes_between_nodes",
    "statefleet_standby_commits_total": "followed",
    "statefleet_standby_left_behind_total": "standbys_left_behind",
    "statefleet_read_keys_total": "look_ups",
    "statefleet_read_bytes_total": "bytes_scanned",
    "statefleet_maintenance_failures_total": "maintenance_failures",
}


def store_samples(metrics: StoreMetrics, use: MemoryUse, shards: int, behind: tuple[int, int]) -> Iterator[Sample]:
    """Yield a store actor's statistics as they are now.

    Parameters
    ----------
    use
        What its process has of memory.
    shards
        Those in memory.
    behind
        Commits on their way to its standbys, and their bytes.
    """
    for name, field in COUNTERS.items():
        yield Sample(name, getattr(metrics, field))
    yield Sample("statefleet_store_shards", shards)
    yield Sample("statefleet_store_failing_shards", len(metrics.failing))
    yield Sample("statefleet_memory_resident_bytes", use.resident_bytes)
    yield Sample("statefleet_memory_spilled_bytes", use.spilled_bytes)
    if use.memory_limit is not None:
        yield Sample("statefleet_memory_limit_bytes", use.memory_limit)
    yield Sample("statefleet_standby_behind_commits", behind[0])
    yield Sample("statefleet_standby_behind_bytes", behind[1])

"""Counters of a store actor's work since its process started, and its statistics as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.model.memory_options import MemoryUse
from coordinator.model.metric_table import Sample


@dataclass(slots=True)
class StoreMetrics:
    """Counts of what was read, written and decided."""

    bytes_loaded: int = 0
    #: ``rows_loaded``, ``loading_s``: Rows of the files that were read, and how long shards took to load, one after the other.
    rows_loaded: int = 0
    loading_s: float = 0.0
    deltas_loaded: int = 0
    snapshots_loaded: int = 0
    snapshots_skipped: int = 0
    bytes_written: int = 0
    commits: int = 0
    replayed_answers: int = 0
    adopted_commits: int = 0
    rollbacks: int = 0
    #: Partitions in memory that were brought to a later version by the commits since.
    caught_up: int = 0
    #: ``handed_over``, ``taken_over``: Partitions whose rows were given to another store actor, and taken from one.
    handed_over: int = 0
    taken_over: int = 0
    bytes_taken_over: int = 0
    #: Rows that tasks of operators on other nodes gave and got.
    bytes_between_nodes: int = 0
    #: ``look_ups``, ``bytes_scanned``: Keys that readers looked up, and bytes of rows that they were given in scans.
    look_ups: int = 0
    bytes_scanned: int = 0
    #: Commits of other store actors that were applied to copies here.
    followed: int = 0
    #: Commits that a standby was not sent, as it was lost or had too many to apply.
    standbys_left_behind: int = 0
    snapshots_written: int = 0
    shards_unloaded: int = 0
    #: Shards in memory of whose rows a shard of a rescaled state was made, which then were not read.
    made_of_memory: int = 0
    maintenance_failures: int = 0
    #: ``pieces``, ``piece_rows``, ``folding_s``: Pieces that tasks of continuous queries sent, their rows, and how long it took
    #: to fold them.
    pieces: int = 0
    piece_rows: int = 0
    folding_s: float = 0.0
    #: The longest that a row waited, from its task to its answer, in the last epoch that a continuous query's task ended.
    latency_s: float = 0.0
    #: Shards whose last maintenance failed, by path, and why: their logs and files grow until it succeeds.
    failing: dict[str, str] = field(default_factory=dict)

    def folded(self, rows: int, took_s: float) -> None:
        """Note a piece of rows of a continuous query."""
        self.pieces += 1
        self.piece_rows += rows
        self.folding_s += took_s

    def maintenance_failed(self, path: str, error: Exception) -> None:
        """Note that a shard's round ended with an error."""
        self.maintenance_failures += 1
        self.failing = {**self.failing, path: f"{type(error).__name__}: {error}"}

    def maintenance_succeeded(self, path: str) -> None:
        """Note that a shard's round went well."""
        if path in self.failing:
            self.failing = {failing_path: why for failing_path, why in self.failing.items() if failing_path != path}


#: Fields of :class:`StoreMetrics` by the metrics that they are.
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
    "statefleet_continuous_latency_seconds": "latency_s",
    "statefleet_continuous_pieces_total": "pieces",
    "statefleet_continuous_rows_total": "piece_rows",
    "statefleet_continuous_folding_seconds_total": "folding_s",
}


def store_samples(metrics: StoreMetrics, use: MemoryUse, shards: int, behind: tuple[int, int]) -> Iterator[Sample]:
    """Yield a store actor's statistics as they are now.

    Parameters
    ----------
    behind
        Commits on their way to its standbys, and their bytes.
    """
    for name, attribute in COUNTERS.items():
        yield Sample(name, getattr(metrics, attribute))
    yield Sample("statefleet_store_shards", shards)
    yield Sample("statefleet_store_failing_shards", len(metrics.failing))
    yield Sample("statefleet_memory_resident_bytes", use.resident_bytes)
    yield Sample("statefleet_memory_spilled_bytes", use.spilled_bytes)
    if use.memory_limit is not None:
        yield Sample("statefleet_memory_limit_bytes", use.memory_limit)
    yield Sample("statefleet_standby_behind_commits", behind[0])
    yield Sample("statefleet_standby_behind_bytes", behind[1])

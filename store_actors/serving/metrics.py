"""Counters of a store actor's work since its process started."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StoreMetrics:
    """Counts of what was read, written and decided.

    Attributes
    ----------
    rows_loaded, loading_s
        Rows of the files that were read, and how long shards took to load, one after the other.
    caught_up
        Partitions in memory that were brought to a later version by the commits since.
    handed_over, taken_over
        Partitions whose rows were given to another store actor, and taken from one.
    bytes_between_nodes
        Rows that tasks of operators on other nodes gave and got.
    look_ups, bytes_scanned
        Keys that readers looked up, and bytes of rows that they were given in scans.
    followed
        Commits of other store actors that were applied to copies here.
    made_of_memory
        Shards in memory of whose rows a shard of a rescaled state was made, which then were not read.
    standbys_left_behind
        Commits that a standby was not sent, as it was lost or had too many to apply.
    failing
        Shards whose last maintenance failed, by path, and why: their logs and files grow until it succeeds.
    """

    bytes_loaded: int = 0
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
    caught_up: int = 0
    handed_over: int = 0
    taken_over: int = 0
    bytes_taken_over: int = 0
    bytes_between_nodes: int = 0
    look_ups: int = 0
    bytes_scanned: int = 0
    followed: int = 0
    standbys_left_behind: int = 0
    snapshots_written: int = 0
    shards_unloaded: int = 0
    made_of_memory: int = 0
    maintenance_failures: int = 0
    failing: dict[str, str] = field(default_factory=dict)

    def maintenance_failed(self, path: str, error: Exception) -> None:
        """Note that a shard's round ended with an error."""
        self.maintenance_failures += 1
        self.failing = {**self.failing, path: f"{type(error).__name__}: {error}"}

    def maintenance_succeeded(self, path: str) -> None:
        """Note that a shard's round went well."""
        if path in self.failing:
            self.failing = {failing_path: why for failing_path, why in self.failing.items() if failing_path != path}

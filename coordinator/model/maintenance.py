"""Options of the maintenance of a fleet's state: when snapshots are made, and what is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from coordinator.model.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Maintenance:
    """When snapshots are made and what is kept, with Spark's names and defaults where Spark has them.

    Attributes
    ----------
    interval_s
        Seconds between rounds of maintenance (``spark.sql.streaming.stateStore.maintenanceInterval``).
    min_deltas_for_snapshot
        Deltas since the last snapshot that make a new one due (``..stateStore.minDeltasForSnapshot``). A shard with more than 1 MiB in
        memory waits until their files have a quarter of that, for ten rounds at most.
    min_versions_to_retain
        Newest versions that stay readable (``spark.sql.streaming.minBatchesToRetain``).
    retain_s
        Seconds for which every version stays readable, beside the newest ones; for continuous queries, whose versions are many.
    grace_s
        Seconds that a file which no manifest names is left alone: it may belong to a commit on its way.
    unload_after_s
        Seconds after which the shards of a query that has ended, or whose driver was killed, leave the store actors' memory; its ledger
        leaves the coordinator's once there is nothing more to clean. They are in the object store, and are read again when the query is
        started.
    """

    interval_s: float = 60.0
    min_deltas_for_snapshot: int = 10
    min_versions_to_retain: int = 100
    retain_s: float = 0.0
    grace_s: float = 3600.0
    unload_after_s: float = 3600.0

    def __post_init__(self) -> None:
        # A batch is replayed on the version before its own, so one version is not enough; and a grace period shorter than a
        # commit takes would refuse every commit.
        if (
            self.interval_s <= 0
            or self.min_deltas_for_snapshot < 1
            or self.min_versions_to_retain < 2
            or self.retain_s < 0
            or self.grace_s < 1
            or self.unload_after_s < 0
        ):
            raise InvalidRequestError(
                "maintenance needs interval_s > 0, min_deltas_for_snapshot >= 1, min_versions_to_retain >= 2, retain_s >= 0, "
                "grace_s >= 1 and unload_after_s >= 0",
                **asdict(self),
            )

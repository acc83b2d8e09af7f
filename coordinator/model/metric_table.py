"""Every metric that a fleet exports: the one table of names, kinds, labels and meanings. Pure.

Users' dashboards and alerts depend on names, kinds and labels: metrics are added to the table, and present ones are not changed.
Labels have few values: one of a shard, a key, a run, a version or a batch would make a time series of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: The label that every metric has: of which fleet of the Ray cluster it is.
FLEET = "fleet"
#: Upper bounds of the histogram of batches, in seconds.
BATCH_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Kind(StrEnum):
    """Kinds of metric, as Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric."""

    #: As the fleet gives it to Ray, which puts ``ray_`` before it.
    name: str
    kind: Kind
    meaning: str
    #: Beside :data:`FLEET`, and those of Ray.
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric."""

    name: str
    #: Of a counter the sum since the counting process started; of a histogram one observation.
    value: float
    #: In the order of the metric's.
    labels: tuple[str, ...] = ()


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"statefleet_{name}_total", Kind.COUNTER, meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"statefleet_{name}", Kind.GAUGE, meaning, labels)


#: Every metric, in the order in which they are documented.
METRICS = (
    # Of the coordinator.
    _gauge("store_actors", "Store actors by `condition`: `alive`, or `lost` and not back yet", "condition"),
    _gauge("coordinator_start_timestamp_seconds", "When the coordinator started"),
    _counter("executors_lost", "Executors that were lost, as drivers reported; not those that were ended on purpose"),
    _gauge("state_rows", "Rows of the state", "state"),
    _gauge("state_bytes", "Bytes of the state, in memory or spilled", "state"),
    _gauge("state_shards", "Shards", "state"),
    _gauge("state_shards_lost", "Shards whose store actor is lost, and which no other has taken over yet", "state"),
    _gauge("state_active", "1 while a run of the query goes on, else 0", "state"),
    _gauge("state_version", "Newest version that all shards have", "state"),
    _gauge("watermark_timestamp_seconds", "Watermark of the query, if it has one", "state"),
    _gauge("last_commit_timestamp_seconds", "Time of the newest commit", "state"),
    _counter("commits", "Commits of shards", "state"),
    _counter("rows_in", "Input rows of the shards, late ones included", "state"),
    _counter("rows_late", "Late rows, which were dropped", "state"),
    _counter("rows_updated", "Rows of state that were created or changed", "state"),
    _counter("rows_removed", "Rows of state that were removed", "state"),
    _counter("delta_bytes", "Bytes of delta files", "state"),
    _counter("batches", "Batches that ended, sink included", "state"),
    _counter("slow_batches", "Batches that took much longer than usual; the coordinator's log says why", "state"),
    _gauge(
        "behind_records",
        "Records of Kafka that were not read, of the partition that has most, by Spark's newest progress",
        "state",
    ),
    _gauge("batch_overdue_seconds", "How long an overdue batch has been running; 0 if none is overdue", "state"),
    Metric(
        "statefleet_batch_seconds",
        Kind.HISTOGRAM,
        "Duration of batches, from Spark's plan to the end of the sink",
        ("state",),
    ),
    _counter(
        "batch_phase_seconds", "Duration of batches by `phase`, of the shard that committed last", "state", "phase"
    ),
    _counter(
        "leases",
        "State operations by `place` of their task: `local` to the shard, or why not (`moved`, `no_executor`, `elsewhere`, `unplaced`)",
        "state",
        "place",
    ),
    _counter(
        "moves",
        "Shards that went to another store actor, by `kind`: `move` from a live one, `recovery` after a loss, `failed`",
        "state",
        "kind",
    ),
    _counter("refusals", "Refused leases and commits, by `error`", "state", "error"),
    _counter("snapshots", "Snapshots in the log", "state"),
    _counter("deleted_files", "Files that no version needed, and that were deleted", "state"),
    _counter("deleted_bytes", "Bytes of deleted files", "state"),
    _counter("cleaning_failures", "Failed cleaning rounds", "state"),
    # Of each store actor.
    _gauge("store_shards", "Shards in memory, copies of standbys included"),
    _gauge("store_failing_shards", "Shards whose last maintenance failed: their logs and files grow"),
    _gauge("memory_resident_bytes", "Memory of the process, without Ray's shared object store"),
    _gauge("memory_limit_bytes", "Memory limit of the process, if it has one"),
    _gauge("memory_spilled_bytes", "Bytes of state that were spilled to the node's disk"),
    _gauge("standby_behind_commits", "Commits that standbys of this store actor's shards do not have yet"),
    _gauge("standby_behind_bytes", "Bytes of commits that standbys do not have yet"),
    _counter("store_commits", "Commits that this store actor made"),
    _counter("written_bytes", "Bytes of written deltas and snapshots"),
    _counter("snapshots_written", "Snapshots that were written"),
    _counter("loaded_bytes", "Bytes of files that were read to load shards, and for readers"),
    _counter("loaded_rows", "Rows of files that were read"),
    _counter("loading_seconds", "Total time of loading shards"),
    _counter("loaded_deltas", "Deltas that were read"),
    _counter("loaded_snapshots", "Snapshots that were read"),
    _counter("skipped_snapshots", "Damaged or missing snapshots that older files replaced"),
    _counter("replayed_answers", "Repeated tasks that got the rows of the first attempt"),
    _counter("adopted_commits", "Commits of another attempt that this store actor adopted"),
    _counter("rollbacks", "Shards in memory that were rolled back to an earlier version"),
    _counter("caught_up", "Shards in memory that were brought to a later version by deltas"),
    _counter("handed_over", "Shards whose rows were copied to another store actor"),
    _counter("taken_over", "Shards whose rows were copied from another store actor"),
    _counter("taken_over_bytes", "Bytes of rows that were copied from another store actor"),
    _counter("unloaded_shards", "Shards unloaded because another store actor owns them"),
    _counter("rescaled_from_memory", "Shards in memory from which a rescale made others without reading files"),
    _gauge(
        "continuous_latency_seconds",
        "Longest wait of a row of the last epoch of a continuous query, from its task to its answer",
    ),
    _counter("continuous_pieces", "Pieces of rows that tasks of continuous queries sent"),
    _counter("continuous_rows", "Rows of these pieces"),
    _counter("continuous_folding_seconds", "Total time of folding them, waits for a shard included"),
    _counter("between_nodes_bytes", "Bytes of rows that were sent to and from tasks on other nodes"),
    _counter("standby_commits", "Commits that were applied to copies of standbys"),
    _counter("standby_left_behind", "Commits that a standby was not sent: it is lost, or too far behind"),
    _counter("read_keys", "Keys that readers looked up"),
    _counter("read_bytes", "Bytes of rows that readers got in scans"),
    _counter("maintenance_failures", "Failed snapshots and ownership checks"),
    # Of the object store, as each of these processes sees it.
    _counter(
        "object_store_requests",
        "Requests by `operation`, of the `process` (`coordinator` or `store_actor`)",
        "process",
        "operation",
    ),
    _counter("object_store_seconds", "Total time of requests, repetitions included", "process", "operation"),
    _counter("object_store_errors", "Requests that failed in the end, by `error`", "process", "operation", "error"),
    _counter("object_store_retries", "Repeated conditional puts; what obstore repeats is not counted", "process"),
    _counter("object_store_read_bytes", "Bytes that were read", "process"),
    _counter("object_store_written_bytes", "Bytes that were written", "process"),
    # Of the dashboard.
    _counter("dashboard_failed_looks", "Requests for the fleet's status that failed"),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


def metric_of(name: str) -> Metric:
    """Return the metric of a name; KeyError if there is none."""
    return _BY_NAME[name]

"""Spark's executors as its driver knows them, and requests to RayDP for more.

RayDP 1.6.5 by itself restarts an executor only if its master saw the connection break, and never runs more than it began with. It
does start the executors that are requested through Spark's own interface for cluster managers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from coordinator.telemetry.drivers import DriverReport, ExecutorState, LongBatch
from spark_jobs.plan.catalyst import java_class, optional, scala_list, scala_seq
from spark_jobs.plan.spark_version import SPARK

#: Milliseconds for which a lost executor is reported.
_REPORT_LOST_MS = 600_000
#: Milliseconds after which a batch is reported as long.
_LONG_MS = 3000
#: Beginning of Spark's reason for an executor that was ended on request.
_ENDED_ON_REQUEST = "Executor killed by driver"


@dataclass(frozen=True, slots=True)
class Executor:
    """A living executor."""

    executor_id: str
    #: Address of its Ray node.
    host: str


class Executors:
    """The executors of one Spark application on RayDP."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._context = spark.sparkContext._jsc.sc()
        self._forgotten: set[str] = set()
        self._ended: set[str] = set()

    def has_ended(self) -> bool:
        try:
            return bool(self._context.isStopped())
        except (Py4JError, OSError):  # its JVM has ended
            return True

    def setting(self, name: str, otherwise: str) -> str:
        return str(self._context.conf().get(name, otherwise))

    def memory_mb(self) -> int:
        """Return the memory of each executor in MiB, as RayDP requests it of Ray."""
        return int(self._context.executorMemory())

    def present(self) -> list[Executor]:
        return [
            Executor(summary.id(), _host(summary.hostPort()))
            for summary in scala_list(self._context.statusStore().executorList(True))
            if summary.id() != "driver"
        ]

    def request(self, count: int) -> None:
        """Have RayDP start more executors, each with the resources of the first ones."""
        # RayDP still counts executors whose loss only Spark noticed, for example behind a broken link.
        self._forget(self._lost())
        no_localities = java_class("org.apache.spark.api.python.PythonUtils").toScalaMap({})
        self._context.requestTotalExecutors(len(self.present()) + count, 0, no_localities)

    def end(self, executor_ids: Sequence[str]) -> None:
        """End executors for good; Spark runs their tasks again on others."""
        self._context.killExecutors(scala_seq(executor_ids))
        self._forgotten.update(executor_ids)
        self._ended.update(executor_ids)

    def lose(self, executor_ids: Sequence[str], why: str) -> None:
        """Have Spark treat executors as lost at once, as it does itself after a long silence."""
        no_exit_code = java_class("scala.Option").empty()
        reason = java_class("org.apache.spark.scheduler.ExecutorProcessLost")(why, no_exit_code, False)
        message = java_class("org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages$RemoveExecutor")
        for executor_id in executor_ids:
            self._context.schedulerBackend().driverEndpoint().send(message(executor_id, reason))

    def report(self, now_ms: int) -> DriverReport:
        """Return a report of all executors, recently lost ones included, and of the batches that have been running for some seconds."""
        active = self._spark._jsparkSession.sharedState().activeStreamingQueries().entrySet().toArray()
        # Not by iteration, whose end PySpark notices by an exception of the JVM: 50 lookups of classes for each report.
        queries = [active[index].getValue() for index in range(len(active))]
        return DriverReport(
            str(self._context.applicationId()),
            tuple(self._states(now_ms)),
            tuple(query.runId().toString() for query in queries),
            tuple(batch for query in queries if (batch := self._long_batch(query, now_ms)) is not None),
            tuple((query.runId().toString(), records) for query in queries if (records := _behind(query)) is not None),
        )

    def _states(self, now_ms: int) -> Iterator[ExecutorState]:
        for summary in scala_list(self._context.statusStore().executorList(False)):
            executor_id, host = summary.id(), _host(summary.hostPort())
            if executor_id == "driver":
                continue
            if summary.isActive():
                yield ExecutorState(executor_id, host)
                continue
            removed, reason = optional(summary.removeTime()), optional(summary.removeReason()) or ""
            lost_at_ms = now_ms if removed is None else int(removed.getTime())
            if now_ms - lost_at_ms < _REPORT_LOST_MS:
                is_expected = executor_id in self._ended or reason.startswith(_ENDED_ON_REQUEST)
                yield ExecutorState(
                    executor_id, host, lost_at_ms, reason.splitlines()[0] if reason else "", is_expected
                )

    def _long_batch(self, query: Any, now_ms: int) -> LongBatch | None:
        """Return a query's current batch if it has been running for some seconds."""
        status = query.status()
        batch_id, planned_ms = SPARK.current_batch(query)
        running_ms = now_ms - planned_ms
        if not status.isTriggerActive() or not status.isDataAvailable() or running_ms < _LONG_MS:
            return None
        run_id = query.runId().toString()
        return LongBatch(run_id, batch_id, running_ms, self._activity(run_id))

    def _activity(self, run_id: str) -> str:
        tracker = self._spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(run_id)]
        stage_ids = sorted(
            {stage for job in jobs if job is not None and job.status == "RUNNING" for stage in job.stageIds}
        )
        for stage in filter(None, map(tracker.getStageInfo, stage_ids)):
            waiting = stage.numTasks - stage.numCompletedTasks - stage.numActiveTasks
            if stage.numCompletedTasks < stage.numTasks and (stage.numActiveTasks or stage.numCompletedTasks):
                failed = f", {stage.numFailedTasks} failed and repeated" if stage.numFailedTasks else ""
                cores = f", {waiting} waiting for a core" if waiting else ""
                return (
                    f"{stage.numCompletedTasks} of {stage.numTasks} tasks of Spark's stage {stage.stageId} are done, "
                    f"{stage.numActiveTasks} running{cores}{failed}"
                )
        return (
            "Spark's tasks wait for a core"
            if stage_ids
            else "Spark runs no task: the source, the plan or the sink is at work"
        )

    def _lost(self) -> list[str]:
        summaries = scala_list(self._context.statusStore().executorList(False))
        return [summary.id() for summary in summaries if not summary.isActive() and summary.id() not in self._forgotten]

    def _forget(self, executor_ids: Sequence[str]) -> None:
        if executor_ids:
            # Not Spark's own `killExecutors`, which passes on only executors that it still knows.
            self._context.schedulerBackend().doKillExecutors(scala_seq(executor_ids))
            self._forgotten.update(executor_ids)


def _behind(query: Any) -> int | None:
    """Return how many records the partition of a query's sources that is furthest behind is, as its newest progress has it."""
    progress = query.lastProgress()
    told = [] if progress is None else [source.metrics().get("maxOffsetsBehindLatest") for source in progress.sources()]
    return max((int(records) for records in told if records is not None), default=None)


def _host(host_port: str) -> str:
    host, _, port = host_port.rpartition(":")
    return host or port  # an executor that has just joined has no port yet

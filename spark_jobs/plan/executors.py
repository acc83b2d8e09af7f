"""Spark's executors as its driver knows them, and how RayDP is asked for others.

RayDP 1.6.5 starts an executor anew by itself only if its master saw the connection break, and never one more than it began with.
What it is asked for through Spark's own interface for cluster managers it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from coordinator.telemetry.drivers import DriverReport, ExecutorState, LongBatch
from spark_jobs.plan.catalyst import java_class, optional, scala_list, scala_seq

__all__ = ["Executor", "Executors"]

#: Milliseconds for which a lost executor is reported.
_LOST_SHOWN_MS = 600_000
#: Milliseconds after which a batch is reported as one that takes long.
_LONG_MS = 3000
#: How Spark's own reason begins where somebody asked for the end of an executor.
_ASKED_FOR = "Executor killed by driver"


@dataclass(frozen=True, slots=True)
class Executor:
    """A living executor.

    Attributes
    ----------
    host
        Address of its Ray node.
    """

    executor_id: str
    host: str


class Executors:
    """Those of one Spark application on RayDP.

    Parameters
    ----------
    spark
        A session of it.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._context = spark.sparkContext._jsc.sc()
        self._forgotten: set[str] = set()
        self._ended: set[str] = set()

    def is_over(self) -> bool:
        """Whether the application has ended."""
        try:
            return bool(self._context.isStopped())
        except (Py4JError, OSError):  # its JVM has ended
            return True

    def setting(self, name: str, otherwise: str) -> str:
        """One of the application's settings."""
        return str(self._context.conf().get(name, otherwise))

    def memory_mb(self) -> int:
        """Memory of each executor, as RayDP asks Ray for it."""
        return int(self._context.executorMemory())

    def present(self) -> list[Executor]:
        """Those that live."""
        return [
            Executor(one.id(), _host(one.hostPort()))
            for one in scala_list(self._context.statusStore().executorList(True))
            if one.id() != "driver"
        ]

    def ask_for(self, more: int) -> None:
        """Have RayDP start some more, each with the resources of the first ones."""
        # RayDP counts those whose loss only Spark noticed, as behind a link that is down, as if they were there.
        self._forget(self._lost())
        nothing = java_class("org.apache.spark.api.python.PythonUtils").toScalaMap({})
        self._context.requestTotalExecutors(len(self.present()) + more, 0, nothing)

    def end(self, executor_ids: Sequence[str]) -> None:
        """End some for good; Spark runs again elsewhere what they were at."""
        self._context.killExecutors(scala_seq(executor_ids))
        self._forgotten.update(executor_ids)
        self._ended.update(executor_ids)

    def lose(self, executor_ids: Sequence[str], why: str) -> None:
        """Have Spark take some for lost at once, as it does itself when nothing was heard of them for long."""
        nothing = java_class("scala.Option").empty()
        reason = java_class("org.apache.spark.scheduler.ExecutorProcessLost")(why, nothing, False)
        message = java_class("org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages$RemoveExecutor")
        for executor_id in executor_ids:
            self._context.schedulerBackend().driverEndpoint().send(message(executor_id, reason))

    def report(self, now_ms: int) -> DriverReport:
        """All of them, those that were lost lately included, and the batches that have been running for some seconds.

        Parameters
        ----------
        now_ms
            Milliseconds since the epoch.
        """
        queries = list(self._spark._jsparkSession.sharedState().activeStreamingQueries().values())
        return DriverReport(
            str(self._context.applicationId()),
            tuple(self._states(now_ms)),
            tuple(query.runId().toString() for query in queries),
            tuple(batch for query in queries if (batch := self._long_batch(query, now_ms)) is not None),
        )

    def _states(self, now_ms: int) -> Iterator[ExecutorState]:
        for one in scala_list(self._context.statusStore().executorList(False)):
            executor_id, host = one.id(), _host(one.hostPort())
            if executor_id == "driver":
                continue
            if one.isActive():
                yield ExecutorState(executor_id, host)
                continue
            removed, reason = optional(one.removeTime()), optional(one.removeReason()) or ""
            lost_at_ms = now_ms if removed is None else int(removed.getTime())
            if now_ms - lost_at_ms < _LOST_SHOWN_MS:
                is_expected = executor_id in self._ended or reason.startswith(_ASKED_FOR)
                yield ExecutorState(
                    executor_id, host, lost_at_ms, reason.splitlines()[0] if reason else "", is_expected
                )

    def _long_batch(self, query: Any, now_ms: int) -> LongBatch | None:
        """A query's batch at hand, if it has been running for some seconds."""
        status = query.status()
        running_ms = now_ms - int(query.offsetSeqMetadata().batchTimestampMs())
        if not status.isTriggerActive() or not status.isDataAvailable() or running_ms < _LONG_MS:
            return None
        run_id = query.runId().toString()
        return LongBatch(run_id, int(query.currentBatchId()), running_ms, self._waits_for(run_id))

    def _waits_for(self, run_id: str) -> str:
        """What a run's jobs are at, in words."""
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
        known = scala_list(self._context.statusStore().executorList(False))
        return [one.id() for one in known if not one.isActive() and one.id() not in self._forgotten]

    def _forget(self, executor_ids: Sequence[str]) -> None:
        if executor_ids:
            # Not Spark's own `killExecutors`: that passes on none that it does not know any more.
            self._context.schedulerBackend().doKillExecutors(scala_seq(executor_ids))
            self._forgotten.update(executor_ids)


def _host(host_port: str) -> str:
    host, _, port = host_port.rpartition(":")
    return host or port  # one that has just come has no port yet

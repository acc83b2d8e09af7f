"""Spark's executors as its driver knows them, and how RayDP is asked for others.

RayDP 1.6.5 starts an executor anew by itself only if its master saw the connection break, and never one more than it began with.
What it is asked for through Spark's own interface for cluster managers it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from spark_jobs.plan.catalyst import java_class, scala_list, scala_seq

__all__ = ["Executor", "Executors"]


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
        self._context = spark.sparkContext._jsc.sc()
        self._forgotten: set[str] = set()

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

    def lose(self, executor_ids: Sequence[str], why: str) -> None:
        """Have Spark take some for lost at once, as it does itself when nothing was heard of them for long."""
        nothing = java_class("scala.Option").empty()
        reason = java_class("org.apache.spark.scheduler.ExecutorProcessLost")(why, nothing, False)
        message = java_class("org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages$RemoveExecutor")
        for executor_id in executor_ids:
            self._context.schedulerBackend().driverEndpoint().send(message(executor_id, reason))

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

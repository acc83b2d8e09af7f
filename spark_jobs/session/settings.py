"""Spark's settings that :func:`~spark_jobs.session.spark_session.start_session` makes, each with its reason."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "CLUSTER_SETTINGS",
    "EXECUTOR_RESOURCES",
    "HEAD_SETTINGS",
    "LOCAL_SETTINGS",
    "MAX_EXECUTORS",
    "MAX_EXECUTORS_WHY",
    "SETTINGS",
    "STORE_RESOURCE",
    "STORE_SETTINGS",
    "Setting",
]


class Setting(NamedTuple):
    """A value, and why it is that."""

    value: str
    why: str


_LOOPBACK = "127.0.0.1"
#: Resource of which each node offers 1 that may have executors and store actors.
STORE_RESOURCE = "statefleet_store"
#: Spark's setting, up to the name of a resource, of what RayDP asks Ray for with each executor.
EXECUTOR_RESOURCES = "spark.ray.raydp_spark_executor.actor.resource."
#: Spark's setting of how many executors there are at most, as nodes join; by default as many as at first.
MAX_EXECUTORS = "spark.statefleet.maxExecutors"
MAX_EXECUTORS_WHY = "executors at most, as nodes join; `start_session(max_executors=)` sets it"

#: Of every session.
SETTINGS = MappingProxyType(
    {
        "spark.ui.enabled": Setting(
            "false", "Spark would serve its pages on all addresses of the machine, to everybody"
        ),
        "spark.ui.showConsoleProgress": Setting("false", "its bars would be written over what a program prints"),
        "spark.python.worker.reuse": Setting("true", "a Python worker connects to the fleet once, not in each task"),
        "spark.python.daemon.module": Setting(
            "spark_jobs.worker.daemon", "Python workers are forked from a process that has all code loaded already"
        ),
        "spark.sql.session.timeZone": Setting("UTC", "times without a zone mean the same on every machine"),
        "spark.sql.execution.arrow.maxRecordsPerBatch": Setting(
            "16384", "fewer, larger Arrow batches between the JVM and Python"
        ),
        "spark.sql.legacy.timeParserPolicy": Setting(
            "CORRECTED", "a date that Spark 2 would have read differently is a malformed one, not the end of the query"
        ),
        "spark.sql.adaptive.enabled": Setting("false", "streaming turns it off anyway, with a warning each time"),
        "spark.log4j.config.file.name": Setting(
            str(Path(__file__).with_name("log4j2.properties")), "RayDP's default names a file that does not exist"
        ),
    }
)
#: Where Ray was started by this process.
LOCAL_SETTINGS = MappingProxyType(
    {
        "spark.driver.host": Setting(_LOOPBACK, "RayDP would open the driver's ports to the network"),
        "spark.driver.bindAddress": Setting(_LOOPBACK, "as above"),
    }
)
#: Where there are several nodes.
CLUSTER_SETTINGS = MappingProxyType(
    {
        "spark.network.timeout": Setting(
            "40s",
            "a node that is cut off is given up after 40 to 50 s; by default after two minutes, in which no batch ends. Where Ray is "
            "faster, Spark is told",
        ),
        "spark.network.timeoutInterval": Setting("10s", "how often that is looked at"),
        "spark.executor.heartbeatInterval": Setting("5s", "has to be well below the timeout"),
        "spark.locality.wait": Setting(
            "1s",
            "an idle executor does not take a task from the node of its shard ([performance.md](performance.md#where-tasks-run))",
        ),
        "spark.shuffle.io.retryWait": Setting(
            "500ms",
            "a task that was fetching from an executor as its node was killed tries for 3 s, not for 15, before the part of the batch "
            "that is gone is done again",
        ),
        "spark.shuffle.io.maxRetries": Setting("6", "as above"),
    }
)
#: Where there are several nodes and one of them is known to be the head, up to the name of the head's resource.
HEAD_SETTINGS = MappingProxyType(
    {
        "spark.ray.raydp_spark_master.actor.resource.": Setting(
            "0.001",
            "RayDP's master owns the executors: the node that it is lost with should be the one that Ray is lost with",
        ),
        "spark.ray.raydp_spark_master.actor.resource.CPU": Setting("0", "the head offers no CPU"),
    }
)
#: Where nodes offer ``statefleet_store``, enough for the executors that are asked for.
STORE_SETTINGS = MappingProxyType(
    {
        f"{EXECUTOR_RESOURCES}{STORE_RESOURCE}": Setting(
            "1", "one executor a node: two of one node would share its store actor, and leave another node idle"
        ),
        "spark.ray.raydp_app_master.extraJavaOptions": Setting(
            "-Dspark.executor.instances=0",
            "RayDP's master starts no more than that many executors in all its life, however many it lost; by default as many as the "
            "driver asked for",
        ),
    }
)

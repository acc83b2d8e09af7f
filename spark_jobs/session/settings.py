"""The Spark settings of :func:`~spark_jobs.session.spark_session.start_session`, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Setting(NamedTuple):
    """A value, the reason for it, and the value with Spark 4 if that is another one."""

    value: str
    why: str
    with_spark_4: str | None = None


_LOOPBACK = "127.0.0.1"
_STREAMING = "org.apache.spark.sql.execution.streaming"
#: Resource of which each node that may have executors and store actors offers 1.
STORE_RESOURCE = "statefleet_store"
#: Prefix of Spark's setting, before the name of a resource, for the amount that RayDP requests of Ray with each executor.
EXECUTOR_RESOURCES = "spark.ray.raydp_spark_executor.actor.resource."
#: Setting for the maximum number of executors, as nodes join; by default the number at first.
MAX_EXECUTORS = "spark.statefleet.maxExecutors"
MAX_EXECUTORS_WHY = "executors at most, as nodes join; `start_session(max_executors=)` sets it"

#: For every session.
SETTINGS: Mapping[str, Setting] = {
    "spark.ui.enabled": Setting("false", "Spark would serve its pages on all addresses of the machine, to everybody"),
    "spark.sql.ui.explainMode": Setting(
        "simple",
        "Spark writes the plan of each batch as text for its pages; by default with a paragraph for each node",
    ),
    "spark.ui.showConsoleProgress": Setting("false", "its bars would be written over what a program prints"),
    "spark.python.worker.reuse": Setting("true", "a Python worker connects to the fleet once, not in each task"),
    "spark.python.daemon.module": Setting(
        "statefleet.worker_daemon", "Python workers are forked from a process that has all code loaded already"
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
#: If this process started Ray.
LOCAL_SETTINGS: Mapping[str, Setting] = {
    "spark.driver.host": Setting(_LOOPBACK, "RayDP would open the driver's ports to the network"),
    "spark.driver.bindAddress": Setting(_LOOPBACK, "as above"),
    "spark.sql.streaming.checkpointFileManagerClass": Setting(
        f"{_STREAMING}.FileSystemBasedCheckpointFileManager",
        "Spark's default starts a process for each look at a link of a local disk; this one writes a file under another name and "
        "renames it as the default does",
        with_spark_4=f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager",
    ),
    "spark.hadoop.fs.file.impl": Setting(
        "org.apache.spark.sql.statefleet.LocalFiles",
        "Hadoop starts processes for the permissions of each file that it writes, where its native library is not there",
    ),
}
#: If there are several nodes.
CLUSTER_SETTINGS: Mapping[str, Setting] = {
    "spark.network.timeout": Setting(
        "40s",
        "a node that is cut off is given up after 40 to 50 s; by default after two minutes, in which no batch ends. Where Ray is "
        "faster, the fleet reports the loss to Spark",
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
#: If there are several nodes and the head is known; a name that ends with a dot is a prefix of the head's resource.
HEAD_SETTINGS: Mapping[str, Setting] = {
    "spark.ray.raydp_spark_master.actor.resource.": Setting(
        "0.001",
        "RayDP's master owns the executors: the node that it is lost with should be the one that Ray is lost with",
    ),
    "spark.ray.raydp_spark_master.actor.resource.CPU": Setting("0", "the head offers no CPU"),
}
#: If nodes offer enough ``statefleet_store`` for the requested executors.
STORE_SETTINGS: Mapping[str, Setting] = {
    f"{EXECUTOR_RESOURCES}{STORE_RESOURCE}": Setting(
        "1", "one executor a node: two of one node would share its store actor, and leave another node idle"
    ),
    "spark.ray.raydp_app_master.extraJavaOptions": Setting(
        "-Dspark.executor.instances=0",
        "RayDP's master starts no more than that many executors in all its life, however many it lost; by default as many as the "
        "driver asked for",
    ),
}


def is_on_ray(master: str) -> bool:
    """Return whether a session's executors are Ray actors of RayDP."""
    # RayDP's own scheme; `raydp-submit` has only the word.
    return master == "ray" or master.startswith("ray://")

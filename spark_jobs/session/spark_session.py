"""Ray and a Spark session on it through RayDP: on a laptop, inside ``ray job submit`` and under ``raydp-submit``."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyspark
import ray
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from coordinator.model.errors import InvalidRequestError, SetupError
from coordinator.runtime.extras import import_extra
from coordinator.runtime.native_notes import stderr_without_notes
from coordinator.service.calls import session_folder
from coordinator.service.deploy import HEAD_RESOURCE, init_ray, join_cluster
from spark_jobs.jvm.build import present_jar
from spark_jobs.jvm.spark_lines import line_of
from spark_jobs.session.java import choose_java_home
from spark_jobs.session.settings import (
    CLUSTER_SETTINGS,
    HEAD_SETTINGS,
    LOCAL_SETTINGS,
    MAX_EXECUTORS,
    SETTINGS,
    STORE_RESOURCE,
    STORE_SETTINGS,
    Setting,
)
from spark_jobs.session.spark_connect import check_no_remote

log = logging.getLogger(__name__)

#: Address of a local Ray, for this machine alone. Ray replaces 127.0.0.1 by the network's address; on other systems it uses the
#: loopback by itself.
_LOOPBACK = "127.0.0.9" if sys.platform == "linux" else None

_PACKAGES = "spark.jars.packages"

#: RayDP's settings for what stands before its own jars on the class paths of the driver, and of executors.
_CLASS_PATHS = ("spark.preferClassPath", "spark.ray.preferClassPath")

#: How often a local Ray is started: on a machine with much else to do its agent may miss the deadline that Ray has for it.
_STARTS = 2

_started_ray = False


@contextmanager
def spark_environment() -> Iterator[None]:
    """Set Java and Python for Spark's processes, in the environment of processes that are started within.

    The program's own environment is restored afterwards.

    Raises
    ------
    SetupError
        No Java 17 can be used.
    """
    home = choose_java_home(os.environ)
    with child_environment(
        JAVA_HOME=str(home),
        # RayDP's master and Ray's Java workers run the first `java` on PATH and ignore JAVA_HOME.
        PATH=_with_first("PATH", str(home / "bin")),
        # Executors take the worker's interpreter from the environment; spark.pyspark.python does not reach them.
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_DRIVER_PYTHON=sys.executable,
        # Actors and Spark's workers import this project's packages from where the driver did.
        PYTHONPATH=_with_first("PYTHONPATH", str(Path(__file__).resolve().parents[2])),
        # A new local cluster needs no idle workers: actors have their own.
        RAY_prestart_worker_first_driver="0",
        # Ray has workers give way to all other programs of the machine (15): executors and store actors would wait for them.
        RAY_worker_niceness=os.environ.get("RAY_worker_niceness", "0"),  # noqa: SIM112 - Ray's own name
    ):
        yield


@contextmanager
def child_environment(**variables: str) -> Iterator[None]:
    """Set variables for the processes that are started within."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _with_first(variable: str, folder: str) -> str:
    entries = [entry for entry in os.environ.get(variable, "").split(os.pathsep) if entry and entry != folder]
    return os.pathsep.join([folder, *entries])


def ensure_ray(*, ray_address: str | None = None, num_cpus: int | None = None) -> None:
    """Join the Ray cluster around this process, or start a local one.

    Raises
    ------
    SetupError
        The address is a Ray Client's, or no cluster answers there.
    """
    global _started_ray
    if ray.is_initialized():
        return
    address = ray_address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        join_cluster(address)
        return
    with spark_environment():
        for attempt in range(_STARTS):
            try:
                init_ray(
                    # Without it Ray would join any cluster that was started on this machine, which may be too small.
                    address="local",
                    num_cpus=num_cpus or _local_cpus(None),
                    include_dashboard=False,
                    _node_ip_address=_LOOPBACK,
                )
                break
            except Exception as error:  # Ray's own start-up raises errors of many classes, often a bare Exception
                cause = " ".join(str(error).split())[:500] or type(error).__name__
                if attempt + 1 < _STARTS:
                    log.warning(
                        "Ray did not start on this machine, perhaps as it was slow; it is started again: %s", cause
                    )
                    continue
                raise SetupError(
                    "Ray could not be started on this machine; its processes were ended; `statefleet doctor` checks memory, disks and "
                    "ports, and Ray's logs are in /tmp/ray/session_latest/logs",
                    cause=cause,
                ) from error
    _started_ray = True


def started_ray() -> bool:
    """Return whether this process started a local Ray, and has not stopped it."""
    return _started_ray


def _local_cpus(executor_cores: int | None) -> int:
    """Return the CPUs that a local Ray offers: the executor's, and some for RayDP's own actors."""
    return max(4, (executor_cores or os.cpu_count() or 1) + 2)


def start_session(
    app_name: str,
    *,
    num_executors: int = 1,
    max_executors: int | None = None,
    executor_cores: int | None = None,
    executor_memory: str = "1g",
    ray_address: str | None = None,
    configs: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start a Spark session whose executors are Ray actors.

    Parameters
    ----------
    app_name
        Name of the Spark application.
    num_executors
        Number of executors at first.
    executor_cores
        Cores of each executor; by default all of this machine's.
    executor_memory
        Memory of each executor's JVM, as Spark writes sizes. It does not include state.
    max_executors
        Maximum number of executors. On a cluster whose nodes offer ``statefleet_store``, each node that joins while a query of a
        fleet runs gets an executor, up to this number. By default `num_executors`: then only lost executors are replaced.
    ray_address
        Ray cluster to join; by default ``RAY_ADDRESS``, else a local one is started.
    configs
        Further Spark configuration, such as ``spark.jars.packages`` for connectors.

    Raises
    ------
    SetupError
        There is no RayDP, no Java 17, no Ray cluster where one was expected, or no package of ``spark.jars.packages``; or the program
        uses Spark Connect.
    InvalidRequestError
        `max_executors` is less than `num_executors`.
    """
    check_no_remote(os.environ)
    import_extra("raydp")
    settings = {**_values(SETTINGS), **(configs or {})}
    if max_executors is not None:
        if max_executors < num_executors:
            raise InvalidRequestError(
                "there cannot be fewer executors at most than at first",
                num_executors=num_executors,
                max_executors=max_executors,
            )
        settings[MAX_EXECUTORS] = str(max_executors)
    with spark_environment():
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            if _PACKAGES in settings:
                raise SetupError(
                    "under raydp-submit the driver's JVM runs before the program: give the command these by its option `--packages`, "
                    "and leave `spark.jars.packages` away",
                    packages=settings[_PACKAGES],
                )
            session = _submitted_session(app_name, ray_address, settings)
        else:
            cores = executor_cores or os.cpu_count() or 1
            ensure_ray(ray_address=ray_address, num_cpus=_local_cpus(cores * num_executors))
            session = _new_session(app_name, num_executors, cores, executor_memory, settings)
    session.sparkContext.setLogLevel("ERROR")
    return session


def _submitted_session(app_name: str, ray_address: str | None, settings: Mapping[str, str]) -> SparkSession:
    """Return the session of raydp-submit (a spark-submit), which has already started the driver's JVM with Ray as its master."""
    ensure_ray(ray_address=ray_address or "auto")
    builder = SparkSession.builder.appName(app_name)
    # Before that, a SparkConf lacks the command's options.
    SparkContext._ensure_initialized()
    submitted = SparkConf()
    cluster_settings = _cluster_settings(int(submitted.get("spark.executor.instances", "2")))
    for key, value in {
        **{key: value for key, value in cluster_settings.items() if not submitted.contains(key)},
        **settings,
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _new_session(
    app_name: str, num_executors: int, cores: int, executor_memory: str, settings: Mapping[str, str]
) -> SparkSession:
    raydp = import_extra("raydp")
    configs = {**_cluster_settings(num_executors), **(_values(LOCAL_SETTINGS) if _started_ray else {}), **settings}
    for name in _CLASS_PATHS:
        configs[name] = os.pathsep.join(filter(None, (str(present_jar()), configs.get(name))))
    try:
        with _jvm_stderr_without_notes():
            session: SparkSession = raydp.init_spark(app_name, num_executors, cores, executor_memory, configs=configs)
    except PySparkRuntimeError as error:
        if error.getErrorClass() != "JAVA_GATEWAY_EXITED":
            raise
        raydp.stop_spark()
        raise SetupError(
            "the driver's JVM ended before Spark had started; what it printed says why. Packages of `spark.jars.packages` come from "
            "Maven Central, or from where Spark's `spark.jars.ivySettings` says; without a network, name files by `spark.jars`",
            packages=settings.get(_PACKAGES),
        ) from error
    except FileNotFoundError as error:
        raise SetupError(
            "the Ray cluster cannot run RayDP: a file it needs is missing there, most likely `java`; start Ray on every "
            "node with Java 17's bin folder on PATH",
            reason=str(error).splitlines()[-1],
        ) from error
    return session


@contextmanager
def _jvm_stderr_without_notes() -> Iterator[None]:
    """Pass on the standard error of a JVM that is started within, except for Ray's notes before it has a log."""
    write, _ = stderr_without_notes()
    # launch_gateway has an option for that, which PySpark does not pass on. Spark 4 has the module elsewhere.
    context = sys.modules[SparkContext.__module__]
    context.launch_gateway = partial(launch_gateway, popen_kwargs={"stderr": write})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        context.launch_gateway = launch_gateway  # type: ignore[attr-defined]
        os.close(write)


def _cluster_settings(num_executors: int) -> dict[str, str]:
    """Return settings for long queries on this cluster: for several nodes, a known head, and nodes with stores (``cluster.yaml``)."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    several = sum(node["Alive"] for node in ray.nodes()) > 1  # type: ignore[no-untyped-call]
    settings = _values(CLUSTER_SETTINGS) if several else {}
    if resources.get(STORE_RESOURCE, 0) >= num_executors:
        settings |= _values(STORE_SETTINGS)
    if HEAD_RESOURCE in resources and several:
        settings |= {
            f"{key}{HEAD_RESOURCE}" if key.endswith(".") else key: value
            for key, value in _values(HEAD_SETTINGS).items()
        }
    return settings


def _values(settings: Mapping[str, Setting]) -> dict[str, str]:
    is_spark_4 = line_of(pyspark.__version__) != "spark35"
    return {
        key: setting.with_spark_4 if is_spark_4 and setting.with_spark_4 else setting.value
        for key, setting in settings.items()
    }


def stop_session() -> None:
    """Stop Spark, and Ray if this process started it."""
    global _started_ray
    if (raydp := sys.modules.get("raydp")) is not None:
        raydp.stop_spark()
    active = SparkSession.getActiveSession()
    if active is not None:
        active.stop()
    if _started_ray:
        # What executors fetched and spilled: a hundred megabytes and more of jars, which nobody else removes. Ray keeps its logs.
        left = list(Path(session_folder()).glob("app-*")) if ray.is_initialized() else []
        ray.shutdown()
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        _started_ray = False

"""A Spark session on a local Ray with a fleet, for a run of tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from coordinator.model.errors import SetupError
from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import Fleet, connect

_SETTINGS = {"spark.sql.shuffle.partitions": "2"}


@dataclass(frozen=True, slots=True)
class LocalSession:
    """A Spark session, and a fleet on the Ray cluster that it runs on."""

    spark: SparkSession
    fleet: Fleet


@contextmanager
def local_session(
    folder: Path, *, executor_cores: int = 2, configs: Mapping[str, str] | None = None
) -> Iterator[LocalSession]:
    """Start Ray, Spark and a fleet on this machine, and end them afterwards.

    Parameters
    ----------
    folder
        Folder of the fleet's state.
    executor_cores
        Cores of the executor.
    configs
        Further Spark configuration.

    Raises
    ------
    SetupError
        This process has a Spark session already, or one cannot be started here.
    """
    if SparkContext._active_spark_context is not None:
        raise SetupError(
            "this process has a Spark session already, and can have only one; stop it first, or run these tests in another process",
            master=SparkContext._active_spark_context.master,
        )
    spark = start_session("statefleet-testing", executor_cores=executor_cores, configs={**_SETTINGS, **(configs or {})})
    try:
        # Errors come as exceptions; queries that a test ends on purpose would fill the output with those of Java.
        spark.sparkContext.setLogLevel("OFF")
        fleet = connect(folder.resolve().as_uri())
        try:
            yield LocalSession(spark, fleet)
        finally:
            fleet.shutdown()
    finally:
        stop_session()

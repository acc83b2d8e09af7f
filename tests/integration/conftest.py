"""A local Ray and a Spark session on RayDP, shared by all integration tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from pyspark.sql import SparkSession

from spark_jobs.jvm.build import present_jar
from spark_jobs.session.settings import LOCAL_SETTINGS
from spark_jobs.session.settings import SETTINGS as ALL_SETTINGS
from spark_jobs.session.spark_session import _values, ensure_ray, spark_environment, start_session, stop_session
from statefleet.fleet import Fleet, connect
from tests.conftest import NewUri
from tests.integration.streams import Streams

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.task.maxFailures": "4",
    # By itself Spark waits for ever for a query that does not stop. Its error says where the query's thread is.
    "spark.sql.streaming.stopTimeout": "120s",
}


@pytest.fixture(scope="session")
def environment_before() -> dict[str, str]:
    """Return the environment as it was before there was a session."""
    return dict(os.environ)


@pytest.fixture(scope="session")
def spark(new_uri: NewUri, environment_before: dict[str, str]) -> Iterator[SparkSession]:
    has_raydp = find_spec("raydp") is not None
    yield start_session("statefleet-tests", executor_cores=2, configs=SETTINGS) if has_raydp else _plain_session()
    stop_session()


def _plain_session() -> SparkSession:
    """Return a session on threads, of a Spark that RayDP does not have: with the settings of other sessions."""
    with spark_environment():
        ensure_ray()
        builder = SparkSession.builder.master("local[2,4]").appName("statefleet-tests")
        settings = (
            _values({**ALL_SETTINGS, **LOCAL_SETTINGS}) | SETTINGS | {"spark.driver.extraClassPath": str(present_jar())}
        )
        for key, value in settings.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()


@pytest.fixture
def months_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PySpark 4 collect months of intervals, as the numbers that 3.5 collects; by itself it refuses them."""
    monkeypatch.setenv("PYSPARK_YM_INTERVAL_LEGACY", "1")


@pytest.fixture(scope="session")
def fleet(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri())
    yield connected
    connected.shutdown()


@pytest.fixture
def streams(spark: SparkSession) -> Streams:
    """Two streams without rows, also with a watermark, and a table."""
    rate = spark.readStream.format("rate").load()
    a = rate.selectExpr("cast(value as string) k", "timestamp t", "value x", "array(value) l")
    b = rate.selectExpr("cast(value as string) k", "timestamp u", "value y", "array(value) l")
    static = spark.range(3).withColumnRenamed("id", "x")
    at, bt = (frame.drop("l") for frame in (a.withWatermark("t", "5 seconds"), b.withWatermark("u", "5 seconds")))
    return {"a": a, "b": b, "at": at, "bt": bt, "static": static}

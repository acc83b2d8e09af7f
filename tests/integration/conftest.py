"""A local Ray and a Spark session on RayDP, shared by all integration tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import Fleet, connect
from tests.conftest import NewUri

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.task.maxFailures": "4",
}


@pytest.fixture(scope="session")
def environment_before() -> dict[str, str]:
    """Return the environment as it was before there was a session."""
    return dict(os.environ)


@pytest.fixture(scope="session")
def spark(new_uri: NewUri, environment_before: dict[str, str]) -> Iterator[SparkSession]:
    session = start_session(
        "statefleet-tests",
        executor_cores=2,
        configs=SETTINGS,
    )
    yield session
    stop_session()


@pytest.fixture
def months_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PySpark 4 collect months of intervals, as the numbers that 3.5 collects; by itself it refuses them."""
    monkeypatch.setenv("PYSPARK_YM_INTERVAL_LEGACY", "1")


@pytest.fixture(scope="session")
def fleet(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri())
    yield connected
    connected.shutdown()


Build = Callable[[Any], DataFrame]

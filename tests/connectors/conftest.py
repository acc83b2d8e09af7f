"""A Ray, a Spark session with its connectors, a fleet and a Kafka broker, shared by all tests of connectors.

Jars come from Maven Central once. Where they cannot be had, these tests are skipped, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import ray
from pyspark.sql import SparkSession

from coordinator.model.errors import SetupError
from spark_jobs.session.connectors import connector_jars, fetch_jars
from spark_jobs.session.spark_session import ensure_ray, start_session, stop_session
from statefleet.fleet import Fleet, connect
from tests.conftest import NewUri
from tests.kafka_broker import KafkaBroker

Made = TypeVar("Made")


def or_skip(make: Callable[[], Made]) -> Made:
    """Return what needs jars; skip the test, with the reason, if they cannot be downloaded."""
    try:
        return make()
    except SetupError as error:
        # A jar with another content than it should have is no reason to skip.
        if "could not be downloaded" not in error.message:
            raise
        pytest.skip(str(error))


def connectors() -> list[str]:
    """Return the connectors that there are for this version of Spark."""
    names = []
    for name in ("kafka", "avro", "delta", "iceberg"):
        try:
            connector_jars([name])
        except SetupError:
            continue
        names.append(name)
    return names


@pytest.fixture(scope="session")
def cluster(new_uri: NewUri) -> Iterator[str]:
    """A Ray on which several drivers have room; its address."""
    ensure_ray(num_cpus=12)
    yield ray.get_runtime_context().gcs_address
    stop_session()
    ray.shutdown()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    broker = or_skip(lambda: KafkaBroker(tmp_path_factory.mktemp("kafka")))
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the Iceberg catalog ``lake``."""
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="session")
def spark(cluster: str, warehouse: Path) -> SparkSession:
    names = connectors()
    or_skip(lambda: fetch_jars(connector_jars(names)))
    configs = {"spark.sql.shuffle.partitions": "2"}
    if "iceberg" in names:
        configs |= {
            "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.lake.type": "hadoop",
            "spark.sql.catalog.lake.warehouse": str(warehouse),
        }
    return start_session("statefleet-connectors", executor_cores=2, connectors=names, configs=configs)


@pytest.fixture(scope="session")
def fleet(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri())
    yield connected
    connected.shutdown()

"""A Ray, a Spark session with its connectors and a fleet, shared by all tests of connectors.

Jars come from Maven Central once. Where they cannot be had, these tests are skipped, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from pyspark.sql import SparkSession

from coordinator.model.errors import SetupError
from spark_jobs.page_hits import PACKAGE
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.session.spark_session import ensure_ray, start_session, stop_session
from statefleet.fleet import Fleet, connect
from tests.conftest import NewUri

#: Iceberg 1.12 has no jar for Spark 4.2, and the one for 4.1 does not run on it: Spark's catalog classes became interfaces.
HAS_ICEBERG = not SPARK.READS_STATE
PACKAGES, SETTINGS = (
    (
        [
            "org.apache.spark:spark-avro_2.12:3.5.7",
            "io.delta:delta-spark_2.12:3.3.3",
            "org.apache.iceberg:iceberg-spark-runtime-3.5_2.12:1.12.0",
        ],
        {
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
            "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.lake.type": "hadoop",
        },
    )
    if HAS_ICEBERG
    else (
        ["org.apache.spark:spark-avro_2.13:4.2.0", "io.delta:delta-spark_4.2_2.13:4.4.0"],
        {"spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension"},
    )
)


@pytest.fixture(scope="session")
def cluster(new_uri: NewUri) -> Iterator[str]:
    """A Ray on which several drivers have room; its address."""
    ensure_ray(num_cpus=12)
    yield ray.get_runtime_context().gcs_address
    stop_session()
    ray.shutdown()


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the Iceberg catalog ``lake``."""
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="session")
def spark(cluster: str, warehouse: Path) -> SparkSession:
    configs = SETTINGS | {
        "spark.sql.shuffle.partitions": "2",
        "spark.jars.packages": ",".join([PACKAGE, *PACKAGES]),
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    if HAS_ICEBERG:
        configs["spark.sql.catalog.lake.warehouse"] = str(warehouse)
    try:
        return start_session("statefleet-connectors", executor_cores=4, configs=configs)
    except SetupError as error:
        if "the driver's JVM ended" not in error.message:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def fleet(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri())
    yield connected
    connected.shutdown()

"""A Ray cluster of several nodes on this machine, each with its own address, and a Spark session with executors on three of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from ray.cluster_utils import Cluster

from statefleet.fleet import Fleet, connect
from tests.cluster.counting_query import ClusterQuery
from tests.cluster.nodes import WORKERS, ray_nodes, session_on
from tests.conftest import NewUri


@pytest.fixture(scope="session")
def cluster(new_uri: NewUri) -> Iterator[Cluster]:
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="session")
def spark(cluster: Cluster) -> Iterator[SparkSession]:
    configs = {"spark.sql.shuffle.partitions": "2"}
    with session_on("statefleet-cluster-tests", configs, max_executors=len(WORKERS) + 1) as session:
        yield session


@pytest.fixture(scope="session")
def fleet(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri())
    yield connected
    connected.shutdown()


@pytest.fixture
def query(fleet: Fleet, tmp_path: Path, name: str) -> Iterator[ClusterQuery]:
    with ClusterQuery(fleet, tmp_path, name) as counting:
        yield counting

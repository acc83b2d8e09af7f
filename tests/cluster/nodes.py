"""Several Ray nodes on this machine, each with an address, and a Spark session that has an executor on each but the head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from pyspark.sql import SparkSession
from ray.cluster_utils import Cluster

from coordinator.service.deploy import init_ray
from spark_jobs.session.settings import STORE_RESOURCE
from spark_jobs.session.spark_session import spark_environment, start_session, stop_session

#: Ray replaces 127.0.0.1 by an address that it chooses itself.
HEAD = "127.0.0.9"
WORKERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def add_worker(nodes: Cluster, address: str) -> Any:
    """Add a node with a core and resources for one executor."""
    return nodes.add_node(node_ip_address=address, num_cpus=1, resources={STORE_RESOURCE: 1})


@contextmanager
def ray_nodes() -> Iterator[Cluster]:
    """Start a head, and at each address of :data:`WORKERS` a worker with a core and resources for one executor."""
    with spark_environment():
        nodes = Cluster()
        nodes.add_node(node_ip_address=HEAD, num_cpus=1, include_dashboard=False, dashboard_host="127.0.0.1")
        for address in WORKERS:
            add_worker(nodes, address)
    init_ray(address=nodes.address, _node_ip_address=HEAD)
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@contextmanager
def session_on(
    app_name: str, configs: Mapping[str, str], *, max_executors: int | None = None
) -> Iterator[SparkSession]:
    """Start a Spark session on these nodes, with a small executor on each worker, and on nodes that join, up to a number."""
    addresses = {"spark.driver.host": HEAD, "spark.driver.bindAddress": HEAD}
    spark = start_session(
        app_name,
        num_executors=len(WORKERS),
        max_executors=max_executors,
        executor_cores=1,
        executor_memory="512m",
        configs={**addresses, **configs},
    )
    try:
        yield spark
    finally:
        stop_session()

"""A node is lost, with its executor, its store actor and all other processes; another one takes over from object storage alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from spark_jobs.fleet import Fleet, connect
from spark_jobs.session.spark_session import ensure_ray, spark_environment
from tests.chaos.driver_process import Supervisor, counting, final_result, versions, wait_past
from tests.chaos.inputs import write_inputs
from tests.conftest import NewUri

BATCHES = 12
#: Room for the driver's executor, which takes two, on either worker.
WORKER_CPUS, HEAD_CPUS = 3, 1


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A Ray cluster of a head, on which this process and the driver are."""
    with spark_environment():
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS, "include_dashboard": False})
    ensure_ray(ray_address=nodes.address)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def nodes_of_shards(fleet: Fleet) -> set[str]:
    """Return the nodes of the store actors that hold the query's shards."""
    return {shard["node_id"] for query in fleet.status()["queries"] for shard in query["shards"]}


# Ray's nodes have one address here, by which tasks cannot tell whose store actor to hand rows over to; of nodes with addresses of their
# own, tests/cluster/test_without_a_node.py loses one.
@pytest.mark.parametrize("handed_over", [False], ids=["in Python"])
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_lost_node_is_replaced_by_another(
    cluster: Cluster, new_uri: NewUri, tmp_path: Path, handed_over: bool
) -> None:
    workers = {node.node_id: node for node in (cluster.add_node(num_cpus=WORKER_CPUS) for _ in range(2))}
    counted = write_inputs(tmp_path, BATCHES, rows=4000, distinct=257)
    uri = new_uri()
    fleet = connect(uri)
    supervisor = Supervisor(tmp_path, uri, cluster.address, program=counting(handed_over))
    try:
        wait_past(fleet, supervisor, 3)
        (lost,) = nodes_of_shards(fleet)
        cluster.remove_node(workers.pop(lost), allow_graceful=False)
        while not supervisor.is_done():
            time.sleep(0.2)
        batches, result = final_result(tmp_path)
        assert result == dict(counted)
        assert versions(fleet) == [batches] * 4
        assert lost not in nodes_of_shards(fleet)
    finally:
        supervisor.driver.__exit__()
        fleet.shutdown()

"""A node joins while a query runs, and another time Ray says that it is going to end: executors and shards follow."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from tests.cluster.counting_query import ClusterQuery
from tests.cluster.nodes import WORKERS, add_worker

JOINING = "127.0.0.5"


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[Callable[[], Any]]:
    """Adds the node, which is gone after the test."""
    added: list[Any] = []

    def add() -> Any:
        added.append(add_worker(cluster, JOINING))
        return added[0]

    yield add
    for node in added:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=False)


def announce_end(cluster: Cluster, node_id: str, in_s: float) -> None:
    """Announce the end of a node as a cloud's notice does; ``ray drain-node`` does the same."""
    accepted, why = GcsClient(address=cluster.address).drain_node(
        node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "the test ends it",
        int((time.time() + in_s) * 1000),
    )
    assert accepted, why


def is_alive(node_id: str) -> bool:
    return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)


@pytest.mark.replay
def test_a_node_that_joins_gets_an_executor_and_its_shards_and_is_emptied_before_it_ends(
    query: ClusterQuery, cluster: Cluster, joined: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="spark_jobs.nodes.node_watch")
    for _ in range(2):
        query.batch()
    assert Counter(query.nodes()) == dict.fromkeys(WORKERS, 2)
    node = joined()
    took = query.run_until(lambda: JOINING in query.nodes(), "the node that joined has no shard")
    print(f"the node had a shard {took:.1f} s after it joined")
    query.batch()
    assert sorted(Counter(query.nodes()).values()) == [1, 1, 2, 2]
    assert f"room for one: {JOINING}" in caplog.text
    before = query.batches

    announce_end(cluster, node.node_id, in_s=120)
    took = query.run_until(lambda: JOINING not in query.nodes(), "the node that ends has shards")
    print(f"its shards were elsewhere {took:.1f} s after the notice")
    assert Counter(query.nodes()) == dict.fromkeys(WORKERS, 2)
    assert query.batches > before
    assert f"Ray ends node {JOINING} at " in caplog.text
    took = query.run_until(lambda: not is_alive(node.node_id), "the node does not end")
    print(f"the node ended by itself {took:.1f} s later")
    for _ in range(3):
        query.batch()
    assert Counter(query.nodes()) == dict.fromkeys(WORKERS, 2)

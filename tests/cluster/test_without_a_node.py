"""A node is lost while a query runs: its shards go on elsewhere, until another node joins. The lost one stays away: this comes last."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from ray.cluster_utils import Cluster

from coordinator.service.calls import RayActors
from statefleet.fleet import Fleet, connect
from store_actors.actor.deploy import store_metrics
from tests.clocks import until
from tests.cluster.counting_query import ClusterQuery, address_of
from tests.cluster.nodes import add_worker
from tests.conftest import NewUri

REPLACEMENT = "127.0.0.6"


@pytest.fixture
def followed(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    """A fleet whose shards have a standby each."""
    connected = connect(new_uri(), standbys=1)
    yield connected
    connected.shutdown()


def read_files(fleet: Fleet, nodes: set[str]) -> int:
    """Return how many files the store actors of `nodes` have read since they started."""
    actors = [actor for actor in fleet.status()["store_actors"] if address_of(actor["node_id"]) in nodes]
    metrics = store_metrics(RayActors(), {"store_actors": actors}).values()
    return sum(of_actor["deltas_loaded"] + of_actor["snapshots_loaded"] for of_actor in metrics)


def followed_by(fleet: Fleet) -> int:
    """Return how many commits standbys have taken."""
    return sum(of_actor["followed"] for of_actor in store_metrics(RayActors(), fleet.status()).values())


def settled(count: Callable[[], int]) -> bool:
    """Return whether a count stays the same for a second."""
    before = count()
    time.sleep(1)
    return count() == before


def lost_executors(fleet: Fleet) -> set[str]:
    """Return the hosts of executors that are shown as lost."""
    return {executor["host"] for executor in fleet.status()["executors"] if not executor["alive"]}


def test_standbys_take_over_from_a_node_that_is_lost(
    cluster: Cluster, followed: Fleet, tmp_path: Path, name: str
) -> None:
    with ClusterQuery(followed, tmp_path, name) as query:
        for _ in range(4):
            query.batch()
        # Each shard's standby has its copy by now. None is behind, so that those which a commit adds are all of that commit.
        until(lambda: settled(lambda: followed_by(followed)), 30, "standbys do not come to rest", 0.1)
        before = followed_by(followed)
        query.batch()
        until(lambda: followed_by(followed) >= before + 6, 30, "a standby did not take the last commit", 0.1)
        nodes = query.nodes()
        lost = next(node for node in cluster.worker_nodes if address_of(node.node_id) == nodes[0])
        lost_address = nodes[0]
        survivors = {address for address in nodes if address != lost_address}
        read = read_files(followed, survivors)
        actors = RayActors()
        assert all(actors.node_answers(node.node_id) for node in cluster.worker_nodes)
        cluster.remove_node(lost, allow_graceful=False)
        begun = time.monotonic()
        assert not actors.node_answers(lost.node_id), "Ray has not noticed yet"
        query.batch()
        # A shard that is read back has the deltas of all batches before. The next standbys, of four shards, read at most what was
        # committed since their copy: a file each, and on busy cores two.
        assert read_files(followed, survivors) - read < 4 + query.batches - 1, "no shard was read"
        print(f"the next batch was finished {time.monotonic() - begun:.1f} s after the node was killed")
        after = query.nodes()
        assert set(after) == survivors
        until(lambda: lost_address in lost_executors(followed), 60, "its executor is not shown as lost", 0.2)
        assert [now for now, then in zip(after, nodes, strict=True) if then != lost_address] == [
            n for n in nodes if n != lost_address
        ]
        for shard, then in enumerate(nodes):
            reasons = [move.reason for move in followed.explain_placement(name, shard).moves]
            assert ("its standby took over" in reasons[-1]) == (then == lost_address), reasons
        for _ in range(3):
            query.batch()
        assert sorted(Counter(query.nodes()).values()) == [3, 3]
        add_worker(cluster, REPLACEMENT)
        took = query.run_until(lambda: REPLACEMENT in query.nodes(), "the node in its place has no shards")
        print(f"a node that joined in its place had shards after {took:.1f} s")
        query.batch()
        assert Counter(query.nodes()) == dict.fromkeys((*survivors, REPLACEMENT), 2)

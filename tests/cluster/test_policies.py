"""Placement policies on a cluster of three nodes: `stay`, and one that a user wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import statefleet as sf
from benchmarks.nodes import WORKERS
from coordinator.placement.policy import PlacementPolicy
from spark_jobs.fleet import Fleet
from tests.cluster.looking import address_of, query_of
from tests.code_blocks import blocks_of
from tests.integration.streams import Feed, Run

VALUES = pa.schema([("v", pa.int64())])


def keep_off(name: str, host: str) -> PlacementPolicy:
    """Return the policy of docs/architecture.md for states whose names begin as `name`."""
    (block,) = blocks_of("tests/cluster/test_policies.py::test_a_users_policy_says_which_nodes_shards_are_on")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block.code, str(block), "exec"), names)
    policy: PlacementPolicy = names["KeepOff"](name[:4], host)
    return policy


def run_batches(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, policy: str | PlacementPolicy
) -> list[str]:
    """Return the addresses of the nodes that a query's six shards are on after three batches under a policy."""
    feed = Feed(spark, tmp_path / "in", VALUES)
    placed = sf.connect(fleet.uri, placement=policy)
    run = Run(placed.stateful(feed.stream(), name=name, shards=6).groupBy("v").count(), "update", tmp_path / "ck")
    try:
        for batch in range(3):
            feed.add([(value,) for value in range(batch, batch + 20)])
            run.wait()
        return [address_of(shard["node_id"]) for shard in query_of(fleet, name)["shards"]]
    finally:
        run.stop()


def test_a_users_policy_says_which_nodes_shards_are_on(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    avoided, *other_nodes = WORKERS
    addresses = run_batches(spark, fleet, tmp_path, name, keep_off(name, avoided))
    assert sorted(addresses) == sorted(other_nodes * 3)
    (move,) = fleet.explain_placement(name, 0).moves
    assert move.reason == f"kept off {avoided}"


def test_shards_stay_where_a_policy_had_put_them(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    """By cores, `balance` would give the node that was avoided its share again."""
    avoided = WORKERS[0]
    before = run_batches(spark, fleet, tmp_path, name, keep_off(name, avoided))
    assert avoided not in before
    assert run_batches(spark, fleet, tmp_path, name, "stay") == before

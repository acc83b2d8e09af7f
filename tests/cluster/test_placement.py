"""State operations run on the node that has their shard, on a cluster of three nodes with an executor each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.cluster.counting_query import address_of
from tests.cluster.nodes import WORKERS
from tests.integration.counting_query import query_of
from tests.integration.streams import Feed, Run

pytestmark = pytest.mark.replay

VALUES = pa.schema([("v", pa.int64())])


def test_tasks_run_where_their_shards_are(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    counts = fleet.stateful(feed.stream(), name=name, shards=12).groupBy("v").count()
    with Run(counts, "update", tmp_path / "ck") as run:
        for batch in range(50):
            feed.add([(value,) for value in range(batch, batch + 50)])
            run.wait()
        query = query_of(fleet, name)
        assert Counter(address_of(shard["node_id"]) for shard in query["shards"]) == dict.fromkeys(WORKERS, 4)
        assert query["locality"] >= 0.95, [shard["operations_elsewhere"] for shard in query["shards"]]
        for shard in range(12):
            explained = fleet.explain_placement(name, shard)
            assert [move.reason for move in explained.moves] == ["spread over the nodes that have executors"]


def test_operators_of_a_query_share_nodes(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    first = fleet.stateful(feed.stream(), name=f"{name}-distinct", shards=6).dropDuplicates(["v"])
    second = fleet.stateful(first, name=f"{name}-counts", shards=6).groupBy("v").agg(F.count("*"))
    with Run(second, "update", tmp_path / "ck") as run:
        for batch in range(6):
            feed.add([(value,) for value in range(batch, batch + 20)])
            run.wait()
        nodes = [
            [shard["node_id"] for shard in query_of(fleet, f"{name}-{which}")["shards"]]
            for which in ("distinct", "counts")
        ]
        assert nodes[0] == nodes[1]
        assert len(set(nodes[0])) == 3

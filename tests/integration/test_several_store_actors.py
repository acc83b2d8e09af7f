"""A node of many cores has several store actors, which share its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from coordinator.service.calls import NAMESPACE
from spark_jobs.fleet import Fleet, connect
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

SHARDS = 4
KEYS = 40


@pytest.fixture
def wide(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri(), store_actors_per_node=2)
    yield connected
    connected.shutdown()


def test_shards_are_shared_and_come_back_when_one_store_actor_is_lost(
    spark: SparkSession, wide: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", pa.schema([("v", pa.int64())]))
    counts = wide.stateful(feed.stream(), name=name, shards=SHARDS).groupBy("v").agg(F.count("*").alias("n"))
    run = Run(counts, "update", tmp_path / "ck")

    def batch(number: int) -> None:
        feed.add([(key,) for key in range(KEYS)])
        run.wait()
        assert Counter(row["n"] for row in run.batches[max(run.batches)]) == {number: KEYS}

    def holders() -> list[str]:
        (query,) = [entry for entry in wide.status()["queries"] if entry["name"] == name]
        return [shard["actor_name"] for shard in query["shards"]]

    try:
        for number in (1, 2):
            batch(number)
        assert sorted(Counter(holders()).values()) == [2, 2]
        ray.kill(ray.get_actor(holders()[0], namespace=NAMESPACE), no_restart=False)
        for number in (3, 4):
            batch(number)
    finally:
        run.stop()

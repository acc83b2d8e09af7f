"""A node of many cores has several store actors, which share its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from coordinator.model.names import store_actor_number
from coordinator.service.calls import NAMESPACE, session_folder
from statefleet.fleet import Fleet, connect
from store_actors.connections.hand_over import address_of, sockets_of
from tests.clocks import until
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run, short_list
from tests.processes import paused

SHARDS = 4
KEYS = 40


@pytest.fixture(scope="module")
def wide(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri(), store_actors_per_node=2)
    yield connected
    connected.shutdown()


class Counting:
    """Counts rows by key in batches of all keys."""

    def __init__(self, spark: SparkSession, fleet: Fleet, folder: Path, name: str) -> None:
        self._fleet, self._name = fleet, name
        self._feed = Feed(folder / "in", pa.schema([("v", pa.int64())]))
        counts = fleet.stateful(self._feed.stream(), name=name, shards=SHARDS).groupBy("v").agg(F.count("*").alias("n"))
        self.run = Run(counts, "update", folder / "ck")

    def begin(self) -> None:
        self._feed.add([(key,) for key in range(KEYS)])

    def finish(self, number: int) -> None:
        self.run.wait()
        assert Counter(row["n"] for row in self.run.batches[max(self.run.batches)]) == {number: KEYS}

    def batch(self, number: int) -> None:
        self.begin()
        self.finish(number)

    def shards(self) -> list[dict[str, Any]]:
        (query,) = [entry for entry in self._fleet.status()["queries"] if entry["name"] == self._name]
        shards: list[dict[str, Any]] = query["shards"]
        return shards

    def versions(self, actor_name: str) -> set[int]:
        """Return the versions of the shards of a store actor."""
        return {shard["version"] for shard in self.shards() if shard["actor_name"] == actor_name}


@pytest.fixture
def counting(spark: SparkSession, wide: Fleet, tmp_path: Path, name: str) -> Iterator[Counting]:
    query = Counting(spark, wide, tmp_path, name)
    yield query
    query.run.stop()


def test_shards_are_shared_and_come_back_when_one_store_actor_is_lost(counting: Counting) -> None:
    for number in (1, 2):
        counting.batch(number)
    holders = [shard["actor_name"] for shard in counting.shards()]
    assert sorted(Counter(holders).values()) == [2, 2]
    ray.kill(ray.get_actor(holders[0], namespace=NAMESPACE), no_restart=False)
    for number in (3, 4):
        counting.batch(number)


@pytest.mark.parametrize("number", short_list([0, 1], [1]))
def test_a_paused_store_actor_holds_up_its_own_shards_only(counting: Counting, wide: Fleet, number: int) -> None:
    """Tasks hand rows over to the store actor that has their shards, not to the node's first."""
    counting.batch(1)
    pids = {actor["actor_name"]: actor["pid"] for actor in wide.status()["store_actors"]}
    (held,) = [name for name in pids if store_actor_number(name) == number]
    (other,) = pids.keys() - {held}
    with paused(pids[held]):
        counting.begin()
        until(lambda: counting.versions(other) == {2}, 15)
        assert counting.versions(held) == {1}
    counting.finish(2)


def test_rows_reach_shards_whose_store_actor_tasks_do_not_find(counting: Counting, wide: Fleet) -> None:
    """Tasks that run on another node than planned, as one that has fewer store actors; its first one passes rows on."""
    counting.batch(1)
    sockets = sockets_of(session_folder(), wide.uri)
    assert sockets is not None
    Path(address_of(sockets, ray.util.get_node_ip_address(), 1)).unlink()  # type: ignore[no-untyped-call]
    counting.batch(2)

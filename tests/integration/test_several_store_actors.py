"""A node of many cores has several store actors, which share its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from pyspark.sql import SparkSession

from coordinator.model.names import store_actor_number
from coordinator.service.calls import NAMESPACE, session_folder
from statefleet.fleet import Fleet, connect
from store_actors.connections.hand_over import address_of, sockets_of
from tests.clocks import until
from tests.conftest import NewUri
from tests.integration.counting_query import CountingQuery
from tests.integration.streams import short_list
from tests.processes import paused


@pytest.fixture(scope="module")
def wide(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri(), store_actors_per_node=2)
    yield connected
    connected.shutdown()


@pytest.fixture
def counting(wide: Fleet, tmp_path: Path, name: str) -> Iterator[CountingQuery]:
    with CountingQuery(wide, tmp_path, name, shards=4, texts=False, is_shuffled=True) as query:

        def are_shared_after_a_batch() -> bool:
            query.batch()
            return len({shard["actor_name"] for shard in query.shards()}) == 2

        # A store actor that another test has ended may still be on its way back.
        until(are_shared_after_a_batch, failure="one store actor has all shards")
        yield query


def versions(query: CountingQuery, actor_name: str) -> set[int]:
    """Return the versions of the shards of a store actor."""
    return {shard["version"] for shard in query.shards() if shard["actor_name"] == actor_name}


def lose_one(query: CountingQuery) -> None:
    """End one of the two store actors, each of which has half of the shards, and run batches."""
    holders = [shard["actor_name"] for shard in query.shards()]
    assert sorted(Counter(holders).values()) == [2, 2]
    ray.kill(ray.get_actor(holders[0], namespace=NAMESPACE), no_restart=False)
    for _ in range(2):
        query.batch()


def test_shards_are_shared_and_come_back_when_one_store_actor_is_lost(counting: CountingQuery) -> None:
    counting.batch()
    lose_one(counting)


@pytest.mark.parametrize("number", short_list([0, 1], [1]))
def test_a_paused_store_actor_holds_up_its_own_shards_only(counting: CountingQuery, wide: Fleet, number: int) -> None:
    """Tasks hand rows over to the store actor that has their shards, not to the node's first."""
    newest = counting.batches
    pids = {actor["actor_name"]: actor["pid"] for actor in wide.status()["store_actors"]}
    (held,) = [name for name in pids if store_actor_number(name) == number]
    (other,) = pids.keys() - {held}
    with paused(pids[held]):
        counting.add()
        until(lambda: versions(counting, other) == {newest + 1}, 15)
        assert versions(counting, held) == {newest}
    counting.check()


def test_one_task_has_the_rows_of_shards_of_both_store_actors(wide: Fleet, tmp_path: Path, name: str) -> None:
    with CountingQuery(wide, tmp_path, name, shards=4) as query:
        for _ in range(3):
            query.batch()
        lose_one(query)


def test_rows_reach_shards_whose_store_actor_tasks_do_not_find(counting: CountingQuery, wide: Fleet) -> None:
    """Tasks that run on another node than planned, as one that has fewer store actors; its first one passes rows on."""
    sockets = sockets_of(session_folder(), wide.uri)
    assert sockets is not None
    Path(address_of(sockets, ray.util.get_node_ip_address(), 1)).unlink()  # type: ignore[no-untyped-call]
    counting.batch()

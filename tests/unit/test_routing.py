"""Routes of marker rows: Spark's own hash, so that each marker lands on its shard."""

from __future__ import annotations

import pytest

from spark_jobs.worker.routing import marker_routes, murmur3_int


def test_murmur3_equals_sparks_hash_of_an_int() -> None:
    # SELECT hash(0), hash(1), hash(-1), hash(42), hash(2147483647) in Spark 3.5
    assert [murmur3_int(n) for n in (0, 1, -1, 42)] == [933211791, -559580957, -1604776387, 29417773]


def test_routes_are_sought_once_for_a_number_of_shards() -> None:
    assert marker_routes(48) is marker_routes(48)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 16, 200])
def test_one_route_lands_on_each_shard(shards: int) -> None:
    assert [murmur3_int(route) % shards for route in marker_routes(shards)] == list(range(shards))

"""The routes by which Spark's shuffle puts rows on shards, beside Spark's own hash."""

from __future__ import annotations

import pytest

from tests.unit.jvm import CATALYST, Jvm


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 16, 60])
def test_sparks_partitioning_puts_each_route_on_its_shard(jvm: Jvm, shards: int) -> None:
    literal = jvm.module(f"{CATALYST}.expressions.Literal")
    routes = list(jvm.own("Shards").routes(shards))
    hashes = [
        jvm.named(f"{CATALYST}.expressions.Murmur3Hash")(jvm.seq([literal.apply(route)]), 42).eval(None)
        for route in routes
    ]
    assert [value % shards for value in hashes] == list(range(shards))
    assert len(set(routes)) == shards
    assert min(routes) == 0

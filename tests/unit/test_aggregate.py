"""Versions and changes of an aggregation's shard; `test_shard_machines.py` compares it with plain dicts."""

from __future__ import annotations

from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.operators.aggregate import AggregateShard
from tests.unit.aggregate_machine import (
    SCHEMA,
    batch_of,
    groups_of,
    input_of,
)


def test_the_two_newest_versions_are_reachable_in_memory() -> None:
    shard = AggregateShard(SCHEMA)
    for version in range(1, 5):
        shard.apply(input_of(batch_of([(version * 10, "u", version, None)])), 0, version)
        shard.commit()
    assert not AggregateShard(SCHEMA).rollback(3)
    assert not shard.rollback(1)
    assert shard.rollback(2)
    assert groups_of(shard.snapshot()) == {(10, "u"): (1, 1, None), (20, "u"): (1, 2, None)}


def test_delta_carries_the_kind_of_each_change() -> None:
    shard = AggregateShard(SCHEMA)
    shard.apply(input_of(batch_of([(5, "old", 1, None)])), 0, 1)
    shard.commit()
    change = shard.apply(input_of(batch_of([(6, "brief", 1, None), (60, "stays", 1, None)])), 18_000, 2)
    kinds = {row["user"]: row[CHANGE_COLUMN] for row in change.delta.to_pylist()}
    assert kinds == {"old": 1, "brief": 2, "stays": 0}

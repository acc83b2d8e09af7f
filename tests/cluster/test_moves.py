"""Shards that are moved, drained and spread again while their query runs, by the commands that people use."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import ray

import statefleet as sf
from statefleet.fleet import Fleet
from tests.cluster.counting_query import ClusterQuery, address_of
from tests.cluster.nodes import WORKERS
from tests.integration.counting_query import query_of


def test_a_shard_is_moved_from_memory_to_memory_while_its_query_runs(
    query: ClusterQuery, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        query.batch()
    before = query.nodes()
    assert Counter(before) == dict.fromkeys(WORKERS, 2)
    assert query_of(query.fleet, query.name)["locality"] >= 0.95
    target = next(address for address in WORKERS if address != before[0])
    (planned,) = query.statefleet(capsys, "move", query.name, "0", target, "--dry-run")
    assert planned["preparation"] is None
    query.batch()
    assert query.nodes() == before
    (moved,) = query.statefleet(capsys, "move", query.name, "0", target)
    assert moved["preparation"]["version"] == 4
    assert moved["preparation"]["moved_bytes"] > 0
    read = query.deltas_read()
    query.batch()
    assert query.nodes() == before, "its tasks were sent there"
    query.batch()
    assert query.nodes() == [target, *before[1:]]
    query.batch()
    assert query.deltas_read() == read + 1, "the one since the copy"
    explained = query.fleet.explain_placement(query.name, 0)
    assert explained.moves[-1].reason == "asked for by `statefleet move`"
    assert explained.moves[-1].preparation is not None
    assert query.statefleet(capsys, "move", query.name, "0", target) == []


def test_a_node_is_drained_and_filled_again(query: ClusterQuery, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        query.batch()
    drained = WORKERS[0]
    moves = query.statefleet(capsys, "drain", drained)
    assert len([move for move in moves if move["move"]["state_name"] == query.name]) == 2
    query.batch()
    query.batch()
    assert Counter(query.nodes()) == {WORKERS[1]: 3, WORKERS[2]: 3}
    query.batch()
    assert query.statefleet(capsys, "rebalance", "--name", query.name) == []
    query.statefleet(capsys, "drain", drained, "--undo")
    assert len(query.statefleet(capsys, "rebalance", "--name", query.name)) == 2
    query.batch()
    query.batch()
    assert Counter(query.nodes()) == dict.fromkeys(WORKERS, 2)
    query.batch()


def test_under_the_policy_stay_shards_only_leave_a_drained_node(
    fleet: Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ClusterQuery(sf.connect(fleet.uri, placement="stay"), tmp_path, name) as query:
        for _ in range(2):
            query.batch()
        query.statefleet(capsys, "drain", WORKERS[0])
        query.batch()
        query.batch()
        query.statefleet(capsys, "drain", WORKERS[0], "--undo")
        assert query.statefleet(capsys, "rebalance", "--name", name) == []
        query.batch()
        query.batch()
        assert Counter(query.nodes()) == {WORKERS[1]: 3, WORKERS[2]: 3}


def test_shards_go_back_to_a_store_actor_that_was_lost_once_it_is_there_again(query: ClusterQuery) -> None:
    for _ in range(2):
        query.batch()
    before = query.nodes()
    (victim,) = [
        actor
        for actor in query.fleet.status()["store_actors"]
        if actor["alive"] and address_of(actor["node_id"]) == before[0]
    ]
    ray.kill(ray.get_actor(victim["actor_name"], namespace="statefleet"), no_restart=False)
    query.batch()
    query.run_until(lambda: Counter(query.nodes()) == Counter(before), "shards stay elsewhere")

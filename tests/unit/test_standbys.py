"""Standbys: copies that replicate each commit, and take over without a read of the object store; no Ray."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs
from ray.exceptions import RayActorError

from coordinator.model.identities import StateStoreId
from coordinator.runtime.runtime import Runtime
from store_actors.actor.replicator import _ON_THEIR_WAY, Replicator
from store_actors.messages.requests import ApplyRequest, ReplicatedCommit
from store_actors.serving.keyed_stores import KeyedStores
from store_actors.serving.metrics import StoreMetrics
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.unit.aggregation_fleet import AggregationFleet, counts, rows
from tests.unit.keyed_fleet import COUNTS, NAMES, KeyedFleet, store_id, transfer_shard


class FakeActors:
    """Store actors by name, reached at once; see :class:`coordinator.service.calls.RayActors`."""

    hung_after_s = 20.0

    def __init__(self) -> None:
        self.replicators: dict[str, Any] = {}
        self.answers = True
        self.find_calls = 0

    def find(self, name: str) -> Any:
        self.find_calls += 1

        def replicate(commit: ReplicatedCommit) -> Any:
            return (self.replicators[name](commit),) if self.answers else ("never",)

        return SimpleNamespace(replicate=SimpleNamespace(remote=replicate)) if name in self.replicators else None

    def wait(self, references: Sequence[Any], timeout_s: float) -> bool:
        return self.answers

    def get(self, reference: Any) -> Any:
        if isinstance(reference[0], Exception):
            raise reference[0]
        return reference[0]

    def put(self, value: Any) -> Any:
        return value

    def kill(self, handle: Any, *, restart: bool) -> None:
        raise AssertionError("no store actor is killed")

    def node_id(self) -> str:
        return "node"


class ReplicatedShard:
    """An operator's shard on store actor ``a``, which sends its commits to ``b``."""

    def __init__(self) -> None:
        self.fleet, self.actors = AggregationFleet(), FakeActors()
        self.metrics = StoreMetrics()
        replicator = Replicator(self.actors, "a", self.metrics, threading.RLock())
        self.owner = OperatorShards(
            Partitions(self.fleet.objects, self.fleet.coordinator, self.metrics, Runtime(), replicate=replicator.send)
        )
        self.standby = self.fleet.new_store()
        self.actors.replicators["b"] = self.standby.partitions.transfers.replicate
        self.batch = 0

    def request(self, run: str = "run-1", **where: str) -> ApplyRequest:
        request = self.fleet.request(self.batch, run, **where)
        self.batch += 1
        return replace(request, lease=structs.replace(request.lease, standbys=("b",)))

    def run(self, values: str, run: str = "run-1") -> dict[str, int]:
        return counts(self.owner.apply(self.request(run), rows(values))[0])

    def take_copy(self) -> int:
        return transfer_shard(self.owner, self.standby, store_id(self.fleet.coordinator, self.batch))

    def take_over(self, values: str) -> dict[str, int]:
        return counts(self.standby.apply(self.request(local="b", lost="a"), rows(values))[0])


def test_a_standby_takes_over_without_reading_anything() -> None:
    shard = ReplicatedShard()
    shard.run("aab")
    assert shard.take_copy() == 1
    shard.run("bc")
    shard.run("d")
    assert shard.standby.metrics.followed == 2
    assert shard.take_over("abcd") == {"a": 3, "b": 3, "c": 2, "d": 2}
    assert shard.standby.metrics.bytes_loaded == 0


def test_a_standby_that_falls_behind_gets_no_more_commits_and_a_lost_one_costs_nothing() -> None:
    shard = ReplicatedShard()
    shard.run("a")
    shard.actors.answers = False
    for _ in range(_ON_THEIR_WAY + 3):
        shard.run("b")
    assert shard.metrics.standbys_left_behind == 4
    shard.actors.replicators["b"] = lambda commit: RayActorError(error_msg="lost")
    shard.actors.answers = True
    shard.run("c")
    assert shard.run("abc") == {"a": 2, "b": _ON_THEIR_WAY + 4, "c": 2}


def test_a_standby_that_was_lost_is_looked_up_again() -> None:
    shard = ReplicatedShard()
    shard.actors.replicators["b"] = lambda commit: RayActorError(error_msg="lost")
    shard.run("a")
    before = shard.actors.find_calls
    shard.run("b")
    assert shard.actors.find_calls == before + 1
    shard.actors.replicators["b"] = shard.standby.partitions.transfers.replicate
    shard.run("c")
    shard.take_copy()
    shard.run("d")
    assert shard.standby.metrics.followed == 1


def test_keyed_stores_are_replicated_together() -> None:
    fleet, actors = KeyedFleet(), FakeActors()
    standby = fleet.new_stores()
    standby_metrics = fleet.metrics
    metrics = StoreMetrics()
    replicator = Replicator(actors, "a", metrics, threading.RLock())
    owner = KeyedStores(Partitions(fleet.objects, fleet.coordinator, metrics, Runtime(), replicate=replicator.send))
    actors.replicators["b"] = standby.partitions.transfers.replicate

    def begin(batch: int) -> str:
        request = fleet.request(batch, "run-1", 0, COUNTS, NAMES)
        return fleet.stores.open_update(replace(request, lease=structs.replace(request.lease, standbys=("b",))))[0]

    fleet.stores = owner
    session = begin(0)
    fleet.put(session, a=1, b=2)
    fleet.call(session, "put", pa.record_batch({"id": [7], "name": ["seven"]}), store="names")
    owner.commit(session)
    shard: StateStoreId = store_id(fleet.coordinator, 1)
    assert transfer_shard(owner, standby, shard) == 1
    session = begin(1)
    fleet.put(session, a=5)
    fleet.call(session, "remove_key", ("b",))
    owner.commit(session)
    assert standby_metrics.followed == 1
    fleet.stores = standby
    session = fleet.open(2, "run-1", 1, COUNTS, NAMES)
    assert fleet.call(session, "get", ("a",)) == {"n": 5}
    assert fleet.call(session, "get", ("b",)) is None
    assert fleet.call(session, "get", (7,), store="names") == {"name": "seven"}
    assert standby.commit(session) == 3
    assert standby_metrics.bytes_loaded == 0


@pytest.mark.parametrize("values", ["", "abc"])
def test_a_standby_keeps_its_copy_in_maintenance(values: str) -> None:
    shard = ReplicatedShard()
    shard.run(f"a{values}")
    shard.take_copy()
    shard.fleet.coordinator.is_elsewhere = True
    for _ in range(30):
        shard.run(values)
        shard.standby.partitions.maintain(5)
    shard.fleet.coordinator.is_elsewhere = False
    assert shard.standby.metrics.snapshots_written == 0, "its owner writes them"
    assert shard.take_over("a")["a"] >= 2
    assert shard.standby.metrics.bytes_loaded == 0

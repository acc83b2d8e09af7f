"""Partitions that are copied from one store actor's memory to another's while batches run; no Ray."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.errors import OperationOutOfOrderError
from coordinator.model.schema import Field
from coordinator.runtime.runtime import Runtime
from store_actors.messages.requests import StoreSpec
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from store_actors.serving.sessions import _STREAM_IDLE_S
from tests.clocks import LaterClock
from tests.unit.aggregation_fleet import AggregationFleet, counts, rows
from tests.unit.keyed_fleet import COUNTS, NAMES, KeyedFleet, offer_of, pieces, store_id, transfer_shard


class Move:
    """An operator's shard on store actor ``a`` that store actor ``b`` is to get."""

    def __init__(self, *batches: str) -> None:
        self.fleet = AggregationFleet()
        self.batch = 0
        for values in batches:
            self.run(values)
        self.source, self.target = self.fleet.store, self.fleet.new_store()
        self.shard = store_id(self.fleet.coordinator, self.batch)

    def run(self, values: str) -> None:
        self.fleet.apply(self.batch, values)
        self.batch += 1

    def run_on_target(self, values: str, run: str = "run-1") -> dict[str, int]:
        request = self.fleet.request(self.batch, run, local="b", lost="a")
        self.batch += 1
        return counts(self.target.apply(request, rows(values))[0])


def test_the_next_batch_continues_from_the_copy_and_reads_nothing() -> None:
    move = Move("aab", "bc", "d")
    assert transfer_shard(move.source, move.target, move.shard) == 3
    assert move.run_on_target("abe") == {"a": 3, "b": 3, "e": 1}
    assert move.run_on_target("cd") == {"c": 2, "d": 2}
    assert move.target.metrics.bytes_loaded == 0
    assert (move.source.metrics.handed_over, move.target.metrics.taken_over) == (1, 1)


def test_a_copy_that_is_older_than_memory_is_ignored() -> None:
    move = Move("a")
    old = offer_of(move.source, move.shard)
    move.run("b")
    assert transfer_shard(move.source, move.target, move.shard) == 2
    assert move.target.partitions.transfers.take(move.shard, old, pieces(move.source, old))[0] == 2
    assert move.target.metrics.taken_over == 1
    assert move.run_on_target("ab") == {"a": 2, "b": 2}


def test_a_copy_outlives_some_rounds_of_maintenance_though_it_is_leased_elsewhere() -> None:
    move = Move("a")
    transfer_shard(move.source, move.target, move.shard)
    move.fleet.coordinator.is_elsewhere = True
    rounds = 0
    while move.target.loaded():
        move.target.partitions.maintain(10)
        rounds += 1
        assert rounds < 50
    assert rounds == 11


def test_a_partition_that_is_not_in_memory_is_not_offered() -> None:
    move = Move("a")
    assert move.target.partitions.transfers.begin(move.shard) is None
    assert move.source.partitions.cache.unload(move.shard)
    assert move.source.partitions.transfers.begin(move.shard) is None


def test_an_abandoned_transfer_frees_its_rows() -> None:
    fleet, clock = AggregationFleet(), LaterClock()
    fleet.store = OperatorShards(Partitions(fleet.objects, fleet.coordinator, runtime=Runtime(clock=clock)))
    fleet.apply(0, "ab")
    shard = store_id(fleet.coordinator, 1)
    offer = offer_of(fleet.store, shard)
    ((_, partition),) = fleet.store.partitions.cache.items()
    table: Any = partition.stores["default"].table  # type: ignore[attr-defined]
    assert table.is_frozen
    clock.later_s = _STREAM_IDLE_S + 1
    fleet.store.partitions.maintain(10)
    assert not table.is_frozen
    with pytest.raises(OperationOutOfOrderError, match="nothing was lost"):
        fleet.store.partitions.transfers.next_piece(offer.transfer_id)


def test_a_store_that_the_next_batch_does_not_open_is_kept() -> None:
    fleet = KeyedFleet()
    session = fleet.open(0, "run-1", 0, COUNTS, NAMES)
    fleet.put(session, a=1)
    fleet.call(session, "put", pa.record_batch({"id": [7], "name": ["seven"]}), store="names")
    fleet.stores.commit(session)
    target = fleet.new_stores()
    transfer_shard(fleet.stores, target, store_id(fleet.coordinator, 1))
    fleet.write(1, a=2)
    fleet.stores = target
    fleet.write(2, a=3)
    session = fleet.open(3, "run-1", 0, COUNTS, NAMES)
    assert fleet.call(session, "get", (7,), store="names") == {"name": "seven"}
    assert fleet.call(session, "get", ("a",)) == {"n": 3}


def test_columns_that_were_added_meanwhile_are_loaded() -> None:
    wider = StoreSpec("default", COUNTS.keys, (*COUNTS.values, Field("m", "int64")))
    fleet = KeyedFleet({"a": 1})
    target = fleet.new_stores()
    transfer_shard(fleet.stores, target, store_id(fleet.coordinator, 1))
    session = fleet.open(1, "run-2", 0, wider)
    fleet.call(session, "put", pa.record_batch({"k": ["b"], "n": pa.array([2]), "m": pa.array([3])}))
    fleet.stores.commit(session)
    fleet.stores = target
    # Back at the copied columns: rows of the other run are read all the same.
    session = fleet.open(2, "run-3", 0, COUNTS)
    assert fleet.call(session, "get", ("b",)) == {"n": 2}
    assert fleet.call(session, "get", ("a",)) == {"n": 1}

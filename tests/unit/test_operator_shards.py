"""The store's half of the commit protocol, with a real coordinator ledger and an in-memory object store; no Ray."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from coordinator.model.errors import FencedError
from coordinator.model.schema import StateSchema
from tests.code_blocks import blocks_of
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, counts, rows
from tests.unit.observed_objects import ObservedObjectStore


def test_a_repeated_request_gets_the_recorded_rows_and_applies_nothing() -> None:
    fleet = AggregationFleet()
    first = fleet.apply(0, "aab")
    assert fleet.apply(0, "aab") == first
    assert fleet.store.metrics.replayed_answers == 1
    assert len(fleet.deltas()) == 1
    assert fleet.apply(1, "a") == {"a": 3}


def test_a_new_run_replays_in_memory_and_reads_nothing() -> None:
    fleet = AggregationFleet()
    fleet.apply(0, "a")
    fleet.apply(1, "a")
    assert fleet.apply(1, "aa", "run-2") == {"a": 3}
    assert fleet.apply(2, "b", "run-2") == {"b": 1}
    assert (fleet.store.metrics.bytes_loaded, fleet.store.metrics.rollbacks) == (0, 1)


def test_an_owner_that_was_replaced_commits_nothing_and_leaves_no_file() -> None:
    fleet = AggregationFleet()
    old = fleet.request(0, local="a")
    new = fleet.request(0, local="b", lost="a")
    successor = fleet.new_store()
    assert counts(successor.apply(new, rows("ab"))[0]) == {"a": 1, "b": 1}
    with pytest.raises(FencedError):
        fleet.store.apply(old, rows("ab"))
    assert len(fleet.deltas()) == 1


def test_complete_mode_gives_every_group_also_to_a_retry() -> None:
    schema = StateSchema(SCHEMA.keys, (), SCHEMA.accumulators, None, None, "complete")
    fleet = AggregationFleet()
    fleet.apply(0, "ab", schema=schema)
    assert fleet.apply(1, "a", schema=schema) == {"a": 2, "b": 1}
    assert fleet.apply(1, "a", schema=schema) == {"a": 2, "b": 1}


def test_the_format_document_reads_a_version_without_this_package() -> None:
    """Runs the code in docs/format.md over real deltas."""
    import io

    fleet = AggregationFleet()
    for batch, values in enumerate(("aab", "bc", "a")):
        fleet.apply(batch, values)
    namespace: dict[str, Any] = {}
    for block in blocks_of(
        "tests/unit/test_operator_shards.py::test_the_format_document_reads_a_version_without_this_package"
    ):
        exec(compile(block.code, str(block), "exec"), namespace)
    files = [io.BytesIO(fleet.objects.get(entry.file)) for entry in fleet.coordinator.plan(sys.maxsize).deltas]
    read = namespace["read_version"](files, ["v"])
    assert {row["v"]: row["n"] for row in read} == {"a": 3, "b": 2, "c": 1}
    for file in files:
        file.seek(0)
        spark_schema = namespace["spark_schema"](file)
        assert spark_schema.simpleString() == "struct<v:string,n:bigint>"
        assert [field.nullable for field in spark_schema] == [True, False]


def test_a_failure_after_the_shard_changed_is_forgotten_and_the_retry_counts_once() -> None:
    fleet = AggregationFleet(store := ObservedObjectStore())
    fleet.apply(0, "a")

    def fail_once(operation: str, path: str) -> None:
        if operation == "put":
            store.before = lambda operation, path: None
            raise MemoryError("on purpose")

    store.before = fail_once
    with pytest.raises(MemoryError):
        fleet.apply(1, "a")
    assert fleet.apply(1, "a") == {"a": 2}
    fleet.store = fleet.new_store()
    assert fleet.apply(2, "a") == {"a": 3}


def test_maintenance_does_not_wait_for_a_shard_that_is_elsewhere_and_hangs() -> None:
    fleet = AggregationFleet()
    fleet.apply(0, "a")
    fleet.coordinator.is_elsewhere = True
    ((_, partition),) = fleet.store.partitions.cache.items()
    with partition.lock, ThreadPoolExecutor(1) as pool:
        pool.submit(fleet.store.partitions.maintain, 99).result(timeout=10)
    assert fleet.store.metrics.shards_unloaded == 0
    fleet.store.partitions.maintain(99)
    assert fleet.store.metrics.shards_unloaded == 1

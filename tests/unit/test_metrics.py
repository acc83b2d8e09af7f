"""Metrics: one table of all metrics, values that agree with the status, and counters that survive the process that counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

import pytest

from coordinator.model.errors import StorageUnavailableError
from coordinator.model.memory_options import MemoryUse
from coordinator.model.metric_table import METRICS, Kind, Sample, metric_of
from coordinator.runtime.runtime import Clock
from coordinator.service.metric_export import MetricExport
from coordinator.storage.actor_store import CountedObjectStore, StorageStats
from store_actors.serving.metrics import COUNTERS, StoreMetrics, store_samples
from tests.unit.ledger_harness import actor, task
from tests.unit.observed_objects import ObservedObjectStore
from tests.unit.service_harness import METADATA, SHARDS, QueriedCoordinator


def values(samples: Iterable[Sample]) -> dict[tuple[str, ...], float]:
    return {(sample.name.removeprefix("statefleet_"), *sample.labels): sample.value for sample in samples}


# -- the table ----------------------------------------------------------------------------------------------------


def test_names_are_as_prometheus_wants_them_and_there_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"statefleet_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        if re.search("seconds|bytes", metric.name):
            assert re.search("_(seconds|bytes)(_total)?$", metric.name), f"{metric.name}: a unit ends the name"


def test_labels_have_few_values() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels == {"state", "phase", "place", "kind", "error", "condition", "process", "operation"}


def test_every_counter_of_a_store_actor_is_exported() -> None:
    assert sorted(COUNTERS.values()) == sorted({field.name for field in fields(StoreMetrics)} - {"failing"})
    metrics = StoreMetrics(**{name: number for number, name in enumerate(COUNTERS.values(), start=1)})
    metrics.failing = {"clicks/0/1": "why"}
    samples = list(store_samples(metrics, MemoryUse(100, 60, 7), 3, (2, 900)))
    value_of = values(samples)
    assert [value_of[name.removeprefix("statefleet_"),] for name in COUNTERS] == [*range(1, len(COUNTERS) + 1)]
    assert (value_of["store_shards",], value_of["store_failing_shards",], value_of["standby_behind_bytes",]) == (
        3,
        1,
        900,
    )
    assert (value_of["memory_limit_bytes",], value_of["memory_resident_bytes",], value_of["memory_spilled_bytes",]) == (
        100,
        60,
        7,
    )
    assert ("memory_limit_bytes",) not in values(store_samples(metrics, MemoryUse(None, 60, 0), 3, (2, 900)))
    check(samples)


def check(samples: Iterable[Sample]) -> None:
    """Check that samples are of metrics of the table, with their labels."""
    for sample in samples:
        assert len(metric_of(sample.name).labels) == len(sample.labels), sample


# -- counters -----------------------------------------------------------------------------------------------------


def test_increments_of_a_counter_add_up_also_after_a_reset() -> None:
    export = MetricExport("memory://")
    reported = [export.increase(Sample("statefleet_commits_total", value, ("a",))) for value in (0, 5, 5, 9, 2, 3)]
    assert reported == [0, 5, 0, 4, 2, 1]
    assert export.increase(Sample("statefleet_commits_total", 4, ("b",))) == 4


def test_requests_are_counted_with_their_bytes_and_failures_and_answered_as_they_are() -> None:
    def fail(operation: str, path: str) -> None:
        if operation == "put":
            raise StorageUnavailableError("the object store failed")

    stats = StorageStats()
    store = CountedObjectStore("memory://", ObservedObjectStore(fail), stats, Clock())
    assert store.put_if_absent("a/b", b"123")
    assert not store.put_if_absent("a/b", b"4")
    assert store.get("a/b") == b"123"
    with pytest.raises(FileNotFoundError):
        store.get("a/c")
    with pytest.raises(StorageUnavailableError):
        store.put("a/d", b"12345")
    assert [file.path for file in store.list("a")] == ["a/b"]
    stats.repeated()
    value_of = values(stats.samples("coordinator"))
    requests = {key[2]: value for key, value in value_of.items() if key[0] == "object_store_requests_total"}
    assert requests == {"put_if_absent": 2, "get": 2, "put": 1, "list": 1}
    assert value_of["object_store_errors_total", "coordinator", "put", "StorageUnavailableError"] == 1
    assert sum(key[0] == "object_store_errors_total" for key in value_of) == 1, (
        "a missing object is an answer, not an error"
    )
    assert value_of["object_store_written_bytes_total", "coordinator"] == 4
    assert value_of["object_store_read_bytes_total", "coordinator"] == 3
    assert stats.trouble() == {"repeated": 1, "StorageUnavailableError": 1}
    check(stats.samples("coordinator"))


# -- metrics of the coordinator --------------------------------------------------------------------------------------------


async def test_the_coordinators_figures_are_those_of_its_status() -> None:
    coordinator = QueriedCoordinator(created=METADATA)
    for batch in range(3):
        for shard in range(SHARDS):
            commit = await coordinator.commit(batch=batch, shard=shard)
        await coordinator.batch_result(task("run-1", batch), range(SHARDS))
    # Sent again, as after a lost answer: it counts once.
    await coordinator.accept(commit)
    samples = await coordinator.samples()
    check(samples)
    value_of = values(samples)
    (query,) = (await coordinator.status())["queries"]
    for name in ("rows", "bytes"):
        assert value_of[f"state_{name}", "clicks"] == query[f"state_{name}"] > 0
    assert value_of["state_shards", "clicks"] == query["num_shards"] == SHARDS
    assert value_of["state_version", "clicks"] == query["version"] == 3
    assert value_of["state_active", "clicks"] == query["active"] == 1
    assert value_of["last_commit_timestamp_seconds", "clicks"] == query["last_commit_ms"] / 1000
    assert value_of["commits_total", "clicks"] == 3 * SHARDS
    assert value_of["batches_total", "clicks"] == 3
    assert value_of["rows_in_total", "clicks"] == 3 * sum(shard["rows_in"] for shard in query["shards"])
    assert value_of["leases_total", "clicks", "local"] == sum(shard["operations"] for shard in query["shards"])
    assert sum(sample.name == "statefleet_batch_seconds" for sample in samples) == 3
    assert value_of["state_shards_lost", "clicks"] == 0

    await coordinator.report_store_actor_lost(actor("a").instance_id)
    value_of = values(await coordinator.samples())
    assert (value_of["state_shards_lost", "clicks"], value_of["store_actors", "lost"]) == (SHARDS, 1)
    # Shards that a living store actor takes over were recovered.
    for shard in range(SHARDS):
        await coordinator.lease(batch=3, shard=shard, at=actor("b"))
    value_of = values(await coordinator.samples())
    assert (value_of["state_shards_lost", "clicks"], value_of["moves_total", "clicks", "recovery"]) == (0, SHARDS)
    assert value_of["state_shards", "clicks"] == SHARDS

"""Metrics: one table of all, figures that are those of the status, and counters that survive whoever counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import fields

import pytest

from coordinator.ledger.rescaling import BatchShards
from coordinator.ledger.state_ledger import AcceptedCommits
from coordinator.model.commits import PartitionCommit
from coordinator.model.errors import StorageUnavailableError
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryUse
from coordinator.model.metric_table import METRICS, Increments, Kind, Sample, metric_of
from coordinator.runtime.runtime import MachineClock
from coordinator.service.coordinator import Coordinator
from coordinator.storage.counted import CountedObjectStore, StorageStats
from coordinator.storage.memory import MemoryObjectStore
from store_actors.serving.metric_samples import COUNTERS, store_samples
from store_actors.serving.metrics import StoreMetrics
from tests.unit.coordinator_requests import METADATA, SHARDS, commit_of, lease_all_shards
from tests.unit.ledger_harness import actor, task
from tests.unit.observed_objects import ObservedObjectStore


def values(samples: Iterable[Sample]) -> dict[tuple[str, ...], float]:
    return {(one.name.removeprefix("statefleet_"), *one.labels): one.value for one in samples}


# -- the table ----------------------------------------------------------------------------------------------------


def test_names_are_as_prometheus_wants_them_and_there_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"statefleet_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        if re.search("seconds|bytes", metric.name):
            assert metric.unit, f"{metric.name}: a unit ends the name"


def test_labels_have_few_values() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels == {"state", "phase", "place", "kind", "error", "condition", "process", "operation"}


def test_every_counter_of_a_store_actor_is_exported() -> None:
    assert sorted(COUNTERS.values()) == sorted({one.name for one in fields(StoreMetrics)} - {"failing"})
    metrics = StoreMetrics(**{name: place for place, name in enumerate(COUNTERS.values(), start=1)})
    metrics.failing = {"clicks/0/1": "why"}
    samples = list(store_samples(metrics, MemoryUse(100, 60, 7), 3, (2, 900)))
    found = values(samples)
    assert [found[name.removeprefix("statefleet_"),] for name in COUNTERS] == [*range(1, len(COUNTERS) + 1)]
    assert (found["store_shards",], found["store_failing_shards",], found["standby_behind_bytes",]) == (3, 1, 900)
    assert (found["memory_limit_bytes",], found["memory_resident_bytes",], found["memory_spilled_bytes",]) == (
        100,
        60,
        7,
    )
    assert ("memory_limit_bytes",) not in values(store_samples(metrics, MemoryUse(None, 60, 0), 3, (2, 900)))
    check(samples)


def check(samples: Iterable[Sample]) -> None:
    """Samples are of metrics of the table, with their labels."""
    for sample in samples:
        assert len(metric_of(sample.name).labels) == len(sample.labels), sample


# -- counters -----------------------------------------------------------------------------------------------------


def test_what_is_told_of_a_counter_adds_up_also_over_a_beginning_from_nothing() -> None:
    increments = Increments()
    told = [increments.of(Sample("statefleet_commits_total", value, ("a",))) for value in (0, 5, 5, 9, 2, 3)]
    assert told == [0, 5, 0, 4, 2, 1]
    assert increments.of(Sample("statefleet_commits_total", 4, ("b",))) == 4


def test_requests_are_counted_with_their_bytes_and_failures_and_answered_as_they_are() -> None:
    def fail(operation: str, path: str) -> None:
        if operation == "put":
            raise StorageUnavailableError("the object store failed")

    figures = StorageStats()
    store = CountedObjectStore(ObservedObjectStore(fail), figures, MachineClock())
    assert store.put_if_absent("a/b", b"123")
    assert not store.put_if_absent("a/b", b"4")
    assert store.get("a/b") == b"123"
    with pytest.raises(FileNotFoundError):
        store.get("a/c")
    with pytest.raises(StorageUnavailableError):
        store.put("a/d", b"12345")
    assert [one.path for one in store.list("a")] == ["a/b"]
    figures.repeated()
    found = values(figures.samples("coordinator"))
    requests = {key[2]: value for key, value in found.items() if key[0] == "object_store_requests_total"}
    assert requests == {"put_if_absent": 2, "get": 2, "put": 1, "list": 1}
    assert found["object_store_errors_total", "coordinator", "put", "StorageUnavailableError"] == 1
    assert sum(key[0] == "object_store_errors_total" for key in found) == 1, "what is not there is an answer"
    assert found["object_store_written_bytes_total", "coordinator"] == 4
    assert found["object_store_read_bytes_total", "coordinator"] == 3
    assert figures.trouble() == {"repeated": 1, "StorageUnavailableError": 1}
    check(figures.samples("coordinator"))


# -- the coordinator's --------------------------------------------------------------------------------------------


def test_the_coordinators_figures_are_those_of_its_status() -> None:
    async def scenario() -> None:
        coordinator = Coordinator("memory://", MemoryObjectStore(), Maintenance(), "node")
        for batch in range(3):
            for grant in await lease_all_shards(coordinator, batch=batch):
                (outcome,) = await coordinator.commit_partitions(
                    "clicks", [PartitionCommit((commit_of(grant, batch + 1),))]
                )
                assert isinstance(outcome, AcceptedCommits)
            await coordinator.batch_result(task("run-1", batch), BatchShards(0, SHARDS))
        # Told again, as after a lost answer: it counts once.
        await coordinator.commit_partitions("clicks", [PartitionCommit(outcome.entries)])
        samples = await coordinator.samples()
        check(samples)
        found = values(samples)
        (query,) = (await coordinator.status())["queries"]
        for name in ("rows", "bytes"):
            assert found[f"state_{name}", "clicks"] == query[f"state_{name}"] > 0
        assert found["state_shards", "clicks"] == query["num_shards"] == SHARDS
        assert found["state_version", "clicks"] == query["version"] == 3
        assert found["state_active", "clicks"] == query["active"] == 1
        assert found["last_commit_timestamp_seconds", "clicks"] == query["last_commit_ms"] / 1000
        assert found["commits_total", "clicks"] == 3 * SHARDS
        assert found["batches_total", "clicks"] == 3
        assert found["rows_in_total", "clicks"] == 3 * sum(one["rows_in"] for one in query["shards"])
        assert found["leases_total", "clicks", "local"] == sum(one["operations"] for one in query["shards"])
        assert len([one for one in samples if one.name == "statefleet_batch_seconds"]) == 3
        assert found["state_shards_lost", "clicks"] == 0

        await coordinator.report_store_actor_lost(actor("a").instance_id)
        found = values(await coordinator.samples())
        assert (found["state_shards_lost", "clicks"], found["store_actors", "lost"]) == (SHARDS, 1)
        # Shards that a living store actor takes over were recovered.
        for shard in range(SHARDS):
            await coordinator.attach_and_lease(task("run-1", 3, shard=shard), METADATA, actor("b"))
        found = values(await coordinator.samples())
        assert (found["state_shards_lost", "clicks"], found["moves_total", "clicks", "recovery"]) == (0, SHARDS)
        assert found["state_shards", "clicks"] == SHARDS

    asyncio.run(scenario())

"""What the coordinator tells those who look again and again: only what changed, with moments and refusals that no log has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.ledger.rescaling import BatchShards
from coordinator.ledger.state_ledger import AcceptedCommits
from coordinator.model.commits import PartitionCommit
from coordinator.model.errors import FencedError
from coordinator.model.maintenance import Maintenance
from coordinator.runtime.runtime import MachineClock, now_ms
from coordinator.service.coordinator import Coordinator
from coordinator.storage.memory import MemoryObjectStore
from coordinator.telemetry.state_record import StateRecord
from statefleet.dashboard.model import FleetModel
from tests.unit.coordinator_requests import METADATA, SHARDS, commit_of, lease_all_shards
from tests.unit.ledger_harness import ENTRY, actor, task


class Watched:
    """A coordinator that is looked at, and a query whose batches it counts."""

    def __init__(self) -> None:
        self.store = MemoryObjectStore()
        self.started()

    def started(self) -> None:
        self.coordinator = Coordinator("memory://", self.store, Maintenance(), "node")
        self.stamps: dict[str, str] = {}

    async def look(self) -> dict[str, Any]:
        told = await self.coordinator.watch(self.stamps)
        self.stamps = told["stamps"]
        return told

    async def query(self) -> dict[str, Any]:
        (query,) = (await self.look())["queries"]
        assert isinstance(query, dict)
        return query

    async def batch(self, run: str = "run-1", batch: int = 0, waited_ms: int = 0) -> None:
        planned_ms = now_ms(MachineClock()) - waited_ms
        for grant in await lease_all_shards(self.coordinator, run, batch):
            entry = replace(commit_of(grant, batch + 1), apply_ms=7, write_ms=9, batch_time_ms=planned_ms)
            (outcome,) = await self.coordinator.commit_partitions("clicks", [PartitionCommit((entry,))])
            assert isinstance(outcome, AcceptedCommits), outcome


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def scenario(steps: Callable[[Watched], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def all_steps() -> None:
            await steps(Watched())

        asyncio.run(all_steps())

    run.__name__ = steps.__name__  # type: ignore[attr-defined]
    return run


@scenario
async def test_a_query_is_told_of_again_only_once_something_happened_to_it(watched: Watched) -> None:
    assert (await watched.look())["queries"] == []
    await watched.batch()
    assert (await watched.query())["version"] == 1
    told = await watched.look()
    assert (told["queries"], list(told["stamps"])) == ([], ["clicks"])
    await watched.batch(batch=1)
    assert (await watched.query())["version"] == 2
    await watched.coordinator.batch_result(task("run-1", 1), BatchShards(0, SHARDS))
    assert (await watched.query())["batches"][-1]["ended_ms"]
    await watched.coordinator.deactivate_instances("run-1")
    assert not (await watched.query())["active"]
    assert (await watched.look())["queries"] == []


@scenario
async def test_a_batch_is_told_of_with_its_moments_in_order(watched: Watched) -> None:
    await watched.batch()
    await watched.batch(batch=1)
    await watched.coordinator.batch_result(task("run-1", 1), BatchShards(0, SHARDS))
    query = await watched.query()
    first, second = query["batches"]
    assert (first["batch_id"], second["batch_id"], second["shards_counted"]) == (0, 1, SHARDS)
    assert (second["apply_ms"], second["write_ms"]) == (7, 9)
    assert (second["apply_total_ms"], second["write_total_ms"]) == (7 * SHARDS, 9 * SHARDS)
    order = [second[name] for name in ("asked_ms", "leased_ms", "begun_ms", "counted_ms", "ended_ms")]
    assert order == sorted(order)
    assert first["ended_ms"] is None
    assert second["counted_ms"] == max(shard["counted_ms"] for shard in query["shards"])
    assert second["counted_ms"] == query["shards"][second["last_shard"]]["counted_ms"]


@scenario
async def test_a_coordinator_that_starts_anew_does_not_make_up_what_the_log_does_not_have(watched: Watched) -> None:
    await watched.batch()
    await watched.look()
    watched.started()
    await watched.coordinator.load_all_states()
    (batch,) = (await watched.query())["batches"]
    assert [batch[name] for name in ("apply_ms", "write_ms", "counted_ms", "leased_ms")] == [None] * 4
    assert batch["rows_in"] >= 0
    assert batch["planned_ms"]


@scenario
async def test_a_refusal_is_told_of_with_its_shard_and_another_run_begins_with_no_moments(watched: Watched) -> None:
    grants = await lease_all_shards(watched.coordinator)
    await watched.batch("run-2")
    (refused,) = await watched.coordinator.commit_partitions("clicks", [PartitionCommit((commit_of(grants[2], 1),))])
    assert isinstance(refused, FencedError)
    with pytest.raises(FencedError):
        await watched.coordinator.attach_and_lease(task("run-1", 0, 1), METADATA, actor("a"))
    told = (await watched.query())["refusals"]
    assert [(one["number"], one["shard"], one["kind"]) for one in told] == [
        (1, 2, "FencedError"),
        (2, 1, "FencedError"),
    ]
    assert "newer run" in told[1]["text"]


@scenario
async def test_shards_are_told_of_with_files_and_moves_and_the_dashboard_takes_all_of_it(watched: Watched) -> None:
    await watched.batch()
    model = FleetModel()
    assert model.take(await watched.look(), {}, 0)
    shard = model.shard("clicks", 3)
    assert shard is not None
    assert (shard["delta_files"], shard["snapshot_files"], shard["snapshot_version"], shard["oldest_version"]) == (
        1,
        0,
        None,
        0,
    )
    assert shard["file_bytes"] > 0
    (move,) = shard["moves"]
    assert (move["from"], move["to"], move["error"]) == (None, actor("a").actor_name, "")
    assert move["reason"]


@scenario
async def test_a_slow_batch_explains_itself_in_the_log_and_to_who_looks(watched: Watched) -> None:
    lines = Lines()
    logging.getLogger("coordinator.service.state_metrics").addHandler(lines)
    coordinator = watched.coordinator
    for batch in range(7):
        # Spark planned the sixth batch long before anybody asked for its shards; the last one is as quick as all others.
        await watched.batch(batch=batch, waited_ms=9000 if batch == 5 else 0)
        for _ in range(2):
            await coordinator.batch_result(task("run-1", batch), BatchShards(0, SHARDS))
    (slow,) = (await watched.query())["slow_batches"]
    assert (slow["batch_id"], slow["shard"], slow["number"]) == (5, 3, 1)
    assert slow["text"].startswith("batch 5 of clicks took 9.")
    assert "9.0 s in Spark before shard 3 on" in slow["text"]
    (record,) = lines.records
    assert record.getMessage() == slow["text"]
    assert (record.state, record.shard, record.version, record.batch) == ("clicks", 3, 6, 5)
    (query,) = (await coordinator.status())["queries"]
    assert query["slow_batches"] == [slow]


def test_times_are_kept_of_the_newest_versions_only_and_a_retry_does_not_change_them() -> None:
    record = StateRecord()
    for version in range(1, 101):
        record.add_commits([replace(ENTRY, version=version)], 1000 + version, is_new=True)
    record.add_commits([replace(ENTRY, version=100)], 5000, is_new=False)
    newest = record.batch(100)
    assert newest is not None
    assert newest.partitions[ENTRY.partition_id].counted_ms == 1100
    assert record.counts["commits"] == 100
    assert [version for version in range(1, 101) if record.batch(version)] == list(range(85, 101))
    for number in range(50):
        record.add_refusal(0, "FencedError", str(number), number)
    assert [refusal.number for refusal in record.refusals] == list(range(35, 51))
    record.forget_run()
    assert record.batch(100) is None
    assert len(record.refusals) == 16

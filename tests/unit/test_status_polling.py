"""The coordinator's status with details: times and refusals that no log has, and the phases of a batch."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from coordinator.model.errors import FencedError
from coordinator.runtime.runtime import Clock, now_ms
from coordinator.telemetry.slow_batches import PHASES, phases
from coordinator.telemetry.state_record import StateRecord
from tests.unit.ledger_harness import ENTRY, actor, task
from tests.unit.service_harness import METADATA, SHARDS, QueriedCoordinator, commit_of


class PolledCoordinator(QueriedCoordinator):
    """A coordinator that is polled, and the batches of a query."""

    async def query(self) -> dict[str, Any]:
        (query,) = (await self.status_details())["queries"]
        assert isinstance(query, dict)
        return query

    async def batch(self, run: str = "run-1", batch: int = 0, waited_ms: int = 0) -> None:
        planned_ms = now_ms(Clock()) - waited_ms
        for grant in await self.lease_all(run, batch):
            commit = commit_of(grant, batch + 1)
            await self.accept(structs.replace(commit, apply_ms=7, write_ms=9, batch_time_ms=planned_ms))


def polled() -> PolledCoordinator:
    return PolledCoordinator(created=METADATA)


async def test_a_query_is_reported_as_it_is_now() -> None:
    coordinator = polled()
    assert (await coordinator.status_details())["queries"] == []
    await coordinator.batch()
    assert (await coordinator.query())["version"] == 1
    await coordinator.batch(batch=1)
    assert (await coordinator.query())["version"] == 2
    await coordinator.batch_result(task("run-1", 1), range(SHARDS))
    assert (await coordinator.query())["batches"][-1]["ended_ms"]
    await coordinator.deactivate_instances("run-1")
    assert not (await coordinator.query())["active"]


async def test_a_query_is_reported_as_continuous_until_batches_follow_its_epochs() -> None:
    coordinator = polled()
    for epoch in range(2):
        await coordinator.batch(batch=epoch)
        assert (await coordinator.query())["is_continuous"] == (epoch > 0)
        await coordinator.end_epoch(task("run-1", epoch), range(SHARDS), "[3]")
        assert (await coordinator.query())["is_continuous"]
    await coordinator.batch(batch=2)
    await coordinator.batch_finished([METADATA.state_name], "run-1", 2, 0)
    assert not (await coordinator.query())["is_continuous"]


async def test_a_batch_is_reported_with_its_times_in_order() -> None:
    coordinator = polled()
    await coordinator.batch()
    await coordinator.batch(batch=1)
    await coordinator.batch_result(task("run-1", 1), range(SHARDS))
    query = await coordinator.query()
    first, second = query["batches"]
    assert (first["batch_id"], second["batch_id"], second["shards_counted"]) == (0, 1, SHARDS)
    assert (second["apply_ms"], second["write_ms"]) == (7, 9)
    assert (second["apply_total_ms"], second["write_total_ms"]) == (7 * SHARDS, 9 * SHARDS)
    order = [second[name] for name in ("asked_ms", "leased_ms", "begun_ms", "counted_ms", "ended_ms")]
    assert order == sorted(order)
    assert first["ended_ms"] is None
    assert second["phases"] == phases(second)
    assert second["counted_ms"] == max(shard["counted_ms"] for shard in query["shards"])
    assert second["counted_ms"] == query["shards"][second["last_shard"]]["counted_ms"]


async def test_a_restarted_coordinator_does_not_make_up_times_that_the_log_lacks() -> None:
    coordinator = polled()
    await coordinator.batch()
    coordinator = coordinator.restarted()
    await coordinator.load_all_states()
    (batch,) = (await coordinator.query())["batches"]
    assert [batch[name] for name in ("apply_ms", "write_ms", "counted_ms", "leased_ms")] == [None] * 4
    assert batch["rows_in"] >= 0
    assert batch["planned_ms"]


async def test_a_refusal_is_reported_with_its_shard_and_another_run_begins_without_times() -> None:
    coordinator = polled()
    grants = await coordinator.lease_all()
    await coordinator.batch("run-2")
    assert isinstance(await coordinator.outcome(commit_of(grants[2], 1)), FencedError)
    with pytest.raises(FencedError):
        await coordinator.lease(shard=1)
    refusals = (await coordinator.query())["refusals"]
    assert [(refusal["number"], refusal["shard"], refusal["kind"]) for refusal in refusals] == [
        (1, 2, "FencedError"),
        (2, 1, "FencedError"),
    ]
    assert "newer run" in refusals[1]["text"]


async def test_shards_are_reported_with_files_and_moves() -> None:
    coordinator = polled()
    await coordinator.batch()
    shard = (await coordinator.query())["shards"][3]
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


async def test_a_slow_batch_is_explained_in_the_log_and_in_the_status(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = polled()
    for batch in range(7):
        # Spark planned the sixth batch long before a task requested its shards; the last batch is as quick as the others.
        await coordinator.batch(batch=batch, waited_ms=9000 if batch == 5 else 0)
        for _ in range(2):
            await coordinator.batch_result(task("run-1", batch), range(SHARDS))
    (slow,) = (await coordinator.query())["slow_batches"]
    assert (slow["batch_id"], slow["shard"], slow["number"]) == (5, 3, 1)
    assert slow["text"].startswith("batch 5 of clicks took 9.")
    assert "9.0 s in Spark before shard 3 on" in slow["text"]
    (record,) = (entry for entry in caplog.records if entry.name == "coordinator.service.state_metrics")
    assert record.getMessage() == slow["text"]
    assert [vars(record)[name] for name in ("state", "shard", "version", "batch")] == ["clicks", 3, 6, 5]
    (query,) = (await coordinator.status())["queries"]
    assert query["slow_batches"] == [slow]


def test_times_are_kept_of_the_newest_versions_only_and_a_retry_does_not_change_them() -> None:
    record = StateRecord()
    for version in range(1, 101):
        record.add_commits([structs.replace(ENTRY, version=version)], 1000 + version, is_new=True)
    record.add_commits([structs.replace(ENTRY, version=100)], 5000, is_new=False)
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


# -- phases -------------------------------------------------------------------------------------------------------


TIMES = {
    "planned_ms": 1000, "asked_ms": 1300, "leased_ms": 1310, "begun_ms": 1330, "apply_ms": 50, "write_ms": 70,
    "counted_ms": 1480, "ended_ms": 1600,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # They add up to the time of the batch.
        ({}, [300, 10, 20, 50, 70, 30, 120]),
        # A lease that came with the commit before takes nothing.
        ({"asked_ms": None, "leased_ms": None}, [330, None, None, 50, 70, 30, 120]),
        # Unknown times are not made up.
        ({"apply_ms": None, "write_ms": None, "counted_ms": None}, [300, 10, 20, None, None, None, None]),
        ({"planned_ms": None}, [None, 10, 20, 50, 70, 30, 120]),
        (dict.fromkeys(TIMES), [None] * 7),
        # Clocks that disagree make no time negative.
        ({"begun_ms": 900, "ended_ms": 1}, [300, 10, 0, 50, 70, 460, 0]),
    ],
)
def test_the_phases_of_a_batch(changes: dict[str, int | None], expected: list[int | None]) -> None:
    assert PHASES == ("spark", "lease", "hand_over", "apply", "write", "commit", "end")
    assert phases({**TIMES, **changes}) == expected

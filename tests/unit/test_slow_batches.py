"""Slow batches: which batches are slow, and the explanation of where their time went."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from coordinator.model.commits import CommitEntry
from coordinator.model.leases import ShardMove
from coordinator.model.memory_options import MemoryUse
from coordinator.telemetry.drivers import DriverReport, Drivers, ExecutorState, LongBatch
from coordinator.telemetry.slow_batches import BatchContext, EndedBatch, explanation, is_slow, running_batch
from coordinator.telemetry.state_record import StateRecord
from tests.unit.ledger_harness import ENTRY, actor

LAST = structs.replace(ENTRY, partition_id=7, version=42, base_version=41, rows_in=1000, file_bytes=2_000_000)
#: spark, lease, hand_over, apply, write, commit, end
USUAL = (1000, 10, 20, 300, 300, 20, 250)


def ended(*phases: int | None, rows: int = 1000, last: CommitEntry = LAST) -> EndedBatch:
    return EndedBatch(sum(phase for phase in phases if phase is not None), phases, rows, last)


RECENT = [ended(*USUAL)] * 10
ON_B = BatchContext(7, "node-b")


def explained(batch: EndedBatch, around: BatchContext = ON_B) -> str:
    return explanation("clicks", batch, RECENT, around)


@pytest.mark.parametrize(
    ("took_ms", "recent_ms", "slow"),
    [
        (6001, [2000] * 5, True),
        (6000, [2000] * 5, False),
        (60_000, [2000] * 4, False),
        (1199, [200] * 20, False),
        (1200, [200] * 20, True),
        (3001, [100, 100, 1000, 9000, 9000], True),
        (3000, [100, 100, 1000, 9000, 9000], False),
    ],
)
def test_a_batch_is_slow_by_the_median_of_enough_others(took_ms: int, recent_ms: list[int], slow: bool) -> None:
    assert is_slow(took_ms, [ended(total_ms) for total_ms in recent_ms]) == slow


def test_loading_after_a_loss_is_explained_with_shard_host_and_bytes() -> None:
    last = structs.replace(LAST, restore_ms=9_700, load_bytes=400_000_000)
    around = replace(ON_B, move=ShardMove(5, 41, actor("a"), actor("b"), "why"), was_lost=True)
    assert explained(ended(1100, 12, 9800, 400, 300, 20, 300, last=last), around) == (
        "batch 41 of clicks took 11.9 s (median 1.9 s): 9.8 s in shard 7 on node-b loading 400.0 MB after its store actor was lost"
    )


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (0, "9.0 s in Spark before shard 7 on node-b was asked (source, shuffle, waiting for a core)"),
        (1, "9.0 s until the coordinator gave the lease of shard 7 on node-b"),
        (2, "9.0 s handing rows over to shard 7 on node-b (on their way, or waiting for its threads or memory)"),
        (3, "9.0 s working on 1,000 rows in shard 7 on node-b"),
        (4, "9.0 s writing 2.0 MB of shard 7 on node-b to the object store"),
        (5, "9.0 s until the commit of shard 7 on node-b was in the state's log"),
        (6, "9.0 s in the sink and at the batch's end"),
    ],
)
def test_the_part_that_took_longer_than_usual_is_named(phase: int, words: str) -> None:
    phases = [*USUAL]
    phases[phase] = 9000
    assert explained(ended(*phases)).endswith(f"(median 1.9 s): {words}")


def test_a_loss_is_named_regardless_of_where_the_time_went() -> None:
    lost = replace(ON_B, move=ShardMove(5, 41, actor("a"), actor("a"), "why"), was_lost=True)
    waited = explained(ended(9000, *USUAL[1:]), lost)
    assert waited.endswith(": 9.0 s before shard 7 on node-b was asked for again, after its store actor was lost")
    assert explained(ended(*USUAL[:6], 9000), lost).endswith("batch's end; the store actor that had shard 7 was lost")


LOST = ExecutorState("2", "10.0.0.7", 43_384_000, "killed")


def test_a_lost_executor_is_named_by_the_batch_that_waited_for_it() -> None:
    around = replace(ON_B, lost_executors=[LOST])
    assert explained(ended(29_300, *USUAL[1:]), around) == (
        "batch 41 of clicks took 30.2 s (median 1.9 s): 29.3 s in Spark before shard 7 on node-b was asked: executor 2 on 10.0.0.7 was "
        "lost at 12:03:04 UTC, and its tasks had to run again"
    )
    assert explained(ended(*USUAL[:6], 9000), around).endswith(
        "in the sink and at the batch's end; executor 2 on 10.0.0.7 was lost at 12:03:04 UTC"
    )


@pytest.mark.parametrize(
    ("running_ms", "recent", "overdue"),
    [(19_000, RECENT, False), (19_001, RECENT, True), (5100, [ended(100)] * 5, True), (5100, [ended(200)] * 5, False),
     (99_000, RECENT[:4], False)],
)  # fmt: skip
def test_a_batch_that_runs_is_overdue_by_ten_medians_and_some_seconds(
    running_ms: int, recent: list[EndedBatch], overdue: bool
) -> None:
    batch = LongBatch("run", 41, running_ms, "")
    assert running_batch("clicks", batch, recent, [1], 4, []).is_overdue == overdue


def test_a_running_batch_says_what_it_waits_for() -> None:
    batch = LongBatch("run", 41, 29_300, "3 of 8 tasks are done")
    assert running_batch("clicks", batch, RECENT, [3, 5], 8, [LOST]).text == (
        "batch 41 of clicks has been running for 29.3 s (median 1.9 s): executor 2 on 10.0.0.7 was lost at 12:03:04 UTC; 3 of 8 tasks "
        "are done; not committed yet by 2 of 8 shards: 3, 5"
    )
    assert "in the sink" in running_batch("clicks", batch, [], [], 8, []).text
    assert "5, 6, 7, …" in running_batch("clicks", batch, [], list(range(1000)), 1000, []).text


def test_a_drivers_losses_count_once_for_its_own_runs_and_end_with_it() -> None:
    drivers = Drivers()
    alive, on_purpose = ExecutorState("1", "10.0.0.6"), replace(LOST, executor_id="3", is_expected=True)
    report = DriverReport(
        "app", (alive, LOST, on_purpose), ("run",), (LongBatch("run", 41, 5000, ""),), (("run", 7), ("run-0", 0))
    )
    assert drivers.take(report, 10.0) == [LOST]
    assert drivers.take(report, 12.0) == []
    drivers.take(DriverReport("other", (replace(LOST, host="elsewhere"),), ("run-2",)), 12.0)
    assert (drivers.lost, drivers.lost_since("run", 0), drivers.lost_since("run", 1)) == (2, [LOST], [])
    assert drivers.lost_since("run-2", 1) == [replace(LOST, host="elsewhere")]
    assert [executor.executor_id for app, executor in drivers.executors(13.0) if app == "app"] == ["1", "2", "3"]
    assert drivers.batch("run", 13.0) == report.batches[0]
    assert drivers.batch("run-2", 13.0) is None
    assert [drivers.behind(run, 13.0) for run in ("run", "run-0", "run-2")] == [7, 0, None]
    drivers.take(replace(report, batches=()), 14.0)
    assert drivers.batch("run", 15.0) is None
    assert list(drivers.executors(60.0)) == [], "a driver that is silent has ended"


def test_a_phase_of_usual_length_is_not_named_and_the_worst_comes_first() -> None:
    text = explained(ended(1000, 10, 20, 5000, 9000, 20, 250))
    assert text.index("9.0 s writing") < text.index("5.0 s working")
    assert "Spark" not in text
    assert "sink" not in text


def test_other_unusual_facts_are_named() -> None:
    last = structs.replace(LAST, restore_ms=8000, failures={"StorageUnavailableError": 3})
    around = replace(
        ON_B,
        move=ShardMove(5, 41, actor("a"), actor("b"), "spread evenly"),
        memory=MemoryUse(4_000_000_000, 3_900_000_000, 12_000_000_000),
        refusals={"FencedError": 1},
        storage={"repeated": 14},
    )
    text = explained(ended(1000, 10, 8020, 300, 300, 20, 250, rows=5_000_000, last=last), around)
    assert text.split("; ")[0].endswith(
        "8.0 s in shard 7 on node-b coming to version 41 after it was moved (spread evenly)"
    )
    assert text.split("; ")[1:] == [
        "it had 5,000,000 rows (median 1,000)",
        "commits of shard 7 failed before: StorageUnavailableError 3 times",
        "tasks were refused: FencedError 1 time",
        "the coordinator's requests to the object store: repeated 14 times",
        "the store actor of shard 7 has spilled 12.0 GB (limit 4.0 GB)",
    ]


def test_a_batch_without_known_phases_says_so() -> None:
    unknown = replace(ended(*[None] * 7), took_ms=9000)
    assert explained(unknown).endswith("it is not known where its time went")


def test_the_shard_that_committed_last_gives_its_batchs_times_and_each_batch_ends_once() -> None:
    record = StateRecord()
    first = structs.replace(
        ENTRY, version=3, batch_time_ms=1000, committed_at_ms=1100, apply_ms=50, write_ms=100, rows_in=5
    )
    last = structs.replace(first, partition_id=1, write_ms=400, rows_in=6, rows_late=2)
    record.add_lease(3, 0, 1050, 1060)
    record.add_commits([first], 1300, is_new=True)
    # Both stores of a shard report the rows that reached it; the times of the first one count.
    record.add_commits([last, structs.replace(last, store_name="other")], 1600, is_new=True)
    record.add_commits([first], 1650, is_new=False)
    assert record.end_batch(3, 1700) == EndedBatch(700, (100, None, None, 50, 400, 50, 100), 11, last)
    assert record.end_batch(3, 1900) is None
    assert record.counts["batches"] == 1
    assert (record.counts["commits"], record.counts["rows_in"], record.counts["rows_late"]) == (2, 11, 2)
    assert [sample.value for sample in record.samples("s", {}) if sample.name == "statefleet_batch_seconds"] == [0.7]
    assert not [sample for sample in record.samples("s", {}) if sample.name == "statefleet_batch_seconds"], (
        "exported once"
    )


def test_batches_of_a_run_that_was_replaced_do_not_end() -> None:
    record = StateRecord()
    record.add_commits([structs.replace(ENTRY, version=3)], 5, is_new=True)
    record.forget_run()
    assert record.end_batch(3, 9) is None


def test_rows_of_a_run_that_was_replaced_do_not_count_in_its_batch() -> None:
    record = StateRecord()
    record.add_commits([structs.replace(ENTRY, version=3, rows_in=5)], 5, is_new=True)
    record.add_commits([structs.replace(ENTRY, version=3, rows_in=7, run_id="another")], 6, is_new=True)
    ended_batch = record.end_batch(3, 9)
    assert ended_batch is not None
    assert ended_batch.rows_in == 7

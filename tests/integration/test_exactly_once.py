"""Exactly once, on real Ray and Spark: what dies is killed for real, in the middle of a query."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from coordinator.model.errors import StateMismatchError
from statefleet.fleet import Fleet, connect
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run
from tests.tasks import Tasks

VALUES = pa.schema([("v", pa.int64())])
FILES = [[(number * 37 % 101,) for number in range(start, start + 3000)] for start in range(0, 24_000, 3000)]


def oracle(files: list[list[tuple[int]]]) -> dict[int, int]:
    return dict(Counter(row[0] for file in files for row in file))


def final_counts(run: Run) -> dict[int, int]:
    """Return the newest complete emission."""
    newest = max(run.batches)
    return {row["v"]: row["count"] for row in run.batches[newest]}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def shards_differ(fleet: Fleet, name: str) -> bool:
    """Return whether a batch is under way: some shards have committed it and others have not."""
    for query in fleet.status()["queries"]:
        if query["name"] == name and query["version"] >= 1:
            return len({shard["version"] for shard in query["shards"]}) > 1
    return False


def kill_in_the_middle(fleet: Fleet, name: str, pid_of: Callable[[dict[str, Any]], int]) -> threading.Thread:
    """Return a thread that kills a process of the fleet once a batch is half committed."""

    def watch() -> None:
        while not shards_differ(fleet, name):
            time.sleep(0.002)
        kill(pid_of(fleet.status()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "pid_of",
    [
        pytest.param(lambda status: next(a["pid"] for a in status["store_actors"] if a["alive"]), id="store actor"),
        pytest.param(lambda status: status["coordinator"]["pid"], id="coordinator"),
    ],
)
def test_an_actor_killed_in_the_middle_of_a_batch_changes_nothing(
    fleet: Fleet, tmp_path: Path, name: str, pid_of: Callable[[dict[str, Any]], int]
) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    frame = fleet.stateful(feed.stream(), name=name, outputMode="complete", shards=4).groupBy("v").count()
    with Run(frame, "complete", tmp_path / "ck") as run:
        feed.add(FILES[0])
        run.wait()
        victim = pid_of(fleet.status())
        killer, added = kill_in_the_middle(fleet, name, pid_of), [FILES[0]]
        # Shards that commit in one append are never seen to differ, so batches go on until some were.
        for file in islice(cycle(FILES[1:]), 60):
            feed.add(file)
            added.append(file)
            run.wait()
            if not killer.is_alive():
                break
        killer.join(30)
        assert not killer.is_alive(), "no batch was seen half committed"
        assert final_counts(run) == oracle(added)
        assert pid_of(fleet.status()) != victim


def failing_once() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that fails once in each partition, after the stage's state has been committed.

    Spark starts a new Python worker after a failure, and a function of this module would have each import all that tests need.
    """

    def fail_first_attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from list(batches)
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("this task fails after its commit, on purpose")

    return fail_first_attempt


def test_a_task_that_fails_after_its_commit_is_not_applied_twice(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    counts = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("v").count()
    run = Run(counts.mapInArrow(failing_once(), counts.schema), "update", tmp_path / "ck")
    before = sum(metrics["replayed_answers"] for metrics in fleet.metrics().values())
    try:
        for file in FILES[:2]:
            feed.add(file)
        run.wait()
        latest = {row["v"]: row["count"] for batch in sorted(run.batches) for row in run.batches[batch]}
        assert latest == oracle(FILES[:2])
    finally:
        run.stop()
    replayed = sum(metrics["replayed_answers"] for metrics in fleet.metrics().values()) - before
    assert replayed == 4  # 2 shards, 2 batches, each answered again from what was recorded


def test_two_attempts_at_once_make_one_manifest_entry_and_equal_answers(fleet: Fleet, name: str) -> None:
    tasks = Tasks(fleet, name)
    tasks.apply(0, [1, 2])
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda attempt: tasks.apply(1, [2, 3, 3], attempt=attempt), range(8)))
    assert all(answer == [{"v": 2, "n": 2}, {"v": 3, "n": 2}] for answer in answers)
    assert [entry.version for entry in tasks.chain()] == [1, 2]


def test_a_second_query_on_the_same_state_is_refused(fleet: Fleet, name: str) -> None:
    tasks = Tasks(fleet, name)
    tasks.apply(0, [1])
    with pytest.raises(StateMismatchError, match="belongs to another query"):
        tasks.apply(0, [1], run_id="other-run", query_id="other")
    assert tasks.apply(1, [1]) == [{"v": 1, "n": 2}]


def test_a_checkpoint_ahead_of_a_missing_state_is_refused(fleet: Fleet, name: str) -> None:
    with pytest.raises(StateMismatchError, match="refusing to count from nothing"):
        Tasks(fleet, name).apply(7, [1])


def test_a_fleet_started_again_reads_everything_from_storage(spark: SparkSession, new_uri: NewUri, name: str) -> None:
    uri = new_uri()
    first = connect(uri)
    Tasks(first, name).apply(0, [1, 2])
    first.shutdown()
    second = connect(uri)
    try:
        tasks = Tasks(second, name)
        assert tasks.apply(1, [2], run_id="run-2") == [{"v": 2, "n": 2}]
        assert sum(metrics["bytes_loaded"] for metrics in second.metrics().values()) > 0
    finally:
        second.shutdown()

"""Spark's speculation runs a second attempt of a task beside the first, on another node: a batch counts once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from statefleet.fleet import Fleet, connect
from tests.cluster.nodes import ray_nodes, session_on
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

#: A task is tried a second time once it has run for a second, and one of the others has ended.
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "1s",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    "spark.sql.shuffle.partitions": "2",
}
#: Shorter than what makes a store actor hung.
PAUSE_S = 10


@pytest.fixture(scope="module")
def spark(new_uri: NewUri) -> Iterator[SparkSession]:
    with ray_nodes(), session_on("statefleet-speculation", SPECULATION) as session:
        yield session


@pytest.fixture
def fleet(spark: SparkSession, new_uri: NewUri) -> Iterator[Fleet]:
    connected = connect(new_uri())
    yield connected
    connected.shutdown()


def speculative_tasks(spark: SparkSession, run: Run) -> int:
    tracker, store = spark.sparkContext.statusTracker(), spark.sparkContext._jsc.sc().statusStore()  # type: ignore[attr-defined]
    jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(str(run.query.runId)))
    count = 0
    for stage in {stage for job in jobs if job is not None for stage in job.stageIds}:
        tasks = store.taskList(stage, 0, 1000)
        count += sum(tasks.apply(number).speculative() for number in range(tasks.size()))
    return count


def halt(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_attempts_of_a_task_at_once_count_once(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("v", pa.int64())]))
    with Run(fleet.stateful(feed.stream(), name=name, shards=3).groupBy("v").count(), "update", tmp_path / "ck") as run:
        for batch in range(1, 6):
            # The first and the second one make all processes ready.
            if batch in (3, 4):
                (query,) = fleet.status()["queries"]
                nodes = [shard["node_id"] for shard in query["shards"]]
                assert len(set(nodes)) > 1
                (pid,) = [actor["pid"] for actor in fleet.status()["store_actors"] if actor["node_id"] == nodes[0]]
                halting = threading.Thread(target=halt, args=(pid,))
                halting.start()
                time.sleep(0.5)
            feed.add([(value % 50,) for value in range(500)])
            assert {row["v"]: row["count"] for row in run.take()} == dict.fromkeys(range(50), 10 * batch)
            if batch in (3, 4):
                halting.join()
        assert speculative_tasks(spark, run) > 0
        (query,) = fleet.status()["queries"]
        assert [shard["version"] for shard in query["shards"]] == [5] * 3

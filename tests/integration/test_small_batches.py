"""A small batch is of one task, and every other of a task for each core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import FEW_ROWS, Feed, shuffled, stopping

VALUES = pa.schema([("v", pa.int64())])


def tasks_of_batches(
    counts: DataFrame, folder: Path, run: Callable[[StreamingQuery], None], mode: str = "update"
) -> tuple[list[int], Counter[int]]:
    """Return the number of tasks of each batch of a query of `v` and `count` that emits rows, and the newest counts."""
    tasks: list[int] = []
    newest: Counter[int] = Counter()

    def act(batch: DataFrame, batch_id: int) -> None:
        parts = batch.rdd.glom().collect()
        rows = [row for part in parts for row in part]
        assert len({row["v"] for row in rows}) == len(rows), "each key once"
        assert mode == "complete" or all(row["count"] > newest[row["v"]] for row in rows)
        newest.update({row["v"]: row["count"] - newest[row["v"]] for row in rows})
        if rows:
            tasks.append(len(parts))

    writer = counts.writeStream.outputMode(mode).foreachBatch(act)
    with stopping(writer.option("checkpointLocation", str(folder)).start()) as query:
        run(query)
    return tasks, newest


@pytest.mark.parametrize(
    ("rows", "is_shuffled", "mode", "of_one_task"),
    [
        # Nothing is known of the first batch.
        ([200, 200, 200], False, "update", [False, True, True]),
        ([200, FEW_ROWS, 200, FEW_ROWS + 1, 200, 200], False, "update", [False, True, True, True, False, True]),
        # Its file says that it is large.
        pytest.param([200, 300_000, 200], False, "update", [False, False, False], marks=pytest.mark.replay),
        ([200, 200], True, "update", [False, False]),
        # All groups are emitted.
        ([200, 200], False, "complete", [False, False]),
    ],
)
def test_a_small_batch_is_of_one_task_and_others_of_as_many_as_there_are_cores(
    spark: SparkSession,
    fleet: Fleet,
    tmp_path: Path,
    name: str,
    rows: list[int],
    is_shuffled: bool,
    mode: str,
    of_one_task: list[bool],
) -> None:
    cores = spark.sparkContext.defaultParallelism
    feed, shards = Feed(tmp_path / "in", VALUES), 5 * cores + 1
    values = shuffled(feed.stream(), "v") if is_shuffled else feed.stream()
    counts = fleet.stateful(values, name=name, shards=shards).groupBy("v").count()
    sent: Counter[int] = Counter()

    def run(query: StreamingQuery) -> None:
        for number in rows:
            file = [(value * value % 10_000_019,) for value in range(number)]
            sent.update(value for (value,) in file)
            feed.add(file)
            query.processAllAvailable()
        assert query.lastProgress["stateOperators"][0]["numShufflePartitions"] == shards  # type: ignore[index]

    tasks, newest = tasks_of_batches(counts, tmp_path / "ck", run, mode)
    assert tasks == [1 if of_one else cores for of_one in of_one_task]
    assert newest == sent
    (status,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
    assert [shard["version"] for shard in status["shards"]] == [len(rows)] * shards


@pytest.mark.parametrize(("inputs", "is_of_one_task"), [(16, True), (17, False)])
def test_one_task_reads_some_inputs_only(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, inputs: int, is_of_one_task: bool
) -> None:
    rate = spark.readStream.format("rate").option("rowsPerSecond", 40).option("numPartitions", inputs).load()
    counts = fleet.stateful(rate.selectExpr("value % 3 AS v"), name=name, shards=4).groupBy("v").count()

    def run(query: StreamingQuery) -> None:
        until(lambda: sum(progress["numInputRows"] > 0 for progress in query.recentProgress) == 3)

    (first, second, *_), _ = tasks_of_batches(counts, tmp_path / "ck", run)
    assert first > 1
    assert (second == 1) == is_of_one_task


@pytest.mark.parametrize(("milliseconds", "is_of_one_task"), [(FEW_ROWS - 100, True), (FEW_ROWS - 99, False)])
def test_a_batch_whose_offsets_move_far_is_not_small(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, milliseconds: int, is_of_one_task: bool
) -> None:
    # An offset of this source is a number of rows and a time, and both move.
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 100).option("numPartitions", 2)
    rows = rate.option("advanceMillisPerBatch", milliseconds).load().selectExpr("value % 3 AS v")
    counts = fleet.stateful(rows, name=name, shards=4).groupBy("v").count()

    def run(query: StreamingQuery) -> None:
        until(lambda: sum(progress["numInputRows"] > 0 for progress in query.recentProgress) == 3)

    (first, second, *_), _ = tasks_of_batches(counts, tmp_path / "ck", run)
    assert first > 1
    assert (second == 1) == is_of_one_task

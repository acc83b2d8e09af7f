"""A batch counts on every shard or on none, no matter what the user's code makes of it."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet, connect
from statefleet.map_partitions import map_partitions_with_state_store
from tests.conftest import NewUri
from tests.integration.streams import FEW_ROWS, Feed, Run, short_list, stopping

VALUES = pa.schema([("v", pa.int64())])
#: What is done with a batch; whether it reads all of it, and then gives its rows.
Act = Callable[[DataFrame], list[Row] | None]


def fails(row: Row) -> None:
    raise ValueError("a sink that is broken")


def swallow(frame: DataFrame) -> None:
    with contextlib.suppress(Py4JJavaError, PythonException):
        frame.foreach(fails)


def ignore(result: Any) -> None:
    """Not all of it was read."""


def in_another_thread(frame: DataFrame) -> list[Row]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(frame.collect).result()


def in_a_job_group(frame: DataFrame) -> list[Row]:
    frame.sparkSession.sparkContext.setJobGroup("mine", "a group of the user's own")
    return frame.collect()


def twice(frame: DataFrame) -> list[Row]:
    assert frame.count() == len(frame.collect())
    return frame.collect()


def cached(frame: DataFrame) -> list[Row]:
    frame.persist()
    frame.take(1)
    rows = frame.collect()
    frame.unpersist()
    return rows


ACTS: dict[str, Act] = {
    "nothing": lambda frame: None,
    "show": lambda frame: frame.show(),
    "take": lambda frame: ignore(frame.take(1)),
    "first": lambda frame: ignore(frame.first()),
    "isEmpty": lambda frame: ignore(frame.isEmpty()),
    "limit": lambda frame: ignore(frame.limit(2).collect()),
    "the first of an iterator": lambda frame: ignore(next(frame.toLocalIterator(), None)),
    "an error that is swallowed": swallow,
    "collect": lambda frame: frame.collect(),
    "twice": twice,
    "cached": cached,
    "a self join": lambda frame: frame.join(frame, ["v", "count"]).collect(),
    "another thread": in_another_thread,
    "a job group": in_a_job_group,
}


@pytest.mark.parametrize("seed", short_list([0, 1, 2], [0]))
def test_every_row_counts_once_no_matter_what_is_done_with_batches(
    fleet: Fleet, tmp_path: Path, name: str, seed: int
) -> None:
    dice = random.Random(seed)
    acts = [*dice.sample(sorted(ACTS), len(ACTS)), "collect"]
    feed = Feed(tmp_path / "in", VALUES)
    # After a batch of many rows the next one is shuffled, after another it is of one task.
    files = [[(dice.randrange(40),) for _ in range(dice.choice([60, FEW_ROWS + 1]))] for _ in acts]
    for file in files:
        feed.add(file)
    counts = fleet.stateful(feed.stream(), name=name, shards=7).groupBy("v").count()
    seen: dict[int, dict[int, int]] = {}

    def act(batch: DataFrame, batch_id: int) -> None:
        # Rows of those that it reads to their end.
        rows = ACTS[acts[batch_id]](batch)
        if rows is not None:
            seen[batch_id] = {row["v"]: row["count"] for row in rows}

    writer = counts.writeStream.outputMode("update").foreachBatch(act)
    with stopping(writer.option("checkpointLocation", str(tmp_path / "ck")).start()) as query:
        query.processAllAvailable()
    oracle: Counter[int] = Counter()
    for batch, file in enumerate(files):
        oracle.update(value for (value,) in file)
        if batch in seen:
            assert seen[batch] == {value: oracle[value] for (value,) in file}, acts[batch]
    assert len(files) - 1 in seen


def test_rows_that_no_action_reads_move_the_watermark_and_reach_the_operator_that_follows(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    times = pa.schema([("t", pa.timestamp("s", tz="UTC"))])
    feed = Feed(tmp_path / "in", times)
    inner = fleet.stateful(
        feed.stream().withWatermark("t", "1 second"), name=f"{name}-1", outputMode="append", shards=3
    )
    windows = inner.groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n"))
    outer = fleet.stateful(windows, name=f"{name}-2", outputMode="append", shards=2)
    totals = outer.groupBy(F.window("window", "10 seconds").alias("w")).agg(F.sum("n").alias("n"))
    sums: list[tuple[int, int]] = []

    def act(batch: DataFrame, batch_id: int) -> None:
        if batch_id % 2:
            sums.extend((row[0], row["n"]) for row in batch.select(F.col("w.start").cast("long"), "n").collect())

    for second in (1, 7, 12, 18, 30, 31, 50, 70, 90):
        feed.add([(second,)] * 3)
    query = totals.writeStream.outputMode("append").foreachBatch(act).option("checkpointLocation", str(tmp_path / "ck"))
    with stopping(query.start()) as running:
        running.processAllAvailable()
        states = {entry["name"]: entry["version"] for entry in fleet.status()["queries"]}
        assert states[f"{name}-1"] == states[f"{name}-2"] == running.lastProgress["batchId"] + 1  # type: ignore[index]
        assert all(n in (3, 6) for _, n in sums)
        assert sums


def test_limits_and_joins_above_an_operator_leave_no_shard_out(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    distinct = fleet.stateful(feed.stream(), name=name, shards=4).dropDuplicates(["v"])
    with Run(distinct.limit(3), "append", tmp_path / "ck") as run:
        for start in (0, 10, 20):
            feed.add([(value,) for value in range(start, start + 10)])
        assert len(run.take()) == 3
        (query,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
        assert query["state_rows"] == 30
        assert {shard["version"] for shard in query["shards"]} == {3}


def test_a_function_with_a_store_is_run_to_its_end_on_every_partition(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", VALUES)

    def count(store: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            keys = pa.table({"v": batch.column("v").unique()})
            old = store.multi_get(keys).column("n").fill_null(0)
            store.put(keys.append_column("n", pa.compute.add(old, 1)))
            yield from (pa.record_batch({"v": keys.column("v").combine_chunks()}) for _ in range(3))

    frame = map_partitions_with_state_store(
        feed.stream(),
        count,
        "v bigint",
        fleet=fleet,
        name=name,
        partition_by=["v"],
        keys=pa.schema([("v", pa.int64())]),
        values=pa.schema([("n", pa.int64())]),
        shards=3,
    )
    writer = frame.writeStream.foreachBatch(lambda batch, batch_id: ignore(batch.take(1)))
    with stopping(writer.option("checkpointLocation", str(tmp_path / "ck")).start()) as query:
        for _ in range(3):
            feed.add([(value,) for value in range(30)])
        query.processAllAvailable()
        (status,) = [status for status in fleet.status()["queries"] if status["name"] == name]
        assert {shard["version"] for shard in status["shards"]} == {3}
        assert status["state_rows"] == 30


@pytest.mark.replay
def test_a_state_put_back_from_an_older_copy_is_refused_each_time_and_the_right_copy_goes_on(
    spark: SparkSession, new_uri: NewUri, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "fleet"
    feed = Feed(tmp_path / "in", VALUES)

    def start(fleet: Fleet) -> Run:
        counts = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("v").count()
        return Run(counts, "update", tmp_path / "ck")

    def batches(count: int) -> None:
        fleet = connect(f"file://{folder}")
        run = start(fleet)
        try:
            for _ in range(count):
                feed.add([(1,), (2,), (3,)])
                run.wait()
        finally:
            run.stop()
            fleet.shutdown()

    batches(2)
    shutil.copytree(folder, tmp_path / "older")
    batches(2)
    shutil.copytree(folder, tmp_path / "newest")
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "older", folder)
    feed.add([(1,)])
    fleet = connect(f"file://{folder}")
    try:
        for _ in range(2):
            run = start(fleet)
            with pytest.raises(
                StreamingQueryException, match=r"batch 3 is finished.*put back the checkpoint of the same time"
            ):
                run.wait()
            run.stop()
    finally:
        fleet.shutdown()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "newest", folder)
    fleet = connect(f"file://{folder}")
    run = start(fleet)
    try:
        assert [tuple(row) for row in run.take()] == [(1, 5)]
    finally:
        run.stop()
        fleet.shutdown()

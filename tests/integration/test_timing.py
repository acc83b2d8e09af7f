"""In which batch things happen, and what Spark's progress says of them: as with Spark's own operators."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import Feed, Run, stopping

SECONDS = pa.schema([("t", pa.timestamp("us", tz="UTC"))])
VALUES = pa.schema([("v", pa.int64()), ("x", pa.int64())])


def at(*seconds: int) -> list[tuple[dt.datetime]]:
    return [(dt.datetime.fromtimestamp(second, dt.UTC),) for second in seconds]


def windows(frame: Any) -> DataFrame:
    counts: DataFrame = frame.groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n"))
    return counts.select(F.col("window.start").cast("long").alias("start"), "n")


def taken(frame: DataFrame, mode: str, checkpoint: Path) -> dict[int, list[tuple[Any, ...]]]:
    """Return what each batch of a backlog emits."""
    run = Run(frame, mode, checkpoint, available_now=True)
    batches = run.take_batches()
    run.stop()
    return batches


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_one_group_of_everything_is_emitted_in_every_batch(fleet: Fleet, tmp_path: Path, name: str, mode: str) -> None:
    feed = Feed(tmp_path / "in", SECONDS)
    for seconds in ((), (10, 11), (), (90,)):
        feed.add(at(*seconds))
    marked = feed.stream().withWatermark("t", "10 seconds")

    def totals(frame: Any) -> DataFrame:
        return frame.groupBy().agg(F.count("*").alias("n"), F.max("t").cast("long").alias("last"))  # type: ignore[no-any-return]

    ours = taken(totals(fleet.stateful(marked, name=name, outputMode=mode)), mode, tmp_path / "ck")
    assert ours == taken(totals(marked), mode, tmp_path / "ck-spark")
    assert ours[2] == [(2, 11)]


# -- complete mode -------------------------------------------------------------------------------------------------


def test_distinct_rows_of_a_complete_result_are_kept_by_spark_as_above_its_own(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    frames = fleet.stateful(feed.stream(), name=name, outputMode="complete", shards=2), feed.stream()
    with stopping(
        [
            Run(frame.groupBy("v").count().select("count").distinct().limit(9), "complete", tmp_path / f"ck{number}")
            for number, frame in enumerate(frames)
        ]
    ) as runs:
        for values in ((1, 2, 2), (1, 3, 2), (1, 1)):
            feed.add([(value, 0) for value in values])
            for run in runs:
                run.wait()
        fleet_rows, spark_rows = (run.take_batches() for run in runs)
        assert fleet_rows == spark_rows
        assert any(fleet_rows.values())


def test_what_spark_refuses_on_its_own_complete_aggregation_is_refused(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", VALUES)
    counts = fleet.stateful(feed.stream(), name=name, outputMode="complete").groupBy("v").count()
    spark_counts = feed.stream().groupBy("v").count()
    messages = []
    for frame in (counts, spark_counts):
        for above, mode in ((frame.groupBy("count").count(), "complete"), (frame, "append")):
            with pytest.raises(AnalysisException) as refused:
                Run(above, mode, tmp_path / "ck")
            messages.append(str(refused.value).partition(";")[0])
    assert [
        fleet_message.startswith(spark_message)
        for fleet_message, spark_message in zip(messages[:2], messages[2:], strict=True)
    ] == [True, True]


# -- progress ------------------------------------------------------------------------------------------------------


def test_the_end_of_a_run_is_reported_in_every_session_and_no_listener_gets_progress(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    """A listener of PySpark's is handed the progress of each batch by hundreds of calls of the JVM."""

    def is_active() -> bool:
        (status,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
        return bool(status["active"])

    for session in (spark, spark.newSession()):
        feed = Feed(tmp_path / "in", SECONDS, session)
        feed.add(at(10, 11))
        run = Run(
            windows(fleet.stateful(feed.stream().withWatermark("t", "10 seconds"), name=name, shards=2)),
            "update",
            tmp_path / "ck",
        )
        run.wait()
        assert is_active()
        run.stop()
        until(lambda: not is_active())
        listeners = [str(listener) for listener in session._jsparkSession.streams().listListeners()]
        assert [listener.partition("@")[0] for listener in listeners] == ["org.apache.spark.sql.statefleet.RunEvents$"]


def test_two_operators_over_the_same_rows_are_both_seen(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", SECONDS)
    marked = feed.stream().withWatermark("t", "10 seconds")
    first, second = (
        windows(fleet.stateful(marked, name=f"{name}-{which}", outputMode="append", shards=2)) for which in "ab"
    )
    with Run(first.unionAll(second), "append", tmp_path / "ck") as run:
        for seconds in ((10, 11, 16), (40,)):
            feed.add(at(*seconds))
            run.wait()
        assert run.take_batches() == {0: [], 1: [], 2: [], 3: [(10, 2), (10, 2), (15, 1), (15, 1)]}
        assert {len(states) for states in run.states().values()} == {2}


# -- processing time -----------------------------------------------------------------------------------------------


def test_timeouts_of_processing_time_fire_without_new_rows(fleet: Fleet, tmp_path: Path, name: str) -> None:
    def count(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"v": [key[0]], "n": [-1]})
            return
        state.update((sum(len(pdf) for pdf in pdfs),))
        state.setTimeoutDuration(500)
        yield pd.DataFrame({"v": [key[0]], "n": [state.get[0]]})

    feed = Feed(tmp_path / "in", VALUES)
    grouped = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("v")
    timeout = GroupStateTimeout.ProcessingTimeTimeout
    frame = grouped.applyInPandasWithState(count, "v long, n long", "n long", "update", timeout)
    with Run(frame, "update", tmp_path / "ck") as run:
        feed.add([(1, 0), (2, 0), (3, 0)])
        deadline = time.monotonic() + 120
        while sum(map(len, run.batches.values())) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        batches = {batch: sorted(tuple(row) for row in rows) for batch, rows in run.batches.items() if rows}
        assert batches.pop(0) == [(1, 1), (2, 1), (3, 1)]
        assert sorted(row for rows in batches.values() for row in rows) == [(1, -1), (2, -1), (3, -1)]
        # With nothing left that could time out the query rests.
        settled = None
        while settled is None or (settled["batchId"] < max(batches) and time.monotonic() < deadline):
            settled = run.query.lastProgress
            time.sleep(1)
        assert run.query.lastProgress["batchId"] == settled["batchId"]  # type: ignore[index]

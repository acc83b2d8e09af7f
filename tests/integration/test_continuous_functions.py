"""Functions and processors with state under trigger(continuous=..): called as rows come, and each epoch counts once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.state import GroupState

from statefleet import StatefulProcessor, StatefulProcessorHandle
from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.rate_epochs import (
    KEYS,
    await_epochs,
    committed,
    rate,
    read_by,
    run_for,
    shards_of,
    started,
    state_rows,
    view,
)
from tests.integration.streams import lose_store_actors, stopping


def counted(keys: pa.Table, rows: pa.Table, state: Any) -> pa.Table:
    """Add the rows of each key to its count; emit the counts."""
    sizes = pa.array(state.offsets[1:] - state.offsets[:-1], pa.int64())
    n = pc.add(state.get("n", 0), sizes)
    state.update({"n": n})
    return keys.append_column("n", n)


def counts_of(frame: DataFrame, fleet: Fleet, name: str, function: Any = counted) -> DataFrame:
    return (
        fleet.stateful(frame, name=name)
        .groupBy("k")
        .applyInArrowWithState(function, "k BIGINT, n BIGINT", "n BIGINT", "update", "NoTimeout")
    )


@pytest.mark.replay
def test_an_arrow_function_counts_each_row_once_in_each_run(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    counts, folder = counts_of(rate(spark), fleet, name), tmp_path / "checkpoint"
    for _ in range(2):
        run_for(started(counts, folder), folder, 4)
        rows = state_rows(fleet, name, folder)
        assert {row["k"]: row["n"] for row in rows} == read_by(folder, committed(folder))


def test_a_function_goes_on_after_its_store_actors_were_lost_and_between_rescales(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    counts, folder = counts_of(rate(spark), fleet, name), tmp_path / "checkpoint"
    with stopping(started(counts, folder)) as query:
        await_epochs(query, folder, 2)
        lose_store_actors(fleet)
        await_epochs(query, folder, 3)
        for shards in (4, 2):
            fleet.rescale(name, shards)
            until(lambda: query.exception() or shards_of(fleet, name) == shards)  # noqa: B023
            await_epochs(query, folder, 2)
    rows = state_rows(fleet, name, folder)
    assert {row["k"]: row["n"] for row in rows} == read_by(folder, committed(folder))


def emitted_once(key: tuple[int], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Sum the values of a key, and emit the sum when the watermark has passed its last row by a second."""
    if state.hasTimedOut:
        yield pd.DataFrame({"k": [key[0]], "total": [state.get[0]]})
        state.remove()
        return
    total = state.get[0] if state.exists else 0
    last = 0
    for frame in frames:
        total += int(frame["value"].sum())
        last = max(last, int(frame["at"].max().timestamp() * 1000))
    state.update((total,))
    state.setTimeoutTimestamp(max(last, state.getCurrentWatermarkMs()) + 1000)


@pytest.mark.replay
def test_a_pandas_function_is_called_for_keys_that_timed_out(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    # Ten rows of each key, a second of event time. Of two partitions one may be ahead by more than the watermark's delay.
    rows = rate(spark, 1).selectExpr("value div 10 as k", "value", "at").withWatermark("at", "2 seconds")
    totals = (
        fleet.stateful(rows, name=name)
        .groupBy("k")
        .applyInPandasWithState(emitted_once, "k long, total long", "total long", "append", "EventTimeTimeout")
    )
    folder = tmp_path / "checkpoint"
    run_for(started(totals, folder, "memory", name, mode="append"), folder, 25)
    emitted = [tuple(row) for row in spark.table(view(name)).collect()]
    assert len(emitted) == len({key for key, _ in emitted})
    assert all(total == sum(range(10 * key, 10 * key + 10)) for key, total in emitted)
    # Those that have not timed out have no result yet.
    rows_of_state = state_rows(fleet, name, folder)
    closed = {key for key, _ in emitted} - {row["k"] for row in rows_of_state}
    assert closed == set(range(max(closed) + 1))


class Alerts(StatefulProcessor):
    """Counts the rows of a key; a timer of processing time emits the count."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        n = self._n.get()[0] if self._n.exists() else 0
        if n == 0:
            self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 300)
        self._n.update((n + sum(len(frame) for frame in rows),))
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": [key[0]], "n": [self._n.get()[0]]})
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 300)

    def close(self) -> None: ...


@pytest.mark.replay
def test_timers_of_a_processor_fire_while_the_query_runs(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    alerts = (
        fleet.stateful(rate(spark), name=name)
        .groupBy("k")
        .transformWithStateInPandas(Alerts(), "k long, n long", "update", "processingTime")
    )
    folder = tmp_path / "checkpoint"
    run_for(started(alerts, folder, "memory", name), folder, 12)
    emitted: dict[int, list[int]] = {}
    for key, n in spark.table(view(name)).collect():
        emitted.setdefault(key, []).append(n)
    assert len(emitted) == KEYS
    assert all(counts == sorted(counts) and len(counts) > 2 for counts in emitted.values())


@pytest.mark.replay
def test_epochs_that_failed_and_were_repeated_count_once(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    folder, broken, failed = tmp_path / "checkpoint", tmp_path / "broken", tmp_path / "failed"

    def counted_unless_broken(keys: pa.Table, rows: pa.Table, state: Any) -> pa.Table:
        if broken.exists():
            failed.touch()
            raise ValueError("it is broken")
        return counted(keys, rows, state)

    counts = counts_of(rate(spark), fleet, name, counted_unless_broken)
    with stopping(started(counts, folder, epoch="1 second")) as query:
        await_epochs(query, folder, 1)
        # Spark's log has the end of an epoch that failed; repeated, the epoch has another end; and then the next one fails.
        for _ in range(2):
            broken.touch()
            until(failed.exists)
            broken.unlink()
            await_epochs(query, folder, 1)
            failed.unlink()
    rows = state_rows(fleet, name, folder)
    assert {row["k"]: row["n"] for row in rows} == read_by(folder, committed(folder))


def failing(keys: pa.Table, rows: pa.Table, state: Any) -> pa.Table:
    raise ValueError("the user's own error")


@pytest.mark.replay
def test_an_error_of_the_function_ends_the_query_with_it(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    run_for(started(counts_of(rate(spark), fleet, name), folder), folder, 2)
    query = started(counts_of(rate(spark), fleet, name, failing), folder)
    with stopping(query):
        until(lambda: query.exception() is not None)
    assert "the user's own error" in str(query.exception())
    rows = state_rows(fleet, name, folder)
    assert {row["k"]: row["n"] for row in rows} == read_by(folder, committed(folder)), "what counts is safe"

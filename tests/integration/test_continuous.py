"""Stateful operators under trigger(continuous=..): each epoch counts once, and what cannot run so is refused by a sentence."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from store_actors.epochs.shard import MOST_HELD_BYTES
from tests.clocks import until
from tests.integration.rate_epochs import (
    COLUMNS,
    KEYS,
    await_epochs,
    committed,
    comparable,
    rate,
    read_by,
    rows_read,
    run_for,
    shards_of,
    started,
    state_rows,
    values_read,
    view,
)
from tests.integration.streams import lose_store_actors, stopping


def batch_of(spark: SparkSession, folder: Path, epoch: int) -> DataFrame:
    """Return the rows that were read up to the end of an epoch, as a table."""
    return spark.createDataFrame([(value,) for value in values_read(folder, epoch)], "value long").selectExpr(*COLUMNS)


def test_state_is_what_the_offsets_of_the_last_epoch_say_in_each_run(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    counts = (
        fleet.stateful(rate(spark), name=name).groupBy("k").agg(F.count("*").alias("n"), F.max("value").alias("top"))
    )
    folder = tmp_path / "checkpoint"
    for _ in range(3):
        run_for(started(counts, folder), folder, 5)
        epoch = committed(folder)
        rows = fleet.state(name).at(epoch + 1).scan().to_arrow().to_pylist()
        assert {row["k"]: row["n"] for row in rows} == read_by(folder, epoch)


def test_results_come_while_the_query_runs_and_the_newest_are_the_state(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    # A task of the query has a core for as long as it runs.
    counts = fleet.stateful(rate(spark, 1), name=name).groupBy("k").count()
    folder = tmp_path / "checkpoint"
    with stopping(started(counts, folder, "memory", name)) as query:
        until(lambda: query.exception() or spark.table(view(name)).count() > 100)
    emitted = [tuple(row) for row in spark.table(view(name)).collect()]
    assert len(emitted) == len(set(emitted)), "a group is emitted when it has changed"
    state = fleet.state(name).at(committed(folder) + 1).scan().to_arrow().to_pylist()
    assert {row["k"]: row["count"] for row in state} == {
        key: max(n for k, n in emitted if k == key) for key, _ in emitted
    }


def message_threads(spark: SparkSession) -> int:
    """Return how many threads of Spark's driver take messages: one that an error ends is lost to the session."""
    threads = spark._jvm.Thread.getAllStackTraces().keySet().toArray()  # type: ignore[union-attr]
    return sum(thread.getName().startswith("dispatcher-event-loop") for thread in threads)


def test_a_query_goes_on_by_itself_after_its_store_actors_were_lost(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    taking_messages = message_threads(spark)
    counts = fleet.stateful(rate(spark), name=name).groupBy("k").agg(F.count("*").alias("n"))
    folder = tmp_path / "checkpoint"
    with stopping(started(counts, folder)) as query:
        for _ in range(2):
            await_epochs(query, folder, 3)
            lose_store_actors(fleet)
        await_epochs(query, folder, 3)
    assert message_threads(spark) == taking_messages
    epoch = committed(folder)
    rows = fleet.state(name).at(epoch + 1).scan().to_arrow().to_pylist()
    assert {row["k"]: row["n"] for row in rows} == read_by(folder, epoch)


def test_a_running_query_is_rescaled_between_epochs(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    counts = fleet.stateful(rate(spark), name=name, shards=2).groupBy("k").agg(F.count("*").alias("n"))
    folder = tmp_path / "checkpoint"
    with stopping(started(counts, folder)) as query:
        for shards in (6, 2):
            await_epochs(query, folder, 2)
            fleet.rescale(name, shards)
            until(lambda: query.exception() or shards_of(fleet, name) == shards)  # noqa: B023
            await_epochs(query, folder, 2)
    epoch = committed(folder)
    rows = fleet.state(name).at(epoch + 1).scan().to_arrow().to_pylist()
    assert {row["k"]: row["n"] for row in rows} == read_by(folder, epoch)


@pytest.mark.parametrize("lost", ["commits", "commits and offsets"])
def test_an_epoch_that_counts_is_in_sparks_logs_after_the_next_start(
    lost: str, spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    """The driver ends after an epoch counts, and before Spark's logs have it."""
    counts = fleet.stateful(rate(spark), name=name).groupBy("k").agg(F.count("*").alias("n"))
    folder = tmp_path / "checkpoint"
    run_for(started(counts, folder), folder, 3)
    epoch = committed(folder)
    read = read_by(folder, epoch)
    for log in lost.split(" and "):
        for file in (folder / log).glob(f"*{epoch}*"):
            file.unlink()
    run_for(started(counts, folder), folder, 3)
    assert read_by(folder, epoch) == read
    last = committed(folder)
    rows = fleet.state(name).at(last + 1).scan().to_arrow().to_pylist()
    assert last > epoch
    assert {row["k"]: row["n"] for row in rows} == read_by(folder, last)


def test_a_caller_waits_for_all_rows_that_are_there(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    # One row in ten seconds.
    stream = spark.readStream.format("rate").option("rowsPerSecond", 1).option("rampUpTime", 100).load()
    counts = fleet.stateful(stream, name=name).groupBy().count()
    with stopping(started(counts, tmp_path / "checkpoint")) as query:
        query.processAllAvailable()
    assert query.exception() is None


def test_a_row_that_fails_ends_the_query_with_its_own_error(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    checked = rate(spark).selectExpr("k", "if(value < 20, value, raise_error('no such value')) as value")
    counts = fleet.stateful(checked, name=name).groupBy("k").agg(F.max("value").alias("top"))
    with stopping(started(counts, tmp_path / "checkpoint")) as query:
        until(lambda: query.exception() is not None)
    assert "no such value" in str(query.exception())
    assert "goes on from there when it is started again" in str(query.exception())


def test_each_key_is_emitted_once(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    firsts = fleet.stateful(rate(spark), name=name).dropDuplicates(["k"])
    run_for(started(firsts, tmp_path / "checkpoint", "memory", name), tmp_path / "checkpoint", 5)
    assert sorted(row["k"] for row in spark.table(view(name)).collect()) == list(range(KEYS))


@pytest.mark.parametrize(
    "build",
    [
        lambda rows: rows.groupBy().agg(F.count("*").alias("n")),
        lambda rows: rows.groupBy(F.struct("k", (F.col("k") % 2).alias("odd")).alias("s")).agg(F.collect_list("value")),
        lambda rows: rows.groupBy((F.col("k") + F.lit(Decimal(10**25))).alias("k")).agg(
            F.sum(F.col("value").cast("decimal(20,2)")).alias("total")
        ),
        lambda rows: rows.groupBy(F.window("at", "5 seconds"), "k").agg(F.count("*").alias("n")),
    ],
    ids=["global", "nested", "wide decimal", "window"],
)
def test_state_is_that_of_a_batch_after_runs_and_a_rescale(
    build: Callable[[Any], DataFrame], spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    for _ in range(2):
        run_for(started(build(fleet.stateful(rate(spark), name=name)), folder), folder, 3)
    expected = build(batch_of(spark, folder, committed(folder))).collect()
    assert comparable(state_rows(fleet, name, folder)) == comparable(row.asDict(recursive=True) for row in expected)


def test_the_first_rows_of_an_order_are_those_of_a_batch(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    first = fleet.stateful(rate(spark, 1), name=name).topN(2, "k", F.desc("value"))
    run_for(started(first, folder, "memory", name), folder, 4)
    values = values_read(folder, committed(folder))
    newest = {(row["k"], row["rank"]): row["value"] for row in spark.table(view(name)).collect()}
    expected = {
        key: sorted((value for value in values if value % KEYS == key), reverse=True)[:2] for key in range(KEYS)
    }
    assert newest == {(key, rank): value for key, of in expected.items() for rank, value in enumerate(of, 1)}


def test_rows_that_are_held_until_the_seal_stop_the_source_and_not_the_query(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    # A shard holds 64 MiB, its task 16 MiB, the source a thousand rows: of the 24,000 rows of an epoch some 5,000, for which a
    # slow machine takes six seconds.
    folder, size = tmp_path / "checkpoint", 20_000
    rows = rate(spark, 1, rows=3000).withColumn("text", F.repeat(F.lit("x"), size))
    first = fleet.stateful(rows, name=name, shards=1).topN(2, "k", F.desc("value")).drop("text")
    run_for(started(first, folder, epoch="8 seconds"), folder, 3)
    read = rows_read(folder, range(-1, committed(folder) + 1))
    most = max(later - before for before, later in pairwise(read))
    assert 3000 < most < (MOST_HELD_BYTES + 3 * 2**24) / size + 2048
    values = values_read(folder, committed(folder))
    kept = {(row["k"], row["value"]) for row in state_rows(fleet, name, folder)}
    assert kept == {
        (key, value) for key in range(KEYS) for value in sorted(value for value in values if value % KEYS == key)[-2:]
    }


@pytest.mark.parametrize(
    "group",
    [lambda: F.window("at", "1 second"), lambda: F.session_window("at", "500 milliseconds")],
    ids=["window", "session"],
)
def test_a_group_is_emitted_when_the_watermark_has_closed_it(
    group: Callable[[], Any], spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    rows = fleet.stateful(rate(spark, 1).withWatermark("at", "2 seconds"), name=name)
    counts = rows.groupBy(group().alias("of"), "k").agg(F.count("*").alias("n"))
    run_for(started(counts, folder, "memory", name, mode="append"), folder, 8)
    emitted = [row.asDict(recursive=True) for row in spark.table(view(name)).collect()]
    values = values_read(folder, committed(folder))
    watermark = datetime(1970, 1, 1) + timedelta(seconds=60 + max(values) / 10 - 2)
    is_closed = [row["of"]["end"] <= watermark for row in emitted]
    assert len(emitted) > 3
    assert all(is_closed)
    kept = state_rows(fleet, name, folder)
    expected = batch_of(spark, folder, committed(folder)).groupBy(group().alias("of"), "k").agg(F.count("*").alias("n"))
    assert comparable([*emitted, *kept]) == comparable(row.asDict(recursive=True) for row in expected.collect())


def test_keys_are_forgotten_by_the_watermark(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    rows = fleet.stateful(rate(spark, 1).withWatermark("at", "1 second"), name=name)
    keyed = rows.withColumn("pair", F.floor(F.col("value") / 2)).dropDuplicatesWithinWatermark(["pair"])
    run_for(started(keyed, folder, "memory", name, mode="append"), folder, 6)
    values = values_read(folder, committed(folder))
    assert sorted(row["value"] for row in spark.table(view(name)).collect()) == [
        value for value in values if value % 2 == 0
    ]
    assert 0 < len(state_rows(fleet, name, folder)) <= 12


@pytest.mark.parametrize(
    ("build", "mode", "why"),
    [
        (
            lambda rows: rows.groupBy("k").count(),
            "complete",
            "emits in update mode or in append mode; nothing was started",
        ),
        (lambda rows: rows.groupBy("k").count(), "append", "append mode needs a watermark"),
    ],
    ids=["complete", "append without a watermark"],
)
def test_what_cannot_run_continuously_is_refused(
    build: Callable[..., DataFrame],
    mode: str,
    why: str,
    spark: SparkSession,
    fleet: Fleet,
    tmp_path: Path,
    name: str,
) -> None:
    writer = (
        build(fleet.stateful(rate(spark), name=name))
        .writeStream.outputMode(mode)
        .format("memory")
        .queryName(view(name))
    )
    with pytest.raises(AnalysisException, match=why):
        writer.trigger(continuous="1 second").option("checkpointLocation", str(tmp_path)).start()

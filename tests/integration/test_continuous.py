"""Stateful operators under trigger(continuous=..): each epoch counts once, and what cannot run so is refused by a sentence."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import stopping

PARTITIONS, KEYS = 2, 7


def rate(spark: SparkSession, partitions: int = PARTITIONS) -> DataFrame:
    stream = spark.readStream.format("rate").option("rowsPerSecond", 200)
    return stream.option("numPartitions", partitions).load().selectExpr(f"value % {KEYS} as k", "value")


def view(name: str) -> str:
    return name.replace("-", "_")


def started(frame: DataFrame, folder: Path, sink: str = "noop", name: str = "counted") -> StreamingQuery:
    writer = frame.writeStream.format(sink).queryName(view(name)).outputMode("update")
    return writer.trigger(continuous="200 milliseconds").option("checkpointLocation", str(folder)).start()


def committed(folder: Path) -> int:
    """Return the last epoch in Spark's commit log; -1 without any."""
    return max((int(file.name) for file in (folder / "commits").glob("[0-9]*")), default=-1)


def read_by(folder: Path, epoch: int) -> Counter[int]:
    """Return how many rows of each key Spark's offset log says were read up to the end of an epoch."""
    last = json.loads((folder / "offsets" / str(epoch)).read_text().splitlines()[-1])
    return Counter(
        value % KEYS for partition, at in last.items() for value in range(int(partition), at["value"] + 1, PARTITIONS)
    )


def shards_of(fleet: Fleet, name: str) -> int:
    (state,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
    return len(state["shards"])


def await_epochs(query: StreamingQuery, folder: Path, epochs: int) -> None:
    first = committed(folder)
    until(lambda: query.exception() or committed(folder) >= first + epochs)
    assert query.exception() is None


def run_for(query: StreamingQuery, folder: Path, epochs: int) -> None:
    """Have a query commit some epochs, and stop it."""
    with stopping(query):
        await_epochs(query, folder, epochs)
    assert query.exception() is None


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


def test_a_query_goes_on_by_itself_after_its_store_actors_were_lost(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    counts = fleet.stateful(rate(spark), name=name).groupBy("k").agg(F.count("*").alias("n"))
    folder = tmp_path / "checkpoint"
    with stopping(started(counts, folder)) as query:
        for _ in range(2):
            await_epochs(query, folder, 3)
            for actor in fleet.status()["store_actors"]:
                if actor.get("alive", True):
                    os.kill(actor["pid"], signal.SIGKILL)
        await_epochs(query, folder, 3)
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
    ("build", "mode", "why"),
    [
        (lambda rows: rows.groupBy("k").count(), "complete", "emits in update mode"),
        (lambda rows: rows.topN(2, "k", "value"), "update", "topN runs in batches"),
        (lambda rows: rows.groupBy("k").agg(F.collect_list("value")), "update", "a column of type ARRAY"),
        (lambda rows: rows.groupBy().count(), "update", "without any column"),
    ],
    ids=["complete", "topN", "list", "global"],
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
    with pytest.raises(AnalysisException, match=f"{why}.*nothing was started"):
        writer.trigger(continuous="1 second").option("checkpointLocation", str(tmp_path)).start()

"""Nexmark's queries as streaming jobs on the fleet: final tables equal the batch oracles, also after restarts and kills."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.nexmark.files import read_batch, read_stream, without_end, write_end, write_events
from benchmarks.nexmark.generator import Nexmark
from benchmarks.nexmark.oracle import ORACLES
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.query import FleetOperators
from statefleet.fleet import Fleet
from tests.integration.streams import short_list

EVENTS = 20_000
BATCH = 5_000
#: With the one that ends the stream.
BATCHES = EVENTS // BATCH + 1
SHARDS = 2
#: 100 s of events round a midnight, out of order by up to half a second.
NEXMARK = Nexmark(rate=200, start=(1_735_776_000 - 40) * 1_000_000, out_of_order=100)

Rows = list[tuple[Any, ...]]
Expected = Callable[[str], tuple[list[str], Rows]]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of all events, and the end of the stream."""
    folder = tmp_path_factory.mktemp("nexmark")
    write_events(folder, NEXMARK, EVENTS, BATCH)
    write_end(folder, NEXMARK, EVENTS, BATCH)
    return folder


@pytest.fixture(scope="module")
def expected(spark: SparkSession, events: Path) -> Expected:
    """Return an oracle's columns and rows; without the end of the stream, where it is what closes the others."""
    inputs = read_batch(spark, events)

    def of(name: str) -> tuple[list[str], Rows]:
        table = ORACLES[name].answer(without_end(inputs) if QUERIES[name].closes else inputs)
        return sorted(table.columns), rows_of(table)

    return of


def rows_of(table: DataFrame) -> Rows:
    return sorted((tuple(row) for row in table.select(*sorted(table.columns)).collect()), key=repr)


class Job:
    """A query of the fleet over a folder of events."""

    def __init__(self, spark: SparkSession, fleet: Fleet, name: str, query: str, folder: Path) -> None:
        self.spark, self.fleet, self.name, self.query, self.folder = spark, fleet, name, QUERIES[query], folder

    def start(self, events: Path) -> tuple[StreamingQuery, str]:
        """Start the query over all events there are now; return it and the name of its first state."""
        ops = FleetOperators(self.fleet, self.name, SHARDS)
        emitted = self.query.build(ops, read_stream(self.spark, events))

        def keep(rows: DataFrame, batch: int) -> None:
            # A repeated batch replaces its own folder.
            rows.write.mode("overwrite").parquet(str(self.folder / "results" / f"batch={batch}"))

        writer = emitted.writeStream.outputMode(self.query.mode).trigger(availableNow=True).foreachBatch(keep)
        return writer.option("checkpointLocation", str(self.folder / "checkpoint")).start(), ops.states[0]

    def run(self, events: Path) -> None:
        self.start(events)[0].awaitTermination()

    def done(self) -> int:
        """Return how many files of each stream were read up to the newest finished micro-batch: Spark has some without data, too."""
        checkpoint = self.folder / "checkpoint"
        finished = [int(file.name) for file in (checkpoint / "commits").glob("*") if file.name.isdigit()]
        if not finished:
            return 0
        # A version, the metadata of Spark's plan, and a line for each source.
        _, _, *sources = (checkpoint / "offsets" / str(max(finished))).read_text().splitlines()
        return max(int(json.loads(source)["logOffset"]) + 1 for source in sources if source != "-")

    def rows(self) -> tuple[list[str], Rows]:
        """Return the query's answer: of each key the row that was emitted last, in the form of the oracle's."""
        emitted = self.spark.read.parquet(str(self.folder / "results"))
        newest_first = Window.partitionBy(*self.query.key).orderBy(F.desc("batch"))
        newest = emitted.withColumn("place", F.row_number().over(newest_first)).where("place = 1")
        table = self.query.finish(newest.drop("place", "batch"))
        return sorted(table.columns), rows_of(table)


def wait_for_a_batch_under_way(fleet: Fleet, state: str, query: StreamingQuery) -> None:
    """Wait until a shard is in the second micro-batch, which other shards, and later operators, have not finished."""
    while query.isActive:
        shards = [shard for entry in fleet.status()["queries"] if entry["name"] == state for shard in entry["shards"]]
        if any(shard["version"] >= 2 for shard in shards):
            return
        time.sleep(0.002)


def test_every_oracle_has_a_query() -> None:
    assert list(QUERIES) == list(ORACLES)


def test_every_query_is_one_that_the_fleet_runs(spark: SparkSession, fleet: Fleet, name: str, events: Path) -> None:
    """Few of them run with every change; what the fleet refuses it refuses when they are built."""
    inputs = read_stream(spark, events)
    for query in QUERIES.values():
        assert query.build(FleetOperators(fleet, f"{name}-{query.name}", SHARDS), inputs).isStreaming


@pytest.mark.parametrize("query", short_list(QUERIES, ["q5"]))
def test_the_final_table_equals_the_oracle(
    spark: SparkSession,
    fleet: Fleet,
    tmp_path: Path,
    name: str,
    events: Path,
    expected: Expected,
    query: str,
) -> None:
    job = Job(spark, fleet, name, query, tmp_path)
    job.run(events)
    assert job.rows() == expected(query)


@pytest.mark.replay
@pytest.mark.parametrize("query", ["q5", "q9", "q16"])
def test_a_restart_in_the_middle_changes_nothing(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, events: Path, expected: Expected, query: str
) -> None:
    job = Job(spark, fleet, name, query, tmp_path)
    running, state = job.start(events)
    wait_for_a_batch_under_way(fleet, state, running)
    running.stop()
    assert 1 <= job.done() < BATCHES
    job.run(events)
    assert job.done() == BATCHES
    assert job.rows() == expected(query)


@pytest.mark.replay
@pytest.mark.parametrize("query", ["q8", "q15", "q19"])
def test_a_store_actor_killed_in_the_middle_changes_nothing(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, events: Path, expected: Expected, query: str
) -> None:
    job = Job(spark, fleet, name, query, tmp_path)
    running, state = job.start(events)
    wait_for_a_batch_under_way(fleet, state, running)
    done = job.done()
    victims = store_actors(fleet)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    running.awaitTermination()
    assert done < BATCHES
    assert store_actors(fleet).isdisjoint(victims)
    assert job.rows() == expected(query)


def store_actors(fleet: Fleet) -> set[int]:
    """Return the process ids of store actors that are alive."""
    return {actor["pid"] for actor in fleet.status()["store_actors"] if actor["alive"]}

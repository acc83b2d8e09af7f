"""Nexmark's queries as streaming jobs on the fleet: final tables equal the batch oracles, also after restarts and kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.nexmark.__main__ import execute, main, parse, prepare
from benchmarks.nexmark.files import read_batch, without_end, write_end, write_events
from benchmarks.nexmark.generator import Nexmark
from benchmarks.nexmark.oracle import ORACLES
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.query import FleetOperators
from benchmarks.nexmark.run import answer, batches_done, start
from coordinator.model.errors import InvalidRequestError
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
        checkpoint = str(self.folder / "checkpoint")
        return start(self.spark, self.query, ops, events, checkpoint, self.folder / "results"), ops.states[0]

    def run(self, events: Path) -> None:
        self.start(events)[0].awaitTermination()

    def done(self) -> int:
        return batches_done(self.folder / "checkpoint")

    def rows(self) -> tuple[list[str], Rows]:
        table = answer(self.spark, self.query, self.folder / "results")
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


@pytest.mark.replay
def test_the_job_makes_events_runs_over_them_and_goes_on_when_there_are_more(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for events, read in ((1000, 1000), (2000, 1000), (2000, 0)):
        sizes = ["--events", str(events), "--batch-events", "500", "--rate", "100"]
        options = parse(["q17", "--folder", str(tmp_path), "--name", name, "--shards", "2", "--top", "3", *sizes])
        prepare(options)
        execute(spark, fleet, options)
        printed = capsys.readouterr().out
        assert f"{read:,} events of all three streams in" in printed
        assert "avg_price" in printed
    inputs = read_batch(spark, tmp_path / "events")
    table = answer(spark, QUERIES["q17"], tmp_path / "results-q17")
    assert rows_of(table) == rows_of(ORACLES["q17"].answer(inputs))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere"], "the input folder has no Nexmark events"),
        (["--events", "100", "--rate", "0"], "a Nexmark stream needs a rate of at least 1"),
    ],
)
def test_the_job_says_in_one_line_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["q5", "--folder", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_events_that_have_come_to_their_end_are_not_continued(tmp_path: Path) -> None:
    def ask(events: int) -> None:
        prepare(parse(["q5", "--folder", str(tmp_path), "--events", str(events), "--batch-events", "500", "--end"]))

    ask(1000)
    ask(1000)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        ask(2000)

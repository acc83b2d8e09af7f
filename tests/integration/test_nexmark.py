"""Nexmark's queries as streaming jobs on the fleet: final tables equal plain Python's, also with ties, and after restarts and kills."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import TimestampType

from benchmarks.harness import FLEET, Operators
from benchmarks.nexmark.files import read_stream, write_batch, write_events
from benchmarks.nexmark.generator import Events, Nexmark
from benchmarks.nexmark.queries import QUERIES
from statefleet.fleet import Fleet
from tests.integration.nexmark_oracle import CLOSING, KEYS, ORACLES, Tables, finished, valid_bids, write_end
from tests.integration.streams import short_list

EVENTS = 20_000
BATCH = 5_000
#: With the one that ends the stream.
BATCHES = EVENTS // BATCH + 1
SHARDS = 2
MIDNIGHT = 1_735_776_000 * 1_000_000
#: 100 s of events round a midnight, out of order by up to half a second.
NEXMARK = Nexmark(rate=200, start=MIDNIGHT - 40_000_000, out_of_order=100)
#: 780 s of events round a midnight, to be made coarse.
COARSE, COARSE_EVENTS, COARSE_BATCH = Nexmark(rate=5, start=MIDNIGHT - 90_000_000), 3_900, 975

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
def expected(events: Path) -> Expected:
    """Return an oracle's columns and rows; without the end of the stream, where it is what closes the others."""
    return expected_of(events, NEXMARK.events(0, EVENTS))


def expected_of(folder: Path, without_end: Events) -> Expected:
    whole = Tables.of(pq.read_table(folder / name) for name in Events._fields)

    def of(name: str) -> tuple[list[str], Rows]:
        rows = list(ORACLES[name](Tables.of(without_end) if name in CLOSING else whole))
        columns = sorted(rows[0])
        assert len(rows) > 1
        return columns, sorted((tuple(row[column] for column in columns) for row in rows), key=repr)

    return of


def rows_of(table: DataFrame) -> Rows:
    """Return sorted rows with times in microseconds, columns by name."""
    times = {field.name for field in table.schema if isinstance(field.dataType, TimestampType)}
    columns = [F.unix_micros(c).alias(c) if c in times else F.col(c) for c in sorted(table.columns)]
    return sorted((tuple(row) for row in table.select(*columns).collect()), key=repr)


def replace(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
    for name, column in columns.items():
        batch = batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), column)
    return batch


def coarse(events: Events) -> Events:
    """Return events with times in steps of 5 s, expiries of 60 s, 40 prices and a second hot auction: ties and edges everywhere."""

    def floor(batch: pa.RecordBatch, column: str = "dateTime", seconds: int = 5) -> pa.Array:
        return pc.floor_temporal(batch.column(column), seconds, "second")

    price = pa.array([(price % 40) ** 4 for price in events.bids.column("price").to_pylist()])
    hot = pa.array([number % 2 for number in events.bids.column("eventNumber").to_pylist()])
    auction = pc.add(events.bids.column("auction"), hot)
    return Events(
        replace(events.persons, dateTime=floor(events.persons)),
        replace(events.auctions, dateTime=floor(events.auctions), expires=floor(events.auctions, "expires", 60)),
        replace(events.bids, dateTime=floor(events.bids), price=price, auction=auction),
    )


class Job:
    """A query of the fleet over a folder of events."""

    def __init__(self, spark: SparkSession, fleet: Fleet, name: str, query: str, folder: Path) -> None:
        self.spark, self.fleet, self.name, self.query, self.folder = spark, fleet, name, query, folder

    def start(self, events: Path) -> tuple[StreamingQuery, str]:
        """Start the query over all events there are now; return it and the name of its first state."""
        ops = Operators(self.fleet, FLEET, SHARDS, self.name)
        emitted = QUERIES[self.query].build(ops, read_stream(self.spark, events))

        def keep(rows: DataFrame, batch: int) -> None:
            # A repeated batch replaces its own folder.
            rows.write.mode("overwrite").parquet(str(self.folder / "results" / f"batch={batch}"))

        writer = emitted.writeStream.outputMode(QUERIES[self.query].mode).trigger(availableNow=True).foreachBatch(keep)
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
        newest_first = Window.partitionBy(*KEYS[self.query]).orderBy(F.desc("batch"))
        newest = emitted.withColumn("place", F.row_number().over(newest_first)).where("place = 1")
        table = finished(self.query, newest.drop("place", "batch"))
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
        assert query.build(Operators(fleet, FLEET, SHARDS, f"{name}-{query.name}"), inputs).isStreaming


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
@pytest.mark.parametrize("query", QUERIES)
def test_the_final_table_equals_the_oracle_where_there_are_ties_and_edges(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, query: str
) -> None:
    events = tmp_path / "events"
    for batch in range(COARSE_EVENTS // COARSE_BATCH):
        write_batch(events, batch, coarse(COARSE.events(batch * COARSE_BATCH, (batch + 1) * COARSE_BATCH)))
    write_end(events, COARSE, COARSE_EVENTS, COARSE_BATCH)
    job = Job(spark, fleet, name, query, tmp_path)
    job.run(events)
    assert job.rows() == expected_of(events, coarse(COARSE.events(0, COARSE_EVENTS)))(query)


def test_the_coarse_events_reach_the_edges_that_the_oracles_settle() -> None:
    """Two days, more than ten auctions of a seller, ties, inclusive ends and sessions that touch."""
    tables = Tables.of(coarse(COARSE.events(0, COARSE_EVENTS)))
    valid = list(valid_bids(tables))
    assert {bid["dateTime"] >= MIDNIGHT for bid in tables.bids} == {False, True}
    assert max(len(of) for of in by(valid, lambda pair: pair[0]["seller"])) > 10
    hottest = list(ORACLES["q5"](tables))
    assert len(hottest) > len({row["starttime"] for row in hottest})
    assert any(row["dateTime"] == row["endtime"] for row in ORACLES["q7"](tables))
    times = [sorted(bid["dateTime"] for bid in of) for of in by(tables.bids, lambda bid: bid["bidder"])]
    assert any(after - before == 10_000_000 for of in times for before, after in itertools.pairwise(of))
    for edge in ("dateTime", "expires"):
        assert any(auction[edge] == bid["dateTime"] for auction, of in valid for bid in of)
    assert any(sum(bid["price"] == max(b["price"] for b in of) for bid in of) > 1 for _, of in valid)
    assert len({(auction["seller"], auction["expires"]) for auction, _ in valid}) < len(valid)


def by(values: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return the values grouped by a key."""
    return [list(group) for _, group in itertools.groupby(sorted(values, key=key), key)]


def numbers_of(inputs: Events) -> DataFrame:
    persons, auctions, bids = (frame.select("eventNumber") for frame in inputs)
    return persons.unionAll(auctions).unionAll(bids)


def test_each_micro_batch_is_one_file_of_every_stream_in_order(spark: SparkSession, tmp_path: Path) -> None:
    folder, numbers_by_batch = tmp_path / "events", {}

    def remember(rows: DataFrame, batch: int) -> None:
        numbers_by_batch[batch] = sorted(row[0] for row in rows.collect())

    def run() -> None:
        query = (
            numbers_of(read_stream(spark, folder))
            .writeStream.foreachBatch(remember)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    nexmark = Nexmark(extra=False)
    # Written backwards, and some while the query is away.
    for batches in ((3, 4, 0, 1, 2), range(5, 9)):
        for batch in batches:
            write_batch(folder, batch, nexmark.events(batch * 70, (batch + 1) * 70))
        run()
    assert numbers_by_batch == {batch: list(range(batch * 70, (batch + 1) * 70)) for batch in range(9)}


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

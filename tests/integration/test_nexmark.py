"""Nexmark's queries as streaming jobs on the fleet: final tables equal plain Python's, also with ties."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from benchmarks.harness import FLEET, Operators
from benchmarks.nexmark.files import read_stream, write_batch, write_events
from benchmarks.nexmark.generator import Events, Nexmark
from statefleet.fleet import Fleet
from tests.integration.nexmark_oracle import CLOSING, KEYS, ORACLES, Tables, finished, valid_bids, write_end
from tests.integration.nexmark_queries import QUERIES
from tests.integration.streams import short_list

EVENTS = 20_000
BATCH = 5_000
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

    def run(self, events: Path) -> None:
        """Run the query over all events there are."""
        emitted = QUERIES[self.query].build(
            Operators(self.fleet, FLEET, SHARDS, self.name), read_stream(self.spark, events)
        )

        def keep(rows: DataFrame, batch: int) -> None:
            rows.write.parquet(str(self.folder / "results" / f"batch={batch}"))

        writer = emitted.writeStream.outputMode(QUERIES[self.query].mode).trigger(availableNow=True).foreachBatch(keep)
        writer.option("checkpointLocation", str(self.folder / "checkpoint")).start().awaitTermination()

    def rows(self) -> tuple[list[str], Rows]:
        """Return the query's answer: of each key the row that was emitted last, in the form of the oracle's."""
        emitted = self.spark.read.parquet(str(self.folder / "results"))
        newest_first = Window.partitionBy(*KEYS[self.query]).orderBy(F.desc("batch"))
        newest = emitted.withColumn("place", F.row_number().over(newest_first)).where("place = 1")
        table = finished(self.query, newest.drop("place", "batch"))
        return sorted(table.columns), rows_of(table)


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

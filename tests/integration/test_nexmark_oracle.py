"""The oracles of Nexmark's queries against plain Python over the same events, and the files against Spark's file source."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from benchmarks.nexmark.files import Inputs, read_batch, read_stream, write_events, write_file
from benchmarks.nexmark.generator import Events, Nexmark
from benchmarks.nexmark.oracle import ORACLES

S = 1_000_000
WINDOW = 10 * S
DAY = 86_400 * S
Row = dict[str, Any]
#: 90 s before a midnight, so that there are two days.
EVENING = 1_735_776_000 * S - 90 * S


@dataclass(frozen=True)
class Tables:
    """The events as rows, with times in microseconds."""

    persons: list[Row]
    auctions: list[Row]
    bids: list[Row]


@dataclass(frozen=True)
class Case:
    tables: Tables
    inputs: Inputs


def with_integer_times(batch: pa.RecordBatch) -> list[Row]:
    rows: list[Row] = pa.table(
        [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in batch.columns], batch.schema.names
    ).to_pylist()
    return rows


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


@pytest.fixture(scope="module", params=["as generated", "coarse"])
def case(request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """20,000 events of 200 s; or 3,900 of 780 s with ties and edges."""
    folder = tmp_path_factory.mktemp("nexmark")
    if request.param == "coarse":
        made = coarse(Nexmark(rate=5, start=EVENING).events(0, 3_900))
        for name, rows in made._asdict().items():
            write_file(folder / name, 0, rows)
    else:
        nexmark = Nexmark(rate=100, start=EVENING, out_of_order=100)
        write_events(folder, nexmark, 20_000, 7_000)
        made = nexmark.events(0, 20_000)
    return Case(Tables(*map(with_integer_times, made)), read_batch(spark, folder))


def answer(name: str, inputs: Inputs) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return columns and sorted rows of an oracle, times in microseconds."""
    frame = ORACLES[name].answer(inputs)
    times = {field.name for field in frame.schema if isinstance(field.dataType, TimestampType)}
    whole = frame.select(*(F.unix_micros(c).alias(c) if c in times else F.col(c) for c in frame.columns))
    return whole.columns, sorted(tuple(row) for row in whole.collect())


def total(event: Row) -> tuple[int, int]:
    return event["dateTime"], event["eventNumber"]


def day(event: Row) -> str:
    return "2025-01-01" if event["dateTime"] // DAY == EVENING // DAY else "2025-01-02"


def windows(time: int, size: int = WINDOW, slide: int = WINDOW) -> Iterable[int]:
    """Return the starts of the windows that hold a time."""
    newest = time // slide * slide
    return range(newest, newest - size, -slide)


def groups(events: list[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    result = defaultdict(list)
    for event in events:
        result[key(event)].append(event)
    return result


def chosen(event: Row, names: str) -> Row:
    return {name: event[name] for name in names.split()}


def valid_bids(tables: Tables) -> Iterable[tuple[Row, list[Row]]]:
    """Return auctions with their valid bids, if they have any."""
    bids = groups(tables.bids, lambda b: b["auction"])
    for auction in tables.auctions:
        valid = [b for b in bids.get(auction["id"], ()) if auction["dateTime"] <= b["dateTime"] <= auction["expires"]]
        if valid:
            yield auction, valid


def q3(tables: Tables) -> Iterable[Row]:
    persons = {p["id"]: p for p in tables.persons if p["state"] in ("OR", "ID", "CA")}
    for auction in tables.auctions:
        if auction["category"] == 10 and auction["seller"] in persons:
            yield {**chosen(persons[auction["seller"]], "name city state"), "id": auction["id"]}


def q4(tables: Tables) -> Iterable[Row]:
    finals = defaultdict(list)
    for auction, valid in valid_bids(tables):
        finals[auction["category"]].append(max(b["price"] for b in valid))
    for category, prices in finals.items():
        yield {"category": category, "final": sum(prices) // len(prices)}


def q5(tables: Tables) -> Iterable[Row]:
    counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for bid in tables.bids:
        for start in windows(bid["dateTime"], slide=2 * S):
            counts[start][bid["auction"]] += 1
    for start, of in counts.items():
        for auction, num in of.items():
            if num == max(of.values()):
                yield {"starttime": start, "endtime": start + WINDOW, "auction": auction, "num": num}


def q6(tables: Tables) -> Iterable[Row]:
    closed = defaultdict(list)
    for auction, valid in valid_bids(tables):
        closed[auction["seller"]].append((auction["expires"], auction["id"], max(b["price"] for b in valid)))
    for seller, auctions in closed.items():
        last = [price for _, _, price in sorted(auctions)[-10:]]
        yield {"seller": seller, "final": sum(last) // len(last)}


def q7(tables: Tables) -> Iterable[Row]:
    for (start,), bids in groups(tables.bids, lambda b: tuple(windows(b["dateTime"]))).items():
        highest = max(b["price"] for b in bids)
        for bid in tables.bids:
            if bid["price"] == highest and start <= bid["dateTime"] <= start + WINDOW:
                yield {**chosen(bid, "auction bidder price dateTime extra eventNumber"), "endtime": start + WINDOW}


def q8(tables: Tables) -> Iterable[Row]:
    sold = {(a["seller"], start) for a in tables.auctions for start in windows(a["dateTime"])}
    for person in tables.persons:
        for start in windows(person["dateTime"]):
            if (person["id"], start) in sold:
                yield {**chosen(person, "id name"), "starttime": start, "endtime": start + WINDOW}


def q9(tables: Tables) -> Iterable[Row]:
    for auction, valid in valid_bids(tables):
        best = min(valid, key=lambda b: (-b["price"], total(b)))
        bid = {f"bid_{name}": best[name] for name in ("dateTime", "extra", "eventNumber")}
        row = {**auction, **chosen(best, "auction bidder price"), **bid}
        del row["eventNumber"]
        yield row


def q11(tables: Tables) -> Iterable[Row]:
    for bidder, bids in groups(tables.bids, lambda b: b["bidder"]).items():
        times = sorted(b["dateTime"] for b in bids)
        starts = [0, *(i for i in range(1, len(times)) if times[i] - times[i - 1] > WINDOW), len(times)]
        for first, end in itertools.pairwise(starts):
            session = {"starttime": times[first], "endtime": times[end - 1] + WINDOW}
            yield {"bidder": bidder, "bid_count": end - first, **session}


def q12(tables: Tables) -> Iterable[Row]:
    for bidder, bids in groups(tables.bids, lambda b: b["bidder"]).items():
        yield {"bidder": bidder, "bid_count": len(bids)}


def ranks(bids: list[Row]) -> dict[str, list[Row]]:
    ends = [0, 10_000, 1_000_000, 10**12]
    parts = {f"rank{i + 1}": [b for b in bids if ends[i] <= b["price"] < ends[i + 1]] for i in range(3)}
    return {"total": bids, **parts}


def statistics(bids: list[Row]) -> Row:
    return {
        f"{rank}_{name}": len({b[key] for b in of})
        for name, key in (("bids", "eventNumber"), ("bidders", "bidder"), ("auctions", "auction"))
        for rank, of in ranks(bids).items()
    }


def q15(tables: Tables) -> Iterable[Row]:
    for name, bids in groups(tables.bids, day).items():
        yield {"day": name, **statistics(bids)}


def q16(tables: Tables) -> Iterable[Row]:
    for (channel, name), bids in groups(tables.bids, lambda b: (b["channel"], day(b))).items():
        minutes = max(b["dateTime"] for b in bids) % DAY // (60 * S)
        minute = f"{minutes // 60:02d}:{minutes % 60:02d}"
        yield {"channel": channel, "day": name, "minute": minute, **statistics(bids)}


def q17(tables: Tables) -> Iterable[Row]:
    for (auction, name), bids in groups(tables.bids, lambda b: (b["auction"], day(b))).items():
        prices = [b["price"] for b in bids]
        figures = {"min": min(prices), "max": max(prices), "avg": sum(prices) // len(prices), "sum": sum(prices)}
        counts = {f"{rank}_bids": len(of) for rank, of in ranks(bids).items()}
        yield {"auction": auction, "day": name, **counts, **{f"{key}_price": n for key, n in figures.items()}}


def q18(tables: Tables) -> Iterable[Row]:
    for bids in groups(tables.bids, lambda b: (b["bidder"], b["auction"])).values():
        yield max(bids, key=total)


def q19(tables: Tables) -> Iterable[Row]:
    for bids in groups(tables.bids, lambda b: b["auction"]).values():
        for rank, bid in enumerate(sorted(bids, key=lambda b: (-b["price"], total(b)))[:10], start=1):
            yield {**bid, "rank_number": rank}


def q20(tables: Tables) -> Iterable[Row]:
    auctions = {a["id"]: a for a in tables.auctions if a["category"] == 10}
    for bid in tables.bids:
        if bid["auction"] in auctions:
            auction = {k: v for k, v in auctions[bid["auction"]].items() if k not in ("id", "eventNumber")}
            bid_columns = chosen(bid, "auction bidder price channel url eventNumber")
            yield {**auction, **bid_columns, "bid_dateTime": bid["dateTime"], "bid_extra": bid["extra"]}


PLAIN: dict[str, Callable[[Tables], Iterable[Row]]] = {
    function.__name__: function
    for function in (q3, q4, q5, q6, q7, q8, q9, q11, q12, q15, q16, q17, q18, q19, q20)
}  # fmt: skip


def test_every_oracle_has_a_plain_twin() -> None:
    assert list(ORACLES) == list(PLAIN)


@pytest.mark.replay
@pytest.mark.parametrize("name", ORACLES)
def test_oracles_equal_plain_python(case: Case, name: str) -> None:
    columns, rows = answer(name, case.inputs)
    expected = list(PLAIN[name](case.tables))
    assert all(row.keys() == set(columns) for row in expected)
    assert rows == sorted(tuple(row[column] for column in columns) for row in expected)
    key = [columns.index(column) for column in ORACLES[name].key]
    assert len({tuple(row[i] for i in key) for row in rows}) == len(rows) > 1


def test_the_events_reach_the_edges_that_the_oracles_settle(case: Case) -> None:
    """Two days and more than ten auctions of a seller; if coarse, ties, inclusive ends and sessions that touch."""
    bids, valid = case.tables.bids, list(valid_bids(case.tables))
    assert {day(bid) for bid in bids} == {"2025-01-01", "2025-01-02"}
    assert max(len(of) for of in groups([auction for auction, _ in valid], lambda a: a["seller"]).values()) > 10
    if len(bids) < 10_000:
        hottest = list(q5(case.tables))
        assert len(hottest) > len({row["starttime"] for row in hottest})
        assert any(row["dateTime"] == row["endtime"] for row in q7(case.tables))
        times = [sorted(b["dateTime"] for b in of) for of in groups(bids, lambda b: b["bidder"]).values()]
        assert any(b - a == WINDOW for of in times for a, b in itertools.pairwise(of))
        for edge in ("dateTime", "expires"):
            assert any(a[edge] == b["dateTime"] for a, of in valid for b in of)
        assert any(sum(b["price"] == max(v["price"] for v in of) for b in of) > 1 for _, of in valid)
        assert len({(a["seller"], a["expires"]) for a, _ in valid}) < len(valid)


def numbers_of(inputs: Inputs) -> DataFrame:
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
    write_events(folder, nexmark, 630, 70, first_batch=3, last_batch=5)
    write_events(folder, nexmark, 630, 70, last_batch=3)
    run()
    write_events(folder, nexmark, 630, 70, first_batch=5)
    run()
    assert numbers_by_batch == {batch: list(range(batch * 70, (batch + 1) * 70)) for batch in range(9)}

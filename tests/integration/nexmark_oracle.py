"""The answers of Nexmark's stateful queries: plain Python over the same finite events, to hold a streaming run against.

What makes a final table of a run's rows is here, too: the last row of each key, and the end of a stream.

Every answer is the *final table*: what is left when the stream has ended, all windows, sessions and auctions are closed and
every update has replaced the row of its key. A run that emits only what a watermark has closed lacks the last windows; it
is compared after an event that closes them, or on the windows before them (all windowed answers carry their window's end).

What is arbitrary in Nexmark's SQL is settled here by the total order of events, (``dateTime``, ``eventNumber``), and an average
of integers is an integer, rounded toward zero, as in Flink. Days and minutes are those of UTC, and times are microseconds since 1970.
Where Nexmark's result lacks what names a row (a window, a bid), the answer has it in addition.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from benchmarks.nexmark.files import write_batch
from benchmarks.nexmark.generator import EVENTS_OF_EPOCH, Events, Nexmark

Row = dict[str, Any]
_S: Final = 1_000_000
_WINDOW: Final = 10 * _S


class Tables(NamedTuple):
    """The events of the three streams as rows, with times in microseconds."""

    persons: Sequence[Row]
    auctions: Sequence[Row]
    bids: Sequence[Row]

    @classmethod
    def of(cls, streams: Iterable[pa.RecordBatch | pa.Table]) -> Tables:
        """Return the rows of events: persons, auctions and bids."""
        return cls(*map(_rows, streams))


def _rows(events: pa.RecordBatch | pa.Table) -> list[Row]:
    columns = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in events.columns]
    rows: list[Row] = pa.table(columns, events.schema.names).to_pylist()
    return rows


def _order(event: Row) -> tuple[int, int]:
    """Return the place of an event in the total order."""
    return event["dateTime"], event["eventNumber"]


def _time_text(event: Row, form: str) -> str:
    return datetime.fromtimestamp(event["dateTime"] // _S, UTC).strftime(form)


def _day(event: Row) -> str:
    return _time_text(event, "%Y-%m-%d")


def _window_starts(event: Row, slide: int = _WINDOW) -> Iterable[int]:
    """Return the starts of the windows of 10 s that hold an event, aligned to 1970."""
    newest = event["dateTime"] // slide * slide
    return range(newest, newest - _WINDOW, -slide)


def _groups(events: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return groups


def _chosen(event: Row, names: str) -> Row:
    return {name: event[name] for name in names.split()}


def valid_bids(tables: Tables) -> Iterator[tuple[Row, list[Row]]]:
    """Yield each auction that has valid bids, with these: made from its begin to its expiry, both included, at whichever price."""
    bids = _groups(tables.bids, lambda b: b["auction"])
    for auction in tables.auctions:
        valid = [b for b in bids.get(auction["id"], ()) if auction["dateTime"] <= b["dateTime"] <= auction["expires"]]
        if valid:
            yield auction, valid


def q3(tables: Tables) -> Iterator[Row]:
    """Who sells in category 10 in Oregon, Idaho or California; an auction may come before its seller."""
    persons = {p["id"]: p for p in tables.persons if p["state"] in ("OR", "ID", "CA")}
    for auction in tables.auctions:
        if auction["category"] == 10 and auction["seller"] in persons:
            yield {**_chosen(persons[auction["seller"]], "name city state"), "id": auction["id"]}


def q4(tables: Tables) -> Iterator[Row]:
    """Average selling price by category, over all auctions that have a valid bid, whether or not they expired in the events."""
    finals = defaultdict(list)
    for auction, valid in valid_bids(tables):
        finals[auction["category"]].append(max(b["price"] for b in valid))
    for category, prices in finals.items():
        yield {"category": category, "final": sum(prices) // len(prices)}


def q5(tables: Tables) -> Iterator[Row]:
    """Hot items: the auctions with the most bids in each window of 10 s that slides by 2 s; all of them where several tie."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for bid in tables.bids:
        for start in _window_starts(bid, slide=2 * _S):
            counts[start][bid["auction"]] += 1
    for start, of in counts.items():
        most = max(of.values())
        for auction, num in of.items():
            if num == most:
                yield {"starttime": start, "endtime": start + _WINDOW, "auction": auction, "num": num}


def q6(tables: Tables) -> Iterator[Row]:
    """Average selling price of each seller's last ten auctions.

    Nexmark has no SQL text of it that Flink can run. Here: the auctions of a seller that have a valid bid in the order of
    (``expires``, ``id``), the last ten of them or all if there are fewer, and the average of their highest valid bids. When the
    stream has ended every auction is closed, also those that would expire after the last event.
    """
    closed = defaultdict(list)
    for auction, valid in valid_bids(tables):
        closed[auction["seller"]].append((auction["expires"], auction["id"], max(b["price"] for b in valid)))
    for seller, auctions in closed.items():
        last = [price for _, _, price in sorted(auctions)[-10:]]
        yield {"seller": seller, "final": sum(last) // len(last)}


def q7(tables: Tables) -> Iterator[Row]:
    """The highest bids of each window of 10 s; all of them where several tie.

    As in Nexmark's SQL a bid is compared with the highest price of each window whose begin and end enclose it, *both included*:
    one made at the very end of a window, which belongs to the next, also answers for this one if its price is the same.
    """
    for (start,), bids in _groups(tables.bids, lambda b: tuple(_window_starts(b))).items():
        highest = max(b["price"] for b in bids)
        for bid in tables.bids:
            if bid["price"] == highest and start <= bid["dateTime"] <= start + _WINDOW:
                yield {**_chosen(bid, "auction bidder price dateTime extra eventNumber"), "endtime": start + _WINDOW}


def q8(tables: Tables) -> Iterator[Row]:
    """Who arrived and opened an auction in the same window of 10 s."""
    sold = {(a["seller"], start) for a in tables.auctions for start in _window_starts(a)}
    for person in tables.persons:
        for start in _window_starts(person):
            if (person["id"], start) in sold:
                yield {**_chosen(person, "id name"), "starttime": start, "endtime": start + _WINDOW}


def q9(tables: Tables) -> Iterator[Row]:
    """The winning bid of each auction that has a valid one: the highest, of equals the first in the total order."""
    for auction, valid in valid_bids(tables):
        best = min(valid, key=lambda b: (-b["price"], _order(b)))
        bid = {f"bid_{name}": best[name] for name in ("dateTime", "extra", "eventNumber")}
        row = {**auction, **_chosen(best, "auction bidder price"), **bid}
        del row["eventNumber"]
        yield row


def q11(tables: Tables) -> Iterator[Row]:
    """Bids of each bidder's sessions; a session ends 10 s after its last bid.

    Two bids exactly 10 s apart are in one session, as Spark has it: sessions that touch are merged.
    """
    for bidder, bids in _groups(tables.bids, lambda b: b["bidder"]).items():
        times = sorted(b["dateTime"] for b in bids)
        starts = [0, *(i for i in range(1, len(times)) if times[i] - times[i - 1] > _WINDOW), len(times)]
        for first, end in itertools.pairwise(starts):
            session = {"starttime": times[first], "endtime": times[end - 1] + _WINDOW}
            yield {"bidder": bidder, "bid_count": end - first, **session}


def q12(tables: Tables) -> Iterator[Row]:
    """Bids of each bidder: what the counts of all its windows add up to.

    The query counts in windows of 10 s of *processing* time, so which window a bid is counted in is chance; the sums are not.
    """
    for bidder, count in Counter(b["bidder"] for b in tables.bids).items():
        yield {"bidder": bidder, "bid_count": count}


def _by_rank(bids: list[Row]) -> dict[str, list[Row]]:
    """Return all bids, and those of the price ranks below 10^4, below 10^6 and above."""
    ends = [0, 10_000, 1_000_000, 10**12]
    parts = {f"rank{i + 1}": [b for b in bids if ends[i] <= b["price"] < ends[i + 1]] for i in range(3)}
    return {"total": bids, **parts}


def _statistics(bids: list[Row]) -> Row:
    return {
        f"{rank}_{name}": len({b[key] for b in of})
        for name, key in (("bids", "eventNumber"), ("bidders", "bidder"), ("auctions", "auction"))
        for rank, of in _by_rank(bids).items()
    }


def q15(tables: Tables) -> Iterator[Row]:
    """Bids, distinct bidders and distinct auctions of each day: all, and of each price rank."""
    for day, bids in _groups(tables.bids, _day).items():
        yield {"day": day, **_statistics(bids)}


def q16(tables: Tables) -> Iterator[Row]:
    """:func:`q15` for each channel and day, and the minute of the day's last bid."""
    for (channel, day), bids in _groups(tables.bids, lambda b: (b["channel"], _day(b))).items():
        minute = _time_text(max(bids, key=_order), "%H:%M")
        yield {"channel": channel, "day": day, "minute": minute, **_statistics(bids)}


def q17(tables: Tables) -> Iterator[Row]:
    """Bids of each auction and day: how many, of each price rank, and the lowest, highest, average and sum of prices."""
    for (auction, day), bids in _groups(tables.bids, lambda b: (b["auction"], _day(b))).items():
        prices = [b["price"] for b in bids]
        figures = {"min": min(prices), "max": max(prices), "avg": sum(prices) // len(prices), "sum": sum(prices)}
        counts = {f"{rank}_bids": len(of) for rank, of in _by_rank(bids).items()}
        yield {"auction": auction, "day": day, **counts, **{f"{key}_price": n for key, n in figures.items()}}


def q18(tables: Tables) -> Iterator[Row]:
    """The last bid, in the total order, of each bidder for each auction."""
    for bids in _groups(tables.bids, lambda b: (b["bidder"], b["auction"])).values():
        yield max(bids, key=_order)


def q19(tables: Tables) -> Iterator[Row]:
    """The ten highest bids for each auction with their ranks 1 to 10; of equals the first in the total order ranks first."""
    for bids in _groups(tables.bids, lambda b: b["auction"]).values():
        for rank, bid in enumerate(sorted(bids, key=lambda b: (-b["price"], _order(b)))[:10], start=1):
            yield {**bid, "rank_number": rank}


def q20(tables: Tables) -> Iterator[Row]:
    """Every bid for an auction of category 10, with that auction; bids made before it begins or after it expires count too."""
    auctions = {a["id"]: a for a in tables.auctions if a["category"] == 10}
    for bid in tables.bids:
        if bid["auction"] in auctions:
            auction = {k: v for k, v in auctions[bid["auction"]].items() if k not in ("id", "eventNumber")}
            bid_columns = _chosen(bid, "auction bidder price channel url eventNumber")
            yield {**auction, **bid_columns, "bid_dateTime": bid["dateTime"], "bid_extra": bid["extra"]}


#: By name, every stateful query that has a checkable answer.
ORACLES: Final[dict[str, Callable[[Tables], Iterator[Row]]]] = {
    answer.__name__: answer
    for answer in (q3, q4, q5, q6, q7, q8, q9, q11, q12, q15, q16, q17, q18, q19, q20)
}  # fmt: skip

#: Columns that identify a row: the last row that the stream emits for a key is the valid one.
KEYS: Final = {
    "q3": ("id",),
    "q4": ("id",),
    "q5": ("starttime", "auction"),
    "q6": ("id",),
    "q7": ("endtime", "eventNumber"),
    "q8": ("starttime", "id"),
    "q9": ("id",),
    "q11": ("bidder", "starttime"),
    "q12": ("bidder", "starttime"),
    "q15": ("day",),
    "q16": ("channel", "day"),
    "q17": ("auction", "day"),
    "q18": ("bidder", "auction"),
    "q19": ("auction", "rank_number"),
    "q20": ("eventNumber",),
}
#: Rows are emitted once the watermark has passed them: windows that are open when the stream ends are missing.
CLOSING: Final = ("q5", "q7", "q11")


def finished(query: str, table: DataFrame) -> DataFrame:
    """Return a query's answer, given the table of last rows by key, from which a streaming query cannot compute it."""
    average = F.expr("sum(final) DIV count(final)").alias("final")
    if query == "q4":
        return table.groupBy("category").agg(average)
    if query == "q6":
        latest_first = Window.partitionBy("seller").orderBy(F.desc("expires"), F.desc("id"))
        return (
            table.withColumn("age", F.row_number().over(latest_first)).where("age <= 10").groupBy("seller").agg(average)
        )
    # The sum over all windows does not depend on when the bids were read.
    return table.groupBy("bidder").agg(F.sum("bid_count").alias("bid_count")) if query == "q12" else table


def write_end(folder: Path, nexmark: Nexmark, events: int, batch_events: int) -> None:
    """End the stream by another micro-batch with an event of each kind an hour later, which closes all windows and sessions.

    Its person, auction and bid have the id -1, so they match no others.
    """
    later = replace(nexmark, start=nexmark.start + 3600 * _S, out_of_order=1)
    epoch = -(-events // EVENTS_OF_EPOCH) * EVENTS_OF_EPOCH
    batch = -(-events // batch_events)
    ends = []
    for rows in later.events(epoch, epoch + EVENTS_OF_EPOCH):
        first = rows.slice(0, 1)
        for column in {"id", "seller", "auction", "bidder"} & set(first.schema.names):
            index = first.schema.get_field_index(column)
            first = first.set_column(index, first.schema.field(index), pa.array([-1], pa.int64()))
        ends.append(first)
    write_batch(folder, batch, Events(*ends))

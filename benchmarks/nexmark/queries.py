"""Nexmark's stateful queries that the fleet runs, as streaming queries: windows, tables that bids keep up to date, and joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Operators
from benchmarks.nexmark.generator import Events

#: How late events may be, as Nexmark defines its streams.
_DELAY: Final = "4 seconds"
_WINDOW: Final = "10 seconds"
_SLIDE: Final = "2 seconds"
_RANKS: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Query:
    """A Nexmark query."""

    name: str
    build: Callable[[Operators, Events], DataFrame]
    mode: str
    #: Whether Spark's own operators can run it in this form.
    plain_spark: bool = False


def _marked(frame: DataFrame, time: str = "dateTime") -> DataFrame:
    return frame.withWatermark(time, _DELAY)


def _ends(window: str) -> tuple[Column, Column]:
    return F.col(f"{window}.start").alias("starttime"), F.col(f"{window}.end").alias("endtime")


def q5(ops: Operators, inputs: Events) -> DataFrame:
    """Hot items: the auctions with the most bids in each window of 10 s that slides by 2 s; all of them where several tie.

    The fleet counts. In append mode all counts of a window come in the one batch that closes it, so which are the highest is told
    within the batch and needs no state.
    """
    windows = F.window("dateTime", _WINDOW, _SLIDE)
    counts = ops(_marked(inputs.bids), "counts").groupBy(windows, "auction").agg(F.count("*").alias("num"))
    flat = counts.select(*_ends("window"), "auction", "num")
    cores = flat.sparkSession.sparkContext.defaultParallelism
    return flat.repartition(cores, "starttime").mapInArrow(_most_of_each_window, flat.schema)


def _most_of_each_window(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows with the highest ``num`` of their ``starttime``, among all rows of a partition."""
    kept = list(batches)
    if not kept:
        return
    counts = pa.Table.from_batches(kept)
    most = counts.group_by("starttime").aggregate([("num", "max")]).rename_columns(["starttime", "num"])
    hottest = counts.join(most, ["starttime", "num"], join_type="left semi")
    yield from hottest.select(counts.column_names).to_batches()


def q7(ops: Operators, inputs: Events) -> DataFrame:
    """The highest bids of each window of 10 s, all of them where several tie; both ends of a window count as in it.

    The highest price of a window is known once the window closes, and meets the bids that the join has kept until then.
    """
    bids = _marked(inputs.bids)
    prices = ops(bids, "highest").groupBy(F.window("dateTime", _WINDOW)).agg(F.max("price").alias("highest"))
    highest = prices.select(F.window_time("window").alias("closing"), *_ends("window"), "highest")
    selected = bids.select("auction", "bidder", "price", "dateTime", "extra", "eventNumber")
    # The watermark knows the window by its last microsecond; these bounds say how long bids need to be kept.
    kept = "dateTime >= closing - INTERVAL 10 SECONDS AND dateTime <= closing + INTERVAL 1 SECOND"
    in_window = F.col("dateTime").between(F.col("starttime"), F.col("endtime"))
    on = (F.col("price") == F.col("highest")) & F.expr(kept) & in_window
    rows: DataFrame = ops(selected, "bids").join(highest, on, "inner")
    return rows.select("endtime", "auction", "bidder", "price", "dateTime", "extra", "eventNumber")


def q8(ops: Operators, inputs: Events) -> DataFrame:
    """Who arrived and opened an auction in the same window of 10 s."""
    period = F.window("dateTime", _WINDOW)
    persons = _marked(inputs.persons).select("dateTime", period.alias("period"), "id", "name")
    auctions = _marked(inputs.auctions).select("dateTime", period.alias("sold"), "seller")
    arrived = ops(persons, "arrived").dropDuplicates(["period", "id", "name"]).select("period", "id", "name")
    sold = ops(auctions, "sold").dropDuplicates(["sold", "seller"]).select("sold", "seller")
    on = (F.col("id") == F.col("seller")) & (F.col("period") == F.col("sold"))
    rows: DataFrame = ops(arrived, "both").join(sold, on, "inner")
    return rows.select("id", "name", *_ends("period"))


def q11(ops: Operators, inputs: Events) -> DataFrame:
    """Bids of each bidder's sessions; a session ends 10 s after its last bid."""
    session = F.session_window("dateTime", _WINDOW).alias("session")
    counts = ops(_marked(inputs.bids), "sessions").groupBy("bidder", session).agg(F.count("*").alias("bid_count"))
    return counts.select("bidder", "bid_count", *_ends("session"))


def q12(ops: Operators, inputs: Events) -> DataFrame:
    """Bids of each bidder in windows of 10 s of processing time: the time at which Spark began the micro-batch.

    Spark notes that time in the checkpoint, so a batch that is repeated counts in the same window.
    """
    bids = inputs.bids.select("bidder", F.current_timestamp().alias("arrival")).withWatermark("arrival", "0 seconds")
    windows = F.window("arrival", _WINDOW)
    counts = ops(bids, "counts", "update").groupBy("bidder", windows).agg(F.count("*").alias("bid_count"))
    return counts.select("bidder", "bid_count", *_ends("window"))


# -- tables of the bids: statistics of days, distinct counts, last and highest bids

_ALL: Final = 0


def _rank() -> Column:
    """Price rank of a bid: 1 below 10^4, 2 below 10^6, 3 above."""
    return F.when(F.col("price") < 10_000, 1).when(F.col("price") < 1_000_000, 2).otherwise(3)


def _counted(kind: str, rank: int) -> Column:
    """Return how many things of a kind (``bid``, ``bidder``, ``auction``) there are of a rank, or of all bids."""
    whole = F.col("kind") == kind
    # A bid is there once, with its rank; bidders and auctions are there once for each rank and once for all.
    is_it = whole if kind == "bid" and rank == _ALL else whole & (F.col("rank") == rank)
    name = "total" if rank == _ALL else f"rank{rank}"
    return F.count_if(is_it).alias(f"{name}_{kind}s")


def _statistics() -> list[Column]:
    return [_counted(kind, rank) for kind in ("bid", "bidder", "auction") for rank in (_ALL, *_RANKS)]


def _things_of_days(ops: Operators, inputs: Events, *by: str) -> DataFrame:
    """Every bid, and the first of each bidder and auction of a day (and of `by`), of all bids and of each price rank.

    Distinct counts are counts of what a deduplication lets through; one deduplication serves all eight of them.
    """
    days = _marked(inputs.bids).select(
        "dateTime", F.window("dateTime", "1 day").alias("period"), *by, _rank().alias("rank"), "bidder", "auction"
    )
    things = F.array(
        *(
            F.struct(F.lit(kind).alias("kind"), rank.alias("rank"), F.col(kind).alias("id"))
            for kind in ("bidder", "auction")
            for rank in (F.lit(_ALL), F.col("rank"))
        )
    )
    each = days.select("dateTime", "period", *by, F.explode_outer(things).alias("thing"))
    flat = each.select("dateTime", "period", *by, "thing.kind", "thing.rank", "thing.id")
    first = ops(flat, "distinct").dropDuplicates(["period", *by, "kind", "rank", "id"])
    bids = days.select("dateTime", "period", *by, F.lit("bid").alias("kind"), "rank")
    return bids.unionAll(first.select("dateTime", "period", *by, "kind", "rank"))


def _day() -> Column:
    return F.date_format("period.start", "yyyy-MM-dd").alias("day")


def q15(ops: Operators, inputs: Events) -> DataFrame:
    """Bids, distinct bidders and distinct auctions of each day: all, and of the price ranks below 10^4, below 10^6 and above."""
    things = _things_of_days(ops, inputs)
    counted: DataFrame = ops(things, "days", "update").groupBy("period").agg(*_statistics())
    return counted.select(_day(), *counted.columns[1:])


def q16(ops: Operators, inputs: Events) -> DataFrame:
    """:func:`q15` for each channel and day, and the minute of the day's last bid."""
    things = _things_of_days(ops, inputs, "channel")
    # Each row of the deduplication is also there as a bid.
    grouped = ops(things, "channels", "update").groupBy("channel", "period")
    counted: DataFrame = grouped.agg(F.max("dateTime").alias("last"), *_statistics())
    return counted.select("channel", _day(), F.date_format("last", "HH:mm").alias("minute"), *counted.columns[3:])


def q17(ops: Operators, inputs: Events) -> DataFrame:
    """Bids of each auction and day: how many, of each price rank, and the lowest, highest, average and sum of prices."""
    day = F.window("dateTime", "1 day").alias("period")
    counted: DataFrame = (
        ops(_marked(inputs.bids), "days", "update")
        .groupBy("auction", day)
        .agg(
            F.count("*").alias("total_bids"),
            *(F.count_if(_rank() == rank).alias(f"rank{rank}_bids") for rank in _RANKS),
            F.min("price").alias("min_price"),
            F.max("price").alias("max_price"),
            F.expr("sum(price) DIV count(price)").alias("avg_price"),
            F.sum("price").alias("sum_price"),
        )
    )
    return counted.select("auction", _day(), *counted.columns[2:])


def q18(ops: Operators, inputs: Events) -> DataFrame:
    """The last bid of each bidder for each auction."""
    return ops(inputs.bids, "last", "update").keepLast(["bidder", "auction"], ["dateTime", "eventNumber"])


def q19(ops: Operators, inputs: Events) -> DataFrame:
    """The ten highest bids for each auction with their ranks 1 to 10; of equals the first in the total order ranks first."""
    order = [F.desc("price"), F.asc("dateTime"), F.asc("eventNumber")]
    highest: DataFrame = ops(inputs.bids, "highest", "update").topN(10, "auction", order)
    return highest.withColumnRenamed("rank", "rank_number")


# -- joins: sellers, listings, and the bids that are valid for an auction


def q3(ops: Operators, inputs: Events) -> DataFrame:
    """Who sells in category 10 in Oregon, Idaho or California.

    An auction may come before its seller, and nothing bounds how long a seller sells: both sides are kept for ever.
    """
    auctions = inputs.auctions.where(F.col("category") == 10).select("id", "seller")
    persons = inputs.persons.where(F.col("state").isin("OR", "ID", "CA"))
    sellers = persons.select(F.col("id").alias("person"), "name", "city", "state")
    joined: DataFrame = ops(auctions, "sellers").join(sellers, F.col("seller") == F.col("person"), "inner")
    return joined.select("name", "city", "state", "id")


def q20(ops: Operators, inputs: Events) -> DataFrame:
    """Every bid for an auction of category 10, with that auction; both sides are kept for ever."""
    bids = inputs.bids.withColumnsRenamed({"dateTime": "bid_dateTime", "extra": "bid_extra"})
    auctions = inputs.auctions.where(F.col("category") == 10).drop("eventNumber").withColumnRenamed("id", "listed")
    joined: DataFrame = ops(bids, "listed").join(auctions, F.col("auction") == F.col("listed"), "inner")
    return joined.drop("listed")


def _valid_bids(ops: Operators, auctions: DataFrame, bids: DataFrame) -> DataFrame:
    """Auctions with each bid made from their begin to their expiry, both included.

    The watermark removes bids: an auction that is still to come begins after them. Auctions are kept for ever, as their expiry is
    not bounded by the watermark.
    """
    # Spark takes any time that is compared with a bid's for the auction's event time, and would remove an auction when the
    # watermark is at its begin instead of its expiry. It does not look into numbers.
    begun = F.col("bid_dateTime") >= F.col("dateTime")
    not_expired = F.unix_micros("bid_dateTime") <= F.unix_micros("expires")
    on = (F.col("id") == F.col("auction")) & begun & not_expired
    listed = _marked(auctions)
    bid_times = _marked(bids.withColumnRenamed("dateTime", "bid_dateTime"), "bid_dateTime")
    joined: DataFrame = ops(listed, "valid").join(bid_times, on, "inner")
    # An auction began long before most of its bids: no later operator may treat its time as late.
    times = ("dateTime", "bid_dateTime")
    return joined.select(*(F.col(name).alias(name, metadata={}) if name in times else name for name in joined.columns))


def _final_prices(ops: Operators, inputs: Events, *columns: str) -> DataFrame:
    """The highest valid bid so far of each auction that has one, as ``final``; emitted again when it rises."""
    auctions = inputs.auctions.select(*dict.fromkeys(("id", "dateTime", "expires", *columns)))
    bids = inputs.bids.select("auction", "price", "dateTime")
    valid = _valid_bids(ops, auctions, bids)
    return ops(valid, "final", "update").groupBy("id", *columns).agg(F.max("price").alias("final"))


def q4(ops: Operators, inputs: Events) -> DataFrame:
    """Final price of each auction: the table over which the categories' averages are taken when they are asked for.

    The average is a second stage: a price that rises would be counted twice by an operator behind this one.
    """
    return _final_prices(ops, inputs, "category")


def q6(ops: Operators, inputs: Events) -> DataFrame:
    """Final price of each auction with its seller: the table over which the averages of the last ten are taken; see :func:`q4`."""
    return _final_prices(ops, inputs, "seller", "expires")


def q9(ops: Operators, inputs: Events) -> DataFrame:
    """The winning bid so far of each auction that has a valid one: the highest, of equals the first in the total order."""
    bids = inputs.bids.select(
        *("auction", "bidder", "price", "dateTime"),
        F.col("extra").alias("bid_extra"),
        F.col("eventNumber").alias("bid_eventNumber"),
    )
    valid = _valid_bids(ops, inputs.auctions.drop("eventNumber"), bids)
    order = [F.desc("price"), F.asc("bid_dateTime"), F.asc("bid_eventNumber")]
    winning: DataFrame = ops(valid, "winning", "update").topN(1, "id", order)
    return winning.drop("rank")


#: In the order of their numbers.
QUERIES: Final[dict[str, Query]] = {
    query.name: query
    for query in (
        Query("q3", q3, "append", plain_spark=True),
        Query("q4", q4, "update"),
        Query("q5", q5, "append", plain_spark=True),
        Query("q6", q6, "update"),
        Query("q7", q7, "append", plain_spark=True),
        Query("q8", q8, "append", plain_spark=True),
        Query("q9", q9, "update"),
        Query("q11", q11, "append", plain_spark=True),
        Query("q12", q12, "update", plain_spark=True),
        Query("q15", q15, "update"),
        Query("q16", q16, "update"),
        Query("q17", q17, "update", plain_spark=True),
        Query("q18", q18, "update"),
        Query("q19", q19, "update"),
        Query("q20", q20, "append", plain_spark=True),
    )
}

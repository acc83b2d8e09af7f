"""Nexmark's stateful queries, also those that Spark's own operators cannot run in this form, which the benchmarks leave out."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from benchmarks.harness import Operators
from benchmarks.nexmark import queries
from benchmarks.nexmark.generator import Events
from benchmarks.nexmark.queries import PRICE_RANKS, Query, day, price_rank, watermarked

_ALL: Final = 0


def _counted(kind: str, rank: int) -> Column:
    """Return how many things of a kind (``bid``, ``bidder``, ``auction``) there are of a rank, or of all bids."""
    whole = F.col("kind") == kind
    # A bid is there once, with its rank; bidders and auctions are there once for each rank and once for all.
    is_it = whole if kind == "bid" and rank == _ALL else whole & (F.col("rank") == rank)
    name = "total" if rank == _ALL else f"rank{rank}"
    return F.count_if(is_it).alias(f"{name}_{kind}s")


def _statistics() -> list[Column]:
    return [_counted(kind, rank) for kind in ("bid", "bidder", "auction") for rank in (_ALL, *PRICE_RANKS)]


def _things_of_days(ops: Operators, inputs: Events, *by: str) -> DataFrame:
    """Every bid, and the first of each bidder and auction of a day (and of `by`), of all bids and of each price rank.

    Distinct counts are counts of what a deduplication lets through; one deduplication serves all eight of them.
    """
    days = watermarked(inputs.bids).select(
        "dateTime", F.window("dateTime", "1 day").alias("period"), *by, price_rank().alias("rank"), "bidder", "auction"
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


def q15(ops: Operators, inputs: Events) -> DataFrame:
    """Bids, distinct bidders and distinct auctions of each day: all, and of the price ranks below 10^4, below 10^6 and above."""
    things = _things_of_days(ops, inputs)
    counted: DataFrame = ops(things, "days", "update").groupBy("period").agg(*_statistics())
    return counted.select(day(), *counted.columns[1:])


def q16(ops: Operators, inputs: Events) -> DataFrame:
    """:func:`q15` for each channel and day, and the minute of the day's last bid."""
    things = _things_of_days(ops, inputs, "channel")
    # Each row of the deduplication is also there as a bid.
    grouped = ops(things, "channels", "update").groupBy("channel", "period")
    counted: DataFrame = grouped.agg(F.max("dateTime").alias("last"), *_statistics())
    return counted.select("channel", day(), F.date_format("last", "HH:mm").alias("minute"), *counted.columns[3:])


def q18(ops: Operators, inputs: Events) -> DataFrame:
    """The last bid of each bidder for each auction."""
    return ops(inputs.bids, "last", "update").keepLast(["bidder", "auction"], ["dateTime", "eventNumber"])


def q19(ops: Operators, inputs: Events) -> DataFrame:
    """The ten highest bids for each auction with their ranks 1 to 10; of equals the first in the total order ranks first."""
    order = [F.desc("price"), F.asc("dateTime"), F.asc("eventNumber")]
    highest: DataFrame = ops(inputs.bids, "highest", "update").topN(10, "auction", order)
    return highest.withColumnRenamed("rank", "rank_number")


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
    listed = watermarked(auctions)
    bid_times = watermarked(bids.withColumnRenamed("dateTime", "bid_dateTime"), "bid_dateTime")
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
    for query in sorted(
        (
            *queries.QUERIES.values(),
            Query("q4", q4, "update"),
            Query("q6", q6, "update"),
            Query("q9", q9, "update"),
            Query("q15", q15, "update"),
            Query("q16", q16, "update"),
            Query("q18", q18, "update"),
            Query("q19", q19, "update"),
        ),
        key=lambda query: int(query.name[1:]),
    )
}

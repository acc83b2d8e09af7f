"""Nexmark's queries that keep a table of the bids up to date: statistics of days, distinct counts, last and highest bids."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from benchmarks.nexmark.files import Inputs
from benchmarks.nexmark.query import Operators, Query, marked

_ALL: Final = 0
_RANKS: Final = (1, 2, 3)


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


_STATISTICS: Final = tuple((kind, rank) for kind in ("bid", "bidder", "auction") for rank in (_ALL, *_RANKS))


def _things_of_days(ops: Operators, inputs: Inputs, *by: str) -> DataFrame:
    """Every bid, and the first of each bidder and auction of a day (and of `by`), of all bids and of each price rank.

    Distinct counts are counts of what a deduplication lets through; one deduplication serves all eight of them.
    """
    days = marked(inputs.bids).select(
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


def q15(ops: Operators, inputs: Inputs) -> DataFrame:
    """Bids, distinct bidders and distinct auctions of each day: all, and of the price ranks below 10^4, below 10^6 and above."""
    things = _things_of_days(ops, inputs)
    counts = [_counted(kind, rank) for kind, rank in _STATISTICS]
    counted: DataFrame = ops(things, "days", "update").groupBy("period").agg(*counts)
    return counted.select(_day(), *counted.columns[1:])


def q16(ops: Operators, inputs: Inputs) -> DataFrame:
    """:func:`q15` for each channel and day, and the minute of the day's last bid."""
    things = _things_of_days(ops, inputs, "channel")
    counts = [_counted(kind, rank) for kind, rank in _STATISTICS]
    # Each row of the deduplication is also there as a bid.
    grouped = ops(things, "channels", "update").groupBy("channel", "period")
    counted: DataFrame = grouped.agg(F.max("dateTime").alias("last"), *counts)
    return counted.select("channel", _day(), F.date_format("last", "HH:mm").alias("minute"), *counted.columns[3:])


def q17(ops: Operators, inputs: Inputs) -> DataFrame:
    """Bids of each auction and day: how many, of each price rank, and the lowest, highest, average and sum of prices."""
    day = F.window("dateTime", "1 day").alias("period")
    counted: DataFrame = (
        ops(marked(inputs.bids), "days", "update")
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


def q18(ops: Operators, inputs: Inputs) -> DataFrame:
    """The last bid of each bidder for each auction."""
    last: DataFrame = ops(inputs.bids, "last", "update").keepLast(["bidder", "auction"], ["dateTime", "eventNumber"])
    return last.select("auction", "bidder", "price", "channel", "url", "dateTime", "extra", "eventNumber")


def q19(ops: Operators, inputs: Inputs) -> DataFrame:
    """The ten highest bids for each auction with their ranks 1 to 10; of equals the first in the total order ranks first."""
    order = [F.desc("price"), F.asc("dateTime"), F.asc("eventNumber")]
    highest: DataFrame = ops(inputs.bids, "highest", "update").topN(10, "auction", order)
    return highest.withColumnRenamed("rank", "rank_number")


TOTALS: Final = (
    Query("q15", q15, ("day",), "update"),
    Query("q16", q16, ("channel", "day"), "update"),
    Query("q17", q17, ("auction", "day"), "update", plain_spark=True),
    Query("q18", q18, ("bidder", "auction"), "update"),
    Query("q19", q19, ("auction", "rank_number"), "update"),
)

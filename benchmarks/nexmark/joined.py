"""Nexmark's queries that join the streams: sellers, listings, and the bids that are valid for an auction."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from benchmarks.nexmark.files import Inputs
from benchmarks.nexmark.query import Operators, Query, marked, unmarked

_LAST_AUCTIONS: Final = 10


def q3(ops: Operators, inputs: Inputs) -> DataFrame:
    """Who sells in category 10 in Oregon, Idaho or California.

    An auction may come before its seller, and nothing bounds how long a seller sells: both sides are kept for ever.
    """
    auctions = inputs.auctions.where(F.col("category") == 10).select("id", "seller")
    persons = inputs.persons.where(F.col("state").isin("OR", "ID", "CA"))
    sellers = persons.select(F.col("id").alias("person"), "name", "city", "state")
    joined: DataFrame = ops(auctions, "sellers").join(sellers, F.col("seller") == F.col("person"), "inner")
    return joined.select("name", "city", "state", "id")


def q20(ops: Operators, inputs: Inputs) -> DataFrame:
    """Every bid for an auction of category 10, with that auction; both sides are kept for ever."""
    bids = inputs.bids.withColumnsRenamed({"dateTime": "bid_dateTime", "extra": "bid_extra"})
    auctions = inputs.auctions.where(F.col("category") == 10).drop("eventNumber").withColumnRenamed("id", "listed")
    joined: DataFrame = ops(bids, "listed").join(auctions, F.col("auction") == F.col("listed"), "inner")
    return joined.select(
        *("auction", "bidder", "price", "channel", "url", "bid_dateTime", "bid_extra"),
        *("itemName", "description", "initialBid", "reserve", "dateTime", "expires", "seller", "category", "extra"),
        "eventNumber",
    )


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
    listed = marked(auctions)
    bid_times = marked(bids.withColumnRenamed("dateTime", "bid_dateTime"), "bid_dateTime")
    joined: DataFrame = ops(listed, "valid").join(bid_times, on, "inner")
    # An auction began long before most of its bids: no later operator may treat its time as late.
    return unmarked(joined, "dateTime", "bid_dateTime")


def _final_prices(ops: Operators, inputs: Inputs, *columns: str) -> DataFrame:
    """The highest valid bid so far of each auction that has one, as ``final``; emitted again when it rises."""
    auctions = inputs.auctions.select(*dict.fromkeys(("id", "dateTime", "expires", *columns)))
    bids = inputs.bids.select("auction", "price", "dateTime")
    valid = _valid_bids(ops, auctions, bids)
    final: DataFrame = ops(valid, "final", "update").groupBy("id", *columns).agg(F.max("price").alias("final"))
    return final


def q4(ops: Operators, inputs: Inputs) -> DataFrame:
    """Final price of each auction: the table over which the categories' averages are taken when they are asked for.

    The average is a second stage: a price that rises would be counted twice by an operator behind this one.
    """
    return _final_prices(ops, inputs, "category")


def _average_of_categories(prices: DataFrame) -> DataFrame:
    return prices.groupBy("category").agg(F.expr("sum(final) DIV count(final)").alias("final"))


def q6(ops: Operators, inputs: Inputs) -> DataFrame:
    """Final price of each auction with its seller: the table over which the averages of the last ten are taken; see :func:`q4`."""
    return _final_prices(ops, inputs, "seller", "expires")


def _average_of_last_auctions(prices: DataFrame) -> DataFrame:
    latest_first = Window.partitionBy("seller").orderBy(F.desc("expires"), F.desc("id"))
    last = prices.withColumn("age", F.row_number().over(latest_first)).where(F.col("age") <= _LAST_AUCTIONS)
    return last.groupBy("seller").agg(F.expr("sum(final) DIV count(final)").alias("final"))


def q9(ops: Operators, inputs: Inputs) -> DataFrame:
    """The winning bid so far of each auction that has a valid one: the highest, of equals the first in the total order."""
    bids = inputs.bids.select(
        *("auction", "bidder", "price", "dateTime"),
        F.col("extra").alias("bid_extra"),
        F.col("eventNumber").alias("bid_eventNumber"),
    )
    valid = _valid_bids(ops, inputs.auctions.drop("eventNumber"), bids)
    order = [F.desc("price"), F.asc("bid_dateTime"), F.asc("bid_eventNumber")]
    winning: DataFrame = ops(valid, "winning", "update").topN(1, "id", order)
    return winning.select(
        *(
            "id",
            "itemName",
            "description",
            "initialBid",
            "reserve",
            "dateTime",
            "expires",
            "seller",
            "category",
            "extra",
        ),
        *("auction", "bidder", "price", "bid_dateTime", "bid_extra", "bid_eventNumber"),
    )


JOINED: Final = (
    Query("q3", q3, ("id",), "append", plain_spark=True),
    Query("q4", q4, ("id",), "update", finish=_average_of_categories),
    Query("q6", q6, ("id",), "update", finish=_average_of_last_auctions),
    Query("q9", q9, ("id",), "update"),
    Query("q20", q20, ("eventNumber",), "append", plain_spark=True),
)

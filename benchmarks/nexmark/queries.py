"""Nexmark's stateful queries that Spark's own operators can run in the same form as the fleet: windows, statistics and joins."""

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
PRICE_RANKS: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Query:
    """A Nexmark query."""

    name: str
    build: Callable[[Operators, Events], DataFrame]
    mode: str


def watermarked(frame: DataFrame, time: str = "dateTime") -> DataFrame:
    return frame.withWatermark(time, _DELAY)


def _ends(window: str) -> tuple[Column, Column]:
    return F.col(f"{window}.start").alias("starttime"), F.col(f"{window}.end").alias("endtime")


def q5(ops: Operators, inputs: Events) -> DataFrame:
    """Hot items: the auctions with the most bids in each window of 10 s that slides by 2 s; all of them where several tie.

    The fleet counts. In append mode all counts of a window come in the one batch that closes it, so which are the highest is told
    within the batch and needs no state.
    """
    windows = F.window("dateTime", _WINDOW, _SLIDE)
    counts = ops(watermarked(inputs.bids), "counts").groupBy(windows, "auction").agg(F.count("*").alias("num"))
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
    bids = watermarked(inputs.bids)
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
    persons = watermarked(inputs.persons).select("dateTime", period.alias("period"), "id", "name")
    auctions = watermarked(inputs.auctions).select("dateTime", period.alias("sold"), "seller")
    arrived = ops(persons, "arrived").dropDuplicates(["period", "id", "name"]).select("period", "id", "name")
    sold = ops(auctions, "sold").dropDuplicates(["sold", "seller"]).select("sold", "seller")
    on = (F.col("id") == F.col("seller")) & (F.col("period") == F.col("sold"))
    rows: DataFrame = ops(arrived, "both").join(sold, on, "inner")
    return rows.select("id", "name", *_ends("period"))


def q11(ops: Operators, inputs: Events) -> DataFrame:
    """Bids of each bidder's sessions; a session ends 10 s after its last bid."""
    session = F.session_window("dateTime", _WINDOW).alias("session")
    counts = ops(watermarked(inputs.bids), "sessions").groupBy("bidder", session).agg(F.count("*").alias("bid_count"))
    return counts.select("bidder", "bid_count", *_ends("session"))


def q12(ops: Operators, inputs: Events) -> DataFrame:
    """Bids of each bidder in windows of 10 s of processing time: the time at which Spark began the micro-batch.

    Spark notes that time in the checkpoint, so a batch that is repeated counts in the same window.
    """
    bids = inputs.bids.select("bidder", F.current_timestamp().alias("arrival")).withWatermark("arrival", "0 seconds")
    windows = F.window("arrival", _WINDOW)
    counts = ops(bids, "counts", "update").groupBy("bidder", windows).agg(F.count("*").alias("bid_count"))
    return counts.select("bidder", "bid_count", *_ends("window"))


# -- statistics of days


def price_rank() -> Column:
    """Price rank of a bid: 1 below 10^4, 2 below 10^6, 3 above."""
    return F.when(F.col("price") < 10_000, 1).when(F.col("price") < 1_000_000, 2).otherwise(3)


def day() -> Column:
    return F.date_format("period.start", "yyyy-MM-dd").alias("day")


def q17(ops: Operators, inputs: Events) -> DataFrame:
    """Bids of each auction and day: how many, of each price rank, and the lowest, highest, average and sum of prices."""
    period = F.window("dateTime", "1 day").alias("period")
    counted: DataFrame = (
        ops(watermarked(inputs.bids), "days", "update")
        .groupBy("auction", period)
        .agg(
            F.count("*").alias("total_bids"),
            *(F.count_if(price_rank() == rank).alias(f"rank{rank}_bids") for rank in PRICE_RANKS),
            F.min("price").alias("min_price"),
            F.max("price").alias("max_price"),
            F.expr("sum(price) DIV count(price)").alias("avg_price"),
            F.sum("price").alias("sum_price"),
        )
    )
    return counted.select("auction", day(), *counted.columns[2:])


# -- joins: sellers and listings


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


#: In the order of their numbers.
QUERIES: Final[dict[str, Query]] = {
    query.name: query
    for query in (
        Query("q3", q3, "append"),
        Query("q5", q5, "append"),
        Query("q7", q7, "append"),
        Query("q8", q8, "append"),
        Query("q11", q11, "append"),
        Query("q12", q12, "update"),
        Query("q17", q17, "update"),
        Query("q20", q20, "append"),
    )
}

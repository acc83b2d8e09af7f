"""Nexmark's queries over windows of time: hopping, tumbling, sessions, and processing time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.nexmark.files import Inputs
from benchmarks.nexmark.query import Operators, Query, marked

_WINDOW: Final = "10 seconds"
_SLIDE: Final = "2 seconds"


def q5(ops: Operators, inputs: Inputs) -> DataFrame:
    """Hot items: the auctions with the most bids in each window of 10 s that slides by 2 s; all of them where several tie.

    The fleet counts. In append mode all counts of a window come in the one batch that closes it, so which are the highest is told
    within the batch and needs no state.
    """
    windows = F.window("dateTime", _WINDOW, _SLIDE)
    counts = ops(marked(inputs.bids), "counts").groupBy(windows, "auction").agg(F.count("*").alias("num"))
    flat = counts.select(
        F.col("window.start").alias("starttime"), F.col("window.end").alias("endtime"), "auction", "num"
    )
    cores = flat.sparkSession.sparkContext.defaultParallelism
    hottest: DataFrame = flat.repartition(cores, "starttime").mapInArrow(_most_of_each_window, flat.schema)
    return hottest


def _most_of_each_window(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows with the highest ``num`` of their ``starttime``, among all rows of a partition."""
    kept = list(batches)
    if not kept:
        return
    counts = pa.Table.from_batches(kept)
    most = counts.group_by("starttime").aggregate([("num", "max")]).rename_columns(["starttime", "num"])
    hottest = counts.join(most, ["starttime", "num"], join_type="left semi")
    yield from hottest.select(counts.column_names).to_batches()


def q7(ops: Operators, inputs: Inputs) -> DataFrame:
    """The highest bids of each window of 10 s, all of them where several tie; both ends of a window count as in it.

    The highest price of a window is known once the window closes, and meets the bids that the join has kept until then.
    """
    bids = marked(inputs.bids)
    prices = ops(bids, "highest").groupBy(F.window("dateTime", _WINDOW)).agg(F.max("price").alias("highest"))
    highest = prices.select(
        F.window_time("window").alias("closing"),
        F.col("window.start").alias("starttime"),
        F.col("window.end").alias("endtime"),
        "highest",
    )
    selected = bids.select("auction", "bidder", "price", "dateTime", "extra", "eventNumber")
    # The watermark knows the window by its last microsecond; these bounds say how long bids need to be kept.
    kept = "dateTime >= closing - INTERVAL 10 SECONDS AND dateTime <= closing + INTERVAL 1 SECOND"
    in_window = F.col("dateTime").between(F.col("starttime"), F.col("endtime"))
    on = (F.col("price") == F.col("highest")) & F.expr(kept) & in_window
    rows: DataFrame = ops(selected, "bids").join(highest, on, "inner")
    return rows.select("endtime", "auction", "bidder", "price", "dateTime", "extra", "eventNumber")


def q8(ops: Operators, inputs: Inputs) -> DataFrame:
    """Who arrived and opened an auction in the same window of 10 s."""
    period = F.window("dateTime", _WINDOW)
    persons = marked(inputs.persons).select("dateTime", period.alias("period"), "id", "name")
    auctions = marked(inputs.auctions).select("dateTime", period.alias("sold"), "seller")
    arrived = ops(persons, "arrived").dropDuplicates(["period", "id", "name"]).select("period", "id", "name")
    sold = ops(auctions, "sold").dropDuplicates(["sold", "seller"]).select("sold", "seller")
    on = (F.col("id") == F.col("seller")) & (F.col("period") == F.col("sold"))
    rows: DataFrame = ops(arrived, "both").join(sold, on, "inner")
    return rows.select("id", "name", F.col("period.start").alias("starttime"), F.col("period.end").alias("endtime"))


def q11(ops: Operators, inputs: Inputs) -> DataFrame:
    """Bids of each bidder's sessions; a session ends 10 s after its last bid."""
    session = F.session_window("dateTime", _WINDOW).alias("session")
    counts = ops(marked(inputs.bids), "sessions").groupBy("bidder", session).agg(F.count("*").alias("bid_count"))
    rows: DataFrame = counts.select(
        "bidder", "bid_count", F.col("session.start").alias("starttime"), F.col("session.end").alias("endtime")
    )
    return rows


def q12(ops: Operators, inputs: Inputs) -> DataFrame:
    """Bids of each bidder in windows of 10 s of processing time: the time at which Spark began the micro-batch.

    Spark notes that time in the checkpoint, so a batch that is repeated counts in the same window.
    """
    bids = inputs.bids.select("bidder", F.current_timestamp().alias("arrival")).withWatermark("arrival", "0 seconds")
    windows = F.window("arrival", _WINDOW)
    counts = ops(bids, "counts", "update").groupBy("bidder", windows).agg(F.count("*").alias("bid_count"))
    rows: DataFrame = counts.select(
        "bidder", "bid_count", F.col("window.start").alias("starttime"), F.col("window.end").alias("endtime")
    )
    return rows


def _sum_of_windows(table: DataFrame) -> DataFrame:
    """Bids of each bidder in all windows of :func:`q12`: what does not depend on when they were read."""
    return table.groupBy("bidder").agg(F.sum("bid_count").alias("bid_count"))


WINDOWED: Final = (
    Query("q5", q5, ("starttime", "auction"), "append", closes=True, plain_spark=True),
    Query("q7", q7, ("endtime", "eventNumber"), "append", closes=True, plain_spark=True),
    # A pair is emitted as soon as both are there; the watermark only removes rows.
    Query("q8", q8, ("starttime", "id"), "append", plain_spark=True),
    Query("q11", q11, ("bidder", "starttime"), "append", closes=True, plain_spark=True),
    Query("q12", q12, ("bidder", "starttime"), "update", finish=_sum_of_windows, plain_spark=True),
)

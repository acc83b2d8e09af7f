"""The places where a watermark may stand: Spark's, exactly; elsewhere the query is refused when it is built."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from spark_jobs.fleet import Fleet
from spark_jobs.plan.event_time import branches_of
from tests.integration.streams import Feed, Run

Build = Callable[[DataFrame, DataFrame], DataFrame]


def marked(frame: DataFrame, delay: str = "5 seconds") -> DataFrame:
    return frame.withWatermark("timestamp", delay)


FOLLOWED: dict[str, Build] = {
    "plain": lambda rate, static: marked(rate),
    "a filter on another column": lambda rate, static: marked(rate).where("value > 3"),
    "a filter that only asks for the event time": lambda rate, static: marked(rate).where("timestamp IS NOT NULL"),
    "projections": lambda rate, static: (
        marked(rate).select("timestamp", (F.col("value") * 2).alias("v")).where("v > 3")
    ),
    "a window column": lambda rate, static: marked(rate).select(F.window("timestamp", "5 seconds"), "timestamp"),
    "left outer join": lambda rate, static: marked(rate).join(static, "value", "left"),
    "explode_outer": lambda rate, static: marked(rate).select("timestamp", F.explode_outer(F.array("value"))),
    "union below": lambda rate, static: marked(rate.union(rate)),
    "join and filter below": lambda rate, static: marked(rate.where("timestamp > '2020-01-01'").join(static, "value")),
    "union with an unmarked stream": lambda rate, static: marked(rate).union(rate),
    "union of marked streams": lambda rate, static: marked(rate).union(marked(rate, "9 seconds")).where("value > 3"),
    "none": lambda rate, static: rate.where("timestamp > '2020-01-01'"),
}
REFUSED: dict[str, tuple[Build, str]] = {
    "filter on event time": (lambda rate, static: marked(rate).where("timestamp > '2020-01-01'"), "Filter"),
    "filter by chance": (lambda rate, static: marked(rate).where(F.rand() > 0.5), "Filter"),
    "inner join": (lambda rate, static: marked(rate).join(static, "value"), "Join"),
    "marked twice": (lambda rate, static: marked(marked(rate), "1 second"), "several watermarks"),
    "explode": (lambda rate, static: marked(rate).select("timestamp", F.explode(F.array("value"))), "Generate"),
    "Python function": (
        lambda rate, static: marked(rate).mapInArrow(lambda batches: batches, rate.schema),
        "MapInArrow",
    ),
    "deduplication": (lambda rate, static: marked(rate).dropDuplicates(["value"]), "Deduplicate"),
}


@pytest.fixture
def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


@pytest.fixture
def static(spark: SparkSession) -> DataFrame:
    return spark.range(3).withColumnRenamed("id", "value")


@pytest.mark.parametrize("case", FOLLOWED)
def test_what_drops_no_row_is_accepted(rate: DataFrame, static: DataFrame, case: str) -> None:
    """Nothing is raised."""
    branches_of(FOLLOWED[case](rate, static))


@pytest.mark.parametrize("case", REFUSED)
def test_what_spark_would_count_differently_is_refused(rate: DataFrame, static: DataFrame, case: str) -> None:
    build, named = REFUSED[case]
    with pytest.raises(InvalidRequestError, match=f"withWatermark.*{named}|{named}.*withWatermark"):
        branches_of(build(rate, static))


EVENTS = pa.schema([("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.int64())])


def windowed(frame: Any) -> DataFrame:
    counts: DataFrame = frame.groupBy(F.window("timestamp", "5 seconds")).count()
    return counts.select(F.col("window.start").cast("long").alias("start"), "count")


@pytest.mark.replay
def test_a_filter_on_another_column_moves_the_watermark_as_in_spark(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", EVENTS)

    def stream() -> DataFrame:
        return marked(feed.stream()).where("value > 0")

    runs = [
        Run(windowed(fleet.stateful(stream(), name=name, outputMode="append")), "append", tmp_path / "ck-fleet"),
        Run(windowed(stream()), "append", tmp_path / "ck-spark"),
    ]
    try:
        for rows in ([(1, 1), (7, 1), (90, 0)], [(21, 2), (2, 1)], [(3, 1), (40, 1)], [(60, 0)], [(60, 1), (41, 1)]):
            feed.add([(dt.datetime.fromtimestamp(second, dt.UTC), value) for second, value in rows])
            ours, theirs = (sorted(tuple(row) for row in run.take()) for run in runs)
            assert ours == theirs, rows
    finally:
        for run in runs:
            run.stop()


def test_an_operator_after_another_is_refused(rate: DataFrame, fleet: Fleet, name: str) -> None:
    first = fleet.stateful(rate, name=name).groupBy("value").count()
    with pytest.raises(InvalidRequestError, match="second query"):
        fleet.stateful(first, name=f"{name}-2").groupBy("count").count()

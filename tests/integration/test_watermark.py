"""Watermarks move as in Spark; operators that would count rows twice are refused."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run, stopping


def marked(frame: DataFrame, delay: str = "5 seconds") -> DataFrame:
    return frame.withWatermark("timestamp", delay)


@pytest.fixture
def rate(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


EVENTS = pa.schema([("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.int64())])


def windowed(frame: Any) -> DataFrame:
    counts: DataFrame = frame.groupBy(F.window("timestamp", "5 seconds")).count()
    return counts.select(F.col("window.start").cast("long").alias("start"), "count")


@pytest.mark.replay
def test_a_filter_on_another_column_moves_the_watermark_as_in_spark(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", EVENTS)

    def stream() -> DataFrame:
        return marked(feed.stream()).where("value > 0")

    with stopping(
        [
            Run(windowed(fleet.stateful(stream(), name=name, outputMode="append")), "append", tmp_path / "ck-fleet"),
            Run(windowed(stream()), "append", tmp_path / "ck-spark"),
        ]
    ) as runs:
        for rows in ([(1, 1), (7, 1), (90, 0)], [(21, 2), (2, 1)], [(3, 1), (40, 1)], [(60, 0)], [(60, 1), (41, 1)]):
            feed.add([(dt.datetime.fromtimestamp(second, dt.UTC), value) for second, value in rows])
            ours, theirs = (sorted(tuple(row) for row in run.take()) for run in runs)
            assert ours == theirs, rows


def test_an_operator_after_another_is_refused(rate: DataFrame, fleet: Fleet, name: str) -> None:
    first = fleet.stateful(rate, name=name).groupBy("value").count()
    with pytest.raises(InvalidRequestError, match="second query"):
        fleet.stateful(first, name=f"{name}-2").groupBy("count").count()

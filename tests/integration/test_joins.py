"""Joins of two streams: what is refused when a query is built, schemas, and a condition that overflows.

Random rows of every join type beside Spark are in :mod:`tests.integration.test_random_programs`.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from statefleet.fleet import Fleet
from tests.integration.case_systems import Inputs
from tests.integration.streams import Feed, Run

KINDS = ("inner", "left_outer", "right_outer", "full_outer", "left_semi")
COLUMNS = {"a": "k double, t timestamp, x int", "b": "k double, u timestamp, y int"}


@pytest.fixture
def streams(spark: SparkSession, tmp_path: Path) -> dict[str, DataFrame]:
    return Inputs(spark, tmp_path / "in", COLUMNS).streams()


def test_a_condition_that_an_outer_join_cannot_evaluate_is_named(
    fleet: Fleet, streams: dict[str, DataFrame], name: str
) -> None:
    left, right = streams["a"].withWatermark("t", "1 second"), streams["b"].withWatermark("u", "1 second")
    on = (left["k"] == right["k"]) & (left["t"] == right["u"]) & (F.pow(left["x"], right["y"]) > 3)
    with pytest.raises(InvalidRequestError, match="POWER"):
        fleet.stateful(left, name=name).join(right, on, "left_outer")


def test_results_have_sparks_schema_and_are_named_by_the_joined_frames(
    fleet: Fleet, streams: dict[str, DataFrame], name: str
) -> None:
    left = streams["a"].withWatermark("t", "1 second").select("*", F.lit(1).alias("one"), F.struct("x").alias("s"))
    right = streams["b"].withWatermark("u", "1 second").select("*", F.lit(2).alias("two"), F.struct("y").alias("s"))
    for how in KINDS:
        for on in ((left["k"] == right["k"]) & (left["t"] == right["u"]), ["k"]):
            if isinstance(on, list) and how != "inner":
                continue
            ours = fleet.stateful(left, name=name).join(right, on, how)
            assert ours.schema == left.join(right, on, how).schema, how
            assert ours.select(left["x"], left["s"]["x"]).columns == ["x", "s.x"]


def test_a_condition_that_overflows_fails_the_batch_and_says_so(fleet: Fleet, tmp_path: Path, name: str) -> None:
    """Announced: Spark drops the row as late before it computes the condition."""
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.string()), ("micros", pa.int64())]))
    left = feed.stream().withColumn("t", F.timestamp_micros("micros")).withWatermark("t", "10 seconds")
    right = left.selectExpr("k k2", "t u")
    soon = F.expr("k = k2 and u between t - interval 5 seconds and t + interval 8 seconds")
    with Run(
        fleet.stateful(left, name=name, shards=2).join(right, soon, "left_outer"), "append", tmp_path / "ck"
    ) as run:
        feed.add([("a", -(2**63))])
        with pytest.raises(StreamingQueryException, match="overflow"):
            run.wait()

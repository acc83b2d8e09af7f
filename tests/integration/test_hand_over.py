"""Tasks that hand rows over to the store actor of their node, without Python workers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_jobs.fleet import Fleet
from spark_jobs.session.settings import HAND_OVER
from tests.integration.case_systems import ALL_CASES, compare_case, configured
from tests.integration.streams import Feed, Run, short_list

HANDED_OVER = {HAND_OVER: "true"}
#: Aggregations by keys without a watermark, which are what is handed over.
AGGREGATIONS = [
    "A1 count by value, update",
    "A2 count by value, complete",
    "A4 rows updated",
    "collect_list and collect_set, update",
    "collect_list and collect_set, complete",
    "rollup, update",
    "distinct",
]
ROWS = pa.schema([("k", pa.string()), ("v", pa.int64())])


def plan_of(run: Run) -> str:
    """Return the plan of a query's newest batch."""
    return str(run.query._jsq.explainInternal(False))


@pytest.mark.parametrize("case_name", short_list(AGGREGATIONS, ["A1 count by value, update"]))
def test_results_are_those_of_spark(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str
) -> None:
    case = ALL_CASES[case_name]
    compare_case(spark, fleet, tmp_path, name, case_name, case, with_spark=case.spark, shards=5, conf=HANDED_OVER)


def test_a_query_changes_the_way_with_its_state(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(spark, tmp_path / "in", ROWS)
    frame = fleet.stateful(feed.stream(), name=name, shards=5).groupBy("k").agg(F.sum("v").alias("s"))
    for number, (setting, total) in enumerate((("false", 1), ("true", 3), ("false", 6))):
        with configured(spark, {HAND_OVER: setting}):
            run = Run(frame, "update", tmp_path / "ck")
            try:
                feed.add([("a", number + 1)])
                assert [tuple(row) for row in run.take()] == [("a", total)]
                assert ("HandOver" in plan_of(run)) == (setting == "true")
                (query,) = (query for query in fleet.status()["queries"] if query["name"] == name)
                # Shards without rows commit the batch, too.
                assert {shard["version"] for shard in query["shards"]} == {query["version"]}
            finally:
                run.stop()


def test_what_is_not_handed_over_goes_by_python(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(spark, tmp_path / "in", ROWS)
    frame = fleet.stateful(feed.stream(), name=name, shards=2).dropDuplicates(["k"])
    with configured(spark, HANDED_OVER):
        run = Run(frame, "append", tmp_path / "ck")
        try:
            feed.add([("a", 1), ("a", 1)])
            assert [tuple(row) for row in run.take()] == [("a", 1)]
            assert "HandOver" not in plan_of(run)
        finally:
            run.stop()


def test_an_error_of_the_store_actor_is_that_of_the_query(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", ROWS)
    with configured(spark, {**HANDED_OVER, "spark.sql.ansi.enabled": "true"}):
        frame = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").agg(F.sum("v").alias("s"))
        run = Run(frame, "update", tmp_path / "ck")
        try:
            feed.add([("a", 2**63 - 1), ("a", 1)])
            with pytest.raises(StreamingQueryException, match="overflow"):
                run.wait()
        finally:
            run.stop()

"""Every replay case on the fleet, and on Spark where it can run it; see :mod:`tests.integration.operator_cases`.

Operators that Spark has, too, are in :mod:`tests.integration.test_random_programs`; cases of them are of what no program there has.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.case_systems import ALL_CASES, compare_case
from tests.integration.streams import Feed, Run, short_list
from tests.tasks import deltas_of

#: Of each kind of case one that no random program has, for every change; the others are replayed by a command of their own.
SHORT_LIST = {
    "topN",
    "topN of equal values",
    "keepLast",
    "late rows of a join by key, one time read",
    "grouping sets, update",
}


@pytest.mark.parametrize("case_name", short_list(ALL_CASES, SHORT_LIST))
def test_case(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str) -> None:
    case = ALL_CASES[case_name]
    compare_case(spark, fleet, tmp_path, name, case_name, case, with_spark=case.spark)


@pytest.mark.parametrize("is_below_an_operator", [False, True])
def test_a_union_with_a_growing_number_of_partitions_leaves_every_row_to_its_shard(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, is_below_an_operator: bool
) -> None:
    """D9: Spark numbers the tasks of a union one branch after the other, and the first one's are more in the second batch."""
    rows = StructType([StructField("k", StringType())])
    first, second = (Feed(tmp_path / part, SPARK.arrow_schema(rows)) for part in ("a", "b"))
    all_files = spark.readStream.schema(rows).option("pathGlobFilter", "*.parquet").parquet(str(tmp_path / "a"))
    distinct = fleet.stateful(second.stream(), name=f"{name}-distinct", shards=2).dropDuplicates()
    result = all_files.unionAll(distinct)
    if is_below_an_operator:
        result = fleet.stateful(result, name=f"{name}-counts", shards=3).groupBy("k").count()
    first.add([("z",)])
    second.add([(letter,) for letter in "abcdef"])
    with Run(result, "update", tmp_path / "ck") as run:
        assert sorted(row["k"] for row in run.take()) == [*"abcdef", "z"]
        for number in range(4):
            first.add([(f"z{number}",)])
        second.add([(letter,) for letter in "abcdefg"])
        assert sorted(row["k"] for row in run.take()) == ["g", "z0", "z1", "z2", "z3"]
    shards = [len(entry["shards"]) for entry in fleet.status()["queries"] if entry["name"] == f"{name}-distinct"]
    assert shards == [2]
    for shard in range(4):
        assert bool(deltas_of(fleet, f"{name}-distinct", shard)) == (shard < 2)


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

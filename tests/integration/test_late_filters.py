"""Filters that follow an operator decide which rows move the watermark below it, as they do where the operator is Spark's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.fleet import Fleet
from tests.integration.operator_cases import Case, Operators, seconds
from tests.integration.test_operators import Inputs, System, own

COLUMNS = {"a": "k string, t timestamp, x int", "b": "k2 string, u timestamp, y int"}
NEAR = "u between t - interval 10 seconds and t + interval 10 seconds"
#: Rows of both inputs for each batch. Those of "q" move the watermark by far unless a filter leaves them out before.
BATCHES: tuple[tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]], ...] = (
    ([("p", 10, 1)], [("p", 12, 1)]),
    ([("q", 100, 0), (None, 101, 0)], [("q", 100, 0), ("p", 101, None)]),
    ([("p", 20, 1), ("p", 31, 2)], [("p", 21, 1), ("p", 33, 1)]),
    ([("p", 200, 1)], [("p", 201, 1)]),
    ([("p", 300, 1)], [("p", 301, 1)]),
)

Query = Callable[[Operators, Mapping[str, DataFrame]], DataFrame]


def windows(ops: Operators, i: Mapping[str, DataFrame], name: str = "windows") -> DataFrame:
    counts = ops(i["a"].withWatermark("t", "0 seconds"), name).groupBy(F.window("t", "10 seconds"), "k").count()
    return counts.withColumn("window", seconds("window.start"))  # type: ignore[no-any-return]


def matches(ops: Operators, i: Mapping[str, DataFrame], how: str, more: str = "") -> DataFrame:
    left, right = i["a"].withWatermark("t", "0 seconds"), i["b"].withWatermark("u", "0 seconds")
    return ops(left, "join").join(right, F.expr(f"k = k2 and {NEAR}{more}"), how)  # type: ignore[no-any-return]


def flat(frame: DataFrame) -> DataFrame:
    return frame.select("k", seconds("t").alias("t"), "x", seconds("u").alias("u"), "y")


def called(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """A filter by a function of Python's, which Spark moves as any other."""
    is_p = F.udf(lambda key: key == "p", "boolean")
    return windows(ops, i).where(is_p("k"))


def twice(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """One operator's results by two ways, each with a filter of its own: no row may be left out below it."""
    counts = windows(ops, i)
    return counts.where("k = 'p'").unionAll(counts.where("k = 'q'"))


def once(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """The same rows by a filter that Spark does not move."""
    return windows(ops, i).where("case when rand() >= 0 then k is not null end")


def of_today(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """A filter by the time of the batch, which the next batch has another one for."""
    rows = i["a"].withColumn("day", F.when(F.col("k") == "q", F.lit(None)).otherwise(F.lit("2020-01-01").cast("date")))
    counts = (
        ops(rows.withWatermark("t", "0 seconds"), "windows").groupBy(F.window("t", "10 seconds"), "k", "day").count()
    )
    return counts.where("day < current_date()").select(seconds("window.start").alias("start"), "k", "count")  # type: ignore[no-any-return]


def with_names(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """A join with a static table wants keys that are there."""
    spark = i["a"].sparkSession
    names = spark.createDataFrame([("p", "a name"), ("q", "another")], "k string, name string")
    return windows(ops, i).join(names.where("name != 'another'"), "k").where("k != 'q'")


def windows_of_matches(how: str) -> Query:
    """Windows of a time that an outer join may lack want matched rows."""

    def query(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
        matched = matches(ops, i, how, " and y is not null").drop("u")
        counts = ops(matched, "counts").groupBy(F.window("t", "10 seconds"), "k").count()
        return counts.withColumn("window", seconds("window.start"))  # type: ignore[no-any-return]

    return query


QUERIES: dict[str, Query] = {
    "groups": lambda ops, i: windows(ops, i).where("k = 'p' and count > 0"),
    "an inner join's sides": lambda ops, i: flat(matches(ops, i, "inner").where("x > 0 and y > 0")),
    "windows of what a right outer join may lack": windows_of_matches("right_outer"),
    "windows of what a left outer join has": windows_of_matches("left_outer"),
    "a function of Python's": called,
    "an outer join's filtered side": lambda ops, i: flat(matches(ops, i, "left_outer").where("y = 1")),
    "a static table's keys": with_names,
    "the time of the batch": of_today,
    "one operator twice": twice,
    "nothing that is filtered": windows,
}
#: Where Spark runs an operator for each use, with filters of its own, and the fleet one for all: Spark's query to compare with.
SPARKS = {"one operator twice": once}
#: Of these the fleet's operator keeps rows that Spark's does not, of which none comes out.
KEEPS_MORE = ("windows of what a right outer join may lack", "an outer join's filtered side", "one operator twice")
SHORT_LIST = ("groups", "an inner join's sides", "windows of what a right outer join may lack")


@pytest.mark.parametrize(
    "which",
    [pytest.param(which, marks=[] if which in SHORT_LIST else [pytest.mark.replay]) for which in QUERIES],
)
def test_filters_after_an_operator_leave_the_rows_in_the_batches_that_spark_has_them_in(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, which: str
) -> None:
    def ours(frame: DataFrame, operator: str, mode: str = "append") -> Any:
        return fleet.stateful(frame, name=f"{name}-{operator}", outputMode=mode, shards=2)

    inputs, query = Inputs(spark, tmp_path / "in", COLUMNS), QUERIES[which]
    systems = [
        System(Case(COLUMNS, query, []), inputs, ours, tmp_path / "fleet"),
        System(Case(COLUMNS, SPARKS.get(which, query), []), inputs, own, tmp_path / "spark"),
    ]
    emitted = 0
    try:
        for left, right in BATCHES:
            inputs.add({"a": left, "b": right})
            found, expected = (system.take() for system in systems)
            assert found == expected
            emitted += sum(map(len, found.values()))
            if which not in KEEPS_MORE:
                assert systems[0].run.states() == systems[1].run.states()
        assert emitted > 1
    finally:
        for system in systems:
            system.run.stop()

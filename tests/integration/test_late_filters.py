"""Filters that follow an operator: which rows move the watermark below it, and which it keeps, is as where it is Spark's own.

Those of columns alone, after one operator, are in :mod:`tests.integration.test_random_programs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.case_systems import Inputs, System, on_fleet, on_spark
from tests.integration.operator_cases import Case, Operators, seconds
from tests.integration.streams import Run

COLUMNS = {"a": "k string, t timestamp, x int", "b": "k2 string, u timestamp, y int"}
#: Rows of both inputs for each batch. Those of "q" move the watermark by far unless a filter leaves them out before.
BATCHES: tuple[tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]], ...] = (
    ([("p", 10, 1)], [("p", 12, 1)]),
    ([("q", 100, 0), (None, 101, 0)], [("q", 100, 0), ("p", 101, None)]),
    ([("p", 20, 1), ("p", 31, 2)], [("p", 21, 1), ("p", 33, 1)]),
    ([("p", 200, 1)], [("p", 201, 1)]),
    ([("p", 300, 1)], [("p", 301, 1)]),
)

Query = Callable[[Operators, Mapping[str, DataFrame]], DataFrame]


def windows(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    counts = ops(i["a"].withWatermark("t", "0 seconds"), "windows").groupBy(F.window("t", "10 seconds"), "k").count()
    return counts.withColumn("window", seconds("window.start"))  # type: ignore[no-any-return]


def called(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Filter by a Python function; Spark moves it as any other."""
    is_p = F.udf(lambda key: key == "p", "boolean")
    return windows(ops, i).where(is_p("k"))


def twice(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Use an operator's results in two ways, each with a filter of its own: no row may be left out below it."""
    counts = windows(ops, i)
    return counts.where("k = 'p'").unionAll(counts.where("k = 'q'"))


def once(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Return the same rows by a filter that Spark does not move."""
    return windows(ops, i).where("case when rand() >= 0 then k is not null end")


def of_today(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Filter by the time of the batch, which is another one in the next batch."""
    rows = i["a"].withColumn("day", F.when(F.col("k") == "q", F.lit(None)).otherwise(F.lit("2020-01-01").cast("date")))
    counts = (
        ops(rows.withWatermark("t", "0 seconds"), "windows").groupBy(F.window("t", "10 seconds"), "k", "day").count()
    )
    return counts.where("day < current_date()").select(seconds("window.start").alias("start"), "k", "count")  # type: ignore[no-any-return]


def with_names(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Join with a static table, which needs keys that are not null."""
    spark = i["a"].sparkSession
    names = spark.createDataFrame([("p", "a name"), ("q", "another")], "k string, name string")
    return windows(ops, i).join(names.where("name != 'another'"), "k").where("k != 'q'")


def of_a_chain(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Through both operators, and by the counts of the first up to the second."""
    rows = ops(i["a"].withWatermark("t", "0 seconds"), "fine")
    fine = rows.groupBy(F.window("t", "5 seconds"), "k").count()
    wider = ops(fine, "wider").groupBy(F.window("window", "10 seconds"), "k", F.col("count").alias("n")).count()
    filtered = wider.where(F.col("window.start") > F.timestamp_seconds(F.lit(15))).where("n < 2 and k is not null")
    return filtered.select(seconds("window.start").alias("start"), "k", "n", "count")  # type: ignore[no-any-return]


QUERIES: dict[str, Query] = {
    "a function of Python's": called,
    "a static table's keys": with_names,
    "the time of the batch": of_today,
    "one operator twice": twice,
    "a chain": of_a_chain,
}
#: Where Spark runs an operator for each use, with filters of its own, and the fleet one for all: Spark's query to compare with.
SPARKS = {"one operator twice": once}


@pytest.mark.replay
@pytest.mark.parametrize("which", QUERIES)
def test_filters_after_an_operator_leave_the_rows_in_the_batches_that_spark_has_them_in(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, which: str
) -> None:
    inputs, query = Inputs(spark, tmp_path / "in", COLUMNS), QUERIES[which]
    systems = [
        System(Case(COLUMNS, build, []), inputs, operators, tmp_path / side)
        for side, build, operators in (
            ("fleet", query, on_fleet(fleet, name)),
            ("spark", SPARKS.get(which, query), on_spark),
        )
    ]
    emitted = 0
    try:
        for left, right in BATCHES:
            inputs.add({"a": left, "b": right})
            emitted_rows, expected = (system.take() for system in systems)
            assert emitted_rows == expected
            emitted += sum(map(len, emitted_rows.values()))
            # Of one operator with two filters the fleet keeps rows that Spark's two do not, of which none comes out.
            if which not in SPARKS:
                assert systems[0].run.states() == systems[1].run.states()
        assert emitted > 1
    finally:
        for system in systems:
            system.run.stop()


@pytest.mark.replay
def test_a_limit_reads_all_rows_of_its_source(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    """Spark's own limit reads no more than it needs, and these rows alone move its watermark."""
    inputs = Inputs(spark, tmp_path / "in", COLUMNS)
    inputs.add({"a": [("p", 10, 1), ("p", 60, 1)], "b": []})
    newest_of_each = []
    for side, line in (("fleet", lambda rows: fleet.stateful(rows, name=name)), ("spark", lambda rows: rows)):
        rows = inputs.streams()["a"].repartition(1).withWatermark("t", "0 seconds")
        with Run(line(rows).limit(1), "append", tmp_path / side) as run:
            assert len(run.take()) == 1
            newest = {progress["eventTime"]["max"] for progress in run.query.recentProgress if progress["batchId"] == 0}
        newest_of_each.append(newest)
    assert newest_of_each == [{"1970-01-01T00:01:00.000Z"}, {"1970-01-01T00:00:10.000Z"}]


@pytest.mark.replay
def test_joined_aggregations_of_one_form_have_a_watermark_each(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    """Spark 3.5 reuses a shuffle in a batch without data, and its second aggregation lets in what is late two batches later."""
    inputs = Inputs(spark, tmp_path / "in", COLUMNS)

    def query(line: Callable[[DataFrame, str], Any]) -> DataFrame:
        # Of one source: a file comes to both sides in the same batch.
        left, right = inputs.streams().values()
        counts = line(left.withWatermark("t", "0 seconds"), "left").groupBy(F.window("t", "10 seconds"), "k").count()
        other_groups = line(right.withWatermark("u", "0 seconds"), "right").groupBy(F.window("u", "10 seconds"), "k2")
        counted = other_groups.count().toDF("window2", "k2", "n")
        joined = line(counts, "join").join(counted, F.expr("window = window2 and k = k2"), "full_outer")
        return joined.select(seconds("window2.start").alias("start"), "k2", "n", "count")  # type: ignore[no-any-return]

    # The modes are the query's.
    sides = {"fleet": lambda df, operator: fleet.stateful(df, name=f"{name}-{operator}", shards=2), "spark": on_spark}
    runs = {side: Run(query(line), "append", tmp_path / side) for side, line in sides.items()}
    try:
        inputs.add({"a": [("p", 45, 1)], "b": [("p", 45, 1), ("p", 12, 1)]})
        for run in runs.values():
            run.wait()
        # A backlog: its second file has a late row.
        inputs.add({"a": [("p", 46, 1)], "b": [("p", 46, 1)]})
        inputs.add({"a": [("p", 47, 1)], "b": [("p", 47, 1), ("p", 13, 1)]})
        emitted = {side: [tuple(row) for row in run.take()] for side, run in runs.items()}
        late_of_right = {side: sum(states[-1][-1] for states in run.states().values()) for side, run in runs.items()}
    finally:
        for run in runs.values():
            run.stop()
    assert emitted["fleet"] == emitted["spark"] == [(10, "p", 1, None)]
    # In Spark 4.2 a watermark has an identity, which keeps the shuffles above two of them apart.
    assert late_of_right == {"fleet": 1, "spark": 1 if SPARK.PROCESSOR_CLASSES else 0}

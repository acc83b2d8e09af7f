"""Replay cases of the transformations between ``fleet.stateful`` and its operator, and of grouping sets.

Spark runs each of them, and gives the expected rows; see :mod:`tests.integration.operator_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.integration.operator_cases import RESTART, Case, Operators, Step, seconds

EVENTS = {"a": "k string, t timestamp, x int"}
#: Rows of each step: a null key, a null of a rolled up column beside the total, a late row, a key that comes back.
ROWS: tuple[list[tuple[Any, ...]], ...] = (
    [("a", 10, 1), ("a", 10, 1), ("b", 20, 2)],
    [("a", 21, 1), (None, 31, 4), ("c", 30, None)],
    [("d", 60, 5), ("a", 61, 1)],
    [("b", 5, 9), ("e", 90, None)],
)
STEPS = [
    *(Step({"a": rows}, None) for rows in ROWS[:2]),
    RESTART,
    *(Step({"a": rows}, None) for rows in ROWS[2:]),
]


def doubled(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for frame in frames:
        yield frame.assign(x=frame["x"] * 2)


def marked(i: Mapping[str, DataFrame]) -> DataFrame:
    return i["a"].withWatermark("t", "5 seconds")


def rolled_up(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    sets = ops(i["a"], "agg", "update").rollup("k", "x")
    result: DataFrame = sets.agg(F.count("*"), F.sum("x"), F.avg("x"), F.grouping("k"), F.grouping_id())
    return result


def cubed(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    sets = ops(i["a"], "agg", "update").cube(F.col("k"), (F.col("x") % 2).alias("odd"))
    result: DataFrame = sets.agg(F.max("x").alias("m"), F.grouping_id().alias("id")).select("odd", "id", "k", "m")
    return result


def grouped_by_sets(ops: Operators, i: Mapping[str, DataFrame], mode: str) -> DataFrame:
    sets = ops(i["a"], "agg", mode).groupingSets([["k"], ["x"], []], "k", "x")
    result: DataFrame = sets.agg(F.count("*"), F.sum("x"), F.grouping("k"), F.grouping_id())
    return result


def windows_rolled_up(ops: Operators, i: Mapping[str, DataFrame], mode: str, slide: str = "10 seconds") -> DataFrame:
    sets = ops(marked(i), "agg", mode).rollup(F.window("t", "10 seconds", slide), "k")
    return sets.count().select(seconds("window.start"), "k", "count")  # type: ignore[no-any-return]


def times_cubed(ops: Operators, i: Mapping[str, DataFrame], mode: str) -> DataFrame:
    counts = ops(marked(i), "agg", mode).cube("t", "k").agg(F.count("*").alias("n"), F.grouping_id().alias("id"))
    return counts.select(seconds("t"), "k", "n", "id")  # type: ignore[no-any-return]


def through_everything(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Chain every transformation of single rows, between ``fleet.stateful`` and the operator."""
    spark = i["a"].sparkSession
    names = spark.createDataFrame([("a", "ann"), ("b", "bob"), ("d", "dan")], "k string, name string")
    frame = ops(i["a"], "agg", "update").na.fill({"x": 7}).join(names, "k", "left").dropna(subset=["k"])
    frame = frame.unionByName(frame.where(frame.x > 4).withColumn("k", F.lit("more"))).mapInPandas(
        doubled, frame.schema
    )
    frame = frame.withColumnRenamed("name", "who").transform(
        lambda joined: joined.select("k", "who", joined["x"].alias("x"))
    )
    frame = frame.select("k", "who", F.explode(F.array("x", F.lit(1))).alias("y")).alias("rows").hint("rebalance")
    result: DataFrame = frame.drop("who")[["k", "y"]].filter("y > 0").groupBy(F.col("rows.k")).agg({"y": "sum"})
    return result


def watermark_after_the_changed_line(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    frame = ops(i["a"], "agg", "Append").withWatermark("t", "5 seconds").withColumn("k", F.upper("k"))
    counts = frame.groupBy(F.window("t", "10 seconds"), frame.k).sum()
    return counts.select(seconds("window.start"), "k", "sum(x)")  # type: ignore[no-any-return]


def joined_with_itself(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    frame = ops(i["a"], "join")
    joined = frame.alias("l").join(frame.alias("r"), F.expr("l.k = r.k and l.x < r.x"))
    return joined.select("l.k", "l.x", F.col("r.x").alias("y"))  # type: ignore[no-any-return]


FRAME_CASES: dict[str, Case] = {
    "rollup, update": Case(EVENTS, rolled_up, STEPS, mode="update"),
    "cube, update": Case(EVENTS, cubed, STEPS, mode="update"),
    "rollup of windows, append": Case(EVENTS, lambda ops, i: windows_rolled_up(ops, i, "append"), STEPS),
    "rollup of windows, update": Case(EVENTS, lambda ops, i: windows_rolled_up(ops, i, "update"), STEPS, mode="update"),
    "rollup of sliding windows, append": Case(
        EVENTS, lambda ops, i: windows_rolled_up(ops, i, "append", "5 seconds"), STEPS
    ),
    "cube of event time, append": Case(EVENTS, lambda ops, i: times_cubed(ops, i, "append"), STEPS),
    "cube of event time, update": Case(EVENTS, lambda ops, i: times_cubed(ops, i, "update"), STEPS, mode="update"),
    "distinct": Case(EVENTS, lambda ops, i: ops(i["a"], "dedup").select("k", "x").distinct(), STEPS),
    "groups without aggregates": Case(
        EVENTS, lambda ops, i: ops(i["a"], "agg", "update").select("k").groupby("k").sum(), STEPS, mode="update"
    ),
    "everything between": Case(EVENTS, through_everything, STEPS, mode="update"),
    "a watermark after the changed line": Case(EVENTS, watermark_after_the_changed_line, STEPS),
    "self join of a frame": Case(EVENTS, joined_with_itself, STEPS),
}
if hasattr(DataFrame, "groupingSets"):
    FRAME_CASES |= {
        f"grouping sets, {mode}": Case(EVENTS, partial(grouped_by_sets, mode=mode), STEPS, mode=mode)
        for mode in ("update", "complete")
    }

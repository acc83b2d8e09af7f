"""Replay cases of stateful operators, written as data: what comes in, and what comes out of each step.

Each case runs on the fleet and, where Spark 3.5 can run it, on Spark itself, which must give the same rows at every step. The
fleet closes groups in batches without data, as Spark does; a step has those that follow it, too.
Names of cases are those of Spark's own tests that they follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_jobs.plan.spark_version import SPARK

#: Gives a DataFrame's next stateful operator, by name and output mode: on the fleet, or Spark's own.
Operators = Callable[..., Any]

#: In place of a step: the query is stopped and started again on the same checkpoint.
RESTART = "restart"


@dataclass(frozen=True)
class Step:
    """Rows that come in at once, by input, and the rows that come out."""

    rows: Mapping[str, Sequence[tuple[Any, ...]]]
    out: Sequence[tuple[Any, ...]] | None


@dataclass(frozen=True)
class Case:
    """A query and its steps.

    Attributes
    ----------
    inputs
        Columns of each input, as DDL; a column ``t`` of type timestamp is given in seconds.
    query
        Builds the query from the operators and the inputs; ``t`` in the results should be seconds again (see :func:`seconds`).
    spark
        Whether Spark 3.5 can run the query.
    mode
        Output mode of the query.
    """

    inputs: Mapping[str, str]
    query: Callable[[Operators, Mapping[str, DataFrame]], DataFrame]
    steps: Sequence[Step | str]
    spark: bool = True
    mode: str = "append"


def seconds(column: Any) -> Any:
    """Return a time as whole seconds."""
    return (F.col(column) if isinstance(column, str) else column).cast("long")


def times(*values: int) -> list[tuple[int]]:
    return [(value,) for value in values]


def one(*values: int) -> dict[str, list[tuple[int]]]:
    return {"a": times(*values)}


V = {"a": "v bigint"}
T = {"a": "t timestamp"}


def windows(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    marked = i["a"].withWatermark("t", "10 seconds")
    counts: DataFrame = ops(marked, "agg", "append").groupBy(F.window("t", "5 seconds")).count()
    return counts.select(seconds("window.start"), "count")


def chained_windows(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    first = ops(i["a"].withWatermark("t", "0 seconds"), "first", "append").groupBy(F.window("t", "5 seconds")).count()
    second = ops(first, "second", "append").groupBy(F.window("window", "10 seconds"))
    totals: DataFrame = second.agg(F.count("*").alias("n"), F.sum("count").alias("total"))
    return totals.select(seconds("window.start"), "n", "total")


def window_then_dedup(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    first = ops(i["a"].withWatermark("t", "0 seconds"), "first", "append").groupBy(F.window("t", "5 seconds")).count()
    flat = first.select(F.window_time("window").alias("t"), F.col("window.start").alias("start"), "count")
    distinct: DataFrame = ops(flat.select("start", "count"), "second").dropDuplicates()
    return distinct.select(seconds("start"), "count")


def sessions(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    words = i["a"].withWatermark("t", "30 seconds")
    grouped = ops(words, "sessions", "append").groupBy(F.session_window("t", "10 seconds").alias("session"), "word")
    counts: DataFrame = grouped.agg(F.count("*").alias("n"))
    return counts.select("word", seconds("session.start"), seconds("session.end"), "n")


def words(*lines: tuple[str, int]) -> dict[str, list[tuple[Any, ...]]]:
    return {"a": [(word, time) for line, time in lines for word in line.split()]}


WORDS = {"a": "word string, t timestamp"}
MERGED_SESSIONS = [
    ("hello", 40, 51, 2),
    ("spark", 25, 50, 3),
    ("streaming", 25, 51, 4),
    ("structured", 41, 51, 1),
    ("world", 40, 51, 2),
]


def collected(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    grouped = ops(i["a"], "agg", "update").groupBy("k")
    lists: DataFrame = grouped.agg(
        F.collect_list("v").alias("all"),
        F.sort_array(F.collect_set("v")).alias("different"),
        F.expr("array_agg(cast(v as string)) FILTER (WHERE v > 1)").alias("large"),
        F.count("*").alias("n"),
    )
    return lists


CASES: dict[str, Case] = {
    "collect_list and collect_set, update": Case(
        {"a": "k string, v int"},
        collected,
        [
            Step(
                {"a": [("a", 2), ("a", 1), ("b", None), ("a", 2), (None, 5)]},
                [("a", [2, 1, 2], [1, 2], ["2", "2"], 3), ("b", [], [], [], 1), (None, [5], [5], ["5"], 1)],
            ),
            Step({"a": [("a", None), ("b", 1)]}, [("a", [2, 1, 2], [1, 2], ["2", "2"], 4), ("b", [1], [1], [], 2)]),
            RESTART,
            Step({"a": [("a", 3), ("a", 1)]}, [("a", [2, 1, 2, 3, 1], [1, 2, 3], ["2", "2", "3"], 6)]),
        ],
        mode="update",
    ),
    "late rows of dropDuplicates by a time of which a key is computed": Case(
        {"a": "k string, t timestamp, v int"},
        lambda ops, i: (
            ops(i["a"].withWatermark("t", "10 seconds").withColumn("minute", F.date_trunc("minute", "t")), "dedup")
            .dropDuplicates(["k", "minute"])
            .select("k", seconds("t"), "v")
        ),
        [
            Step({"a": [("a", 100, 1), ("b", 101, 2)]}, None),
            # The watermark is at 91: the first two are late, and one without a time never is.
            Step({"a": [("c", 50, 3), ("d", 91, 4), ("e", 92, 5), ("f", None, 6), ("a", 93, 7)]}, None),
            RESTART,
            Step({"a": [("c", 95, 8), ("d", 80, 9), ("g", 130, 10)]}, None),
            Step({"a": [("c", 131, 11), ("d", 119, 12), ("d", 132, 13)]}, None),
        ],
    ),
    "late rows of dropDuplicates by a window that is no key": Case(
        {"a": "k string, t timestamp"},
        lambda ops, i: (
            ops(
                ops(i["a"].withWatermark("t", "0 seconds"), "agg", "append")
                .groupBy(F.window("t", "10 seconds"), "k")
                .count(),
                "dedup",
            )
            .dropDuplicates(["k"])
            .select("k", seconds("window.start"), "count")
        ),
        [
            Step({"a": [("a", 5), ("b", 15)]}, None),
            Step({"a": [("b", 18), ("c", 25), ("a", 31)]}, None),
            RESTART,
            Step({"a": [("d", 33), ("a", 45)]}, None),
            Step({"a": [("e", 60)]}, None),
        ],
    ),
    "E1 windows, append": Case(
        T,
        windows,
        [
            Step(one(10, 11, 12, 13, 14, 15), []),
            Step(one(25), [(10, 5)]),
            Step(one(10), []),
        ],
    ),
    "D nested payload": Case(
        {"a": "k double, v array<struct<x:int,y:string>>, m map<string,int>"},
        lambda ops, i: ops(i["a"], "dedup").dropDuplicates(["k"]).selectExpr("k", "get(v, 0).y", "m['one']"),
        [
            Step({"a": [(0.0, [{"x": 1, "y": "a"}], [("one", 1)])]}, [(0.0, "a", 1)]),
            Step(
                {"a": [(-0.0, [], []), (1.0, [], []), (float("inf"), None, None)]},
                [(key, None, None) for key in (-0.0, 1.0, float("inf")) if key or not SPARK.NORMALISES_DUPLICATES],
            ),
        ],
    ),
    "W1 within the watermark": Case(
        T,
        lambda ops, i: (
            ops(i["a"].withWatermark("t", "10 seconds"), "dedup").dropDuplicatesWithinWatermark().select(seconds("t"))
        ),
        [
            Step({"a": times(*range(10, 16)) * 5}, times(*range(10, 16))),
            Step(one(13, 14, 15, 16, 17), times(16, 17)),
            Step(one(5), []),
            RESTART,
            Step(one(35), times(35)),
            Step(one(55), times(55)),
        ],
    ),
    "M1 window then window": Case(
        T,
        chained_windows,
        [
            Step(one(*range(10, 22)), [(10, 2, 10)]),
            Step(one(*range(10, 30)), []),
            RESTART,
            Step(one(30, 31), [(20, 2, 12)]),
        ],
    ),
    "M5 window then deduplication": Case(
        T,
        window_then_dedup,
        [
            Step(one(1, 5, 10, 15), [(0, 1), (5, 1), (10, 1)]),
            RESTART,
            Step(one(16, 20), [(15, 2)]),
        ],
    ),
    "SW sessions, append": Case(
        WORDS,
        sessions,
        [
            Step(words(("hello world spark streaming", 40), ("world hello structured streaming", 41)), []),
            Step(words(("spark streaming", 25)), []),
            Step(words(("spark streaming", 30)), []),
            RESTART,
            Step(words(("hello apache spark", 60)), []),
            Step(words(("structured streaming", 90)), MERGED_SESSIONS),
            Step(words(("late comer", 20)), []),
        ],
    ),
    "CF2 limit": Case(
        V,
        lambda ops, i: ops(i["a"], "limit").limit(10),
        [
            Step(one(1, 2, 3, 4), times(1, 2, 3, 4)),
            Step(one(5, 6, 7, 8), times(5, 6, 7, 8)),
            RESTART,
            Step(one(9, 9, 9, 9), times(9, 9)),
            Step(one(10), []),
        ],
    ),
    "topN": Case(
        {"a": "k string, v int, s struct<x:int>"},
        lambda ops, i: ops(i["a"], "top", "update").topN(2, "k", F.desc("v")).select("k", "v", "s.x", "rank"),
        [
            Step(
                {"a": [("a", 1, {"x": 1}), ("a", 3, {"x": 2}), ("b", 5, None)]},
                [("a", 3, 2, 1), ("a", 1, 1, 2), ("b", 5, None, 1)],
            ),
            Step({"a": [("a", 2, {"x": 3}), ("b", None, {"x": 4})]}, [("a", 2, 3, 2), ("b", None, 4, 2)]),
            RESTART,
            Step({"a": [("a", 1, {"x": 5}), ("b", 6, {"x": 6})]}, [("b", 6, 6, 1), ("b", 5, None, 2)]),
        ],
        spark=False,
        mode="update",
    ),
    # The second column of the order decides: null is the least, NaN the largest, both zeros are one, and the first of equals stays.
    "topN of equal values": Case(
        {"a": "k string, v int, d double, x int"},
        lambda ops, i: (
            ops(i["a"], "top", "update")
            .topN(2, "k", [F.desc_nulls_last("v"), F.asc("d")])
            .select("k", "v", "x", "rank")
        ),
        [
            Step(
                {"a": [("a", 3, math.nan, 1), ("a", 1, 0.5, 2), ("b", None, 0.5, 3)]},
                [("a", 3, 1, 1), ("a", 1, 2, 2), ("b", None, 3, 1)],
            ),
            Step(
                {"a": [("a", 3, -0.0, 4), ("b", 6, 0.5, 5)]},
                [("a", 3, 4, 1), ("a", 3, 1, 2), ("b", 6, 5, 1), ("b", None, 3, 2)],
            ),
            RESTART,
            Step({"a": [("a", 3, 0.0, 6), ("b", 6, None, 7)]}, [("a", 3, 6, 2), ("b", 6, 7, 1), ("b", 6, 5, 2)]),
        ],
        spark=False,
        mode="update",
    ),
    "keepLast": Case(
        {"a": "k string, t timestamp, v int"},
        lambda ops, i: ops(i["a"], "last", "update").keepLast("k", "t").select("k", seconds("t"), "v"),
        [
            Step({"a": [("a", 1, 1), ("a", 3, 2), ("b", 5, 3)]}, [("a", 3, 2), ("b", 5, 3)]),
            Step({"a": [("a", 2, 4), ("b", 5, 5)]}, [("b", 5, 5)]),
            RESTART,
            Step({"a": [("a", 9, None), ("c", None, 7)]}, [("a", 9, None), ("c", None, 7)]),
        ],
        spark=False,
        mode="update",
    ),
}

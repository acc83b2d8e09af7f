"""Replay cases of stateful operators, written as data: what comes in, what comes out of each step, and what it did to the state.

Each case runs on the fleet and, where Spark 3.5 can run it, on Spark itself, which must give the same rows at every step. The
fleet closes groups in batches without data, as Spark does; a step has those that follow it, too.
Names of cases are those of Spark's own tests that they follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_jobs.plan.spark_version import SPARK

#: Gives a DataFrame's next stateful operator, by name and output mode: on the fleet, or Spark's own.
Operators = Callable[..., Any]

#: In place of a step: the query is stopped and started again on the same checkpoint.
RESTART = "restart"


class Totals(NamedTuple):
    """An operator's row counts in Spark's progress: rows in the state, and rows updated, removed and dropped as late in the step."""

    t: int
    u: int | None = None
    r: int | None = None
    d: int | None = None


@dataclass(frozen=True)
class Step:
    """Rows that come in at once, by input, and the rows that come out.

    Attributes
    ----------
    totals
        By operator name.
    """

    rows: Mapping[str, Sequence[tuple[Any, ...]]]
    out: Sequence[tuple[Any, ...]] | None
    totals: Mapping[str, Totals] = field(default_factory=dict)


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
    conf: Mapping[str, str] = field(default_factory=dict)


def seconds(column: Any) -> Any:
    """Return a time as whole seconds."""
    return (F.col(column) if isinstance(column, str) else column).cast("long")


def times(*values: int) -> list[tuple[int]]:
    return [(value,) for value in values]


def one(*values: int) -> dict[str, list[tuple[int]]]:
    return {"a": times(*values)}


V = {"a": "v bigint"}
T = {"a": "t timestamp"}
TWO_TIMES = {"a": "t timestamp", "b": "t timestamp"}
PAIRS = {"a": "k string, v int"}


def counted(ops: Operators, frame: DataFrame, name: str, mode: str) -> DataFrame:
    counts: DataFrame = ops(frame, name, mode).groupBy("v").count()
    return counts


def windows(ops: Operators, frame: DataFrame, mode: str, name: str = "agg") -> DataFrame:
    counts: DataFrame = ops(frame, name, mode).groupBy(F.window("t", "5 seconds")).count()
    return counts.select(seconds("window.start"), "count")


def deduplicated(ops: Operators, frame: DataFrame) -> DataFrame:
    return ops(frame, "dedup").dropDuplicates().select(seconds("t"))  # type: ignore[no-any-return]


def union_of_two(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    union = i["a"].withWatermark("t", "10 seconds").union(i["b"].withWatermark("t", "15 seconds"))
    return ops(union, "dedup").dropDuplicates().select(seconds("t"))  # type: ignore[no-any-return]


def chained_windows(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    first = ops(i["a"].withWatermark("t", "0 seconds"), "first", "append").groupBy(F.window("t", "5 seconds")).count()
    second = ops(first, "second", "append").groupBy(F.window("window", "10 seconds"))
    totals: DataFrame = second.agg(F.count("*").alias("n"), F.sum("count").alias("total"))
    return totals.select(seconds("window.start"), "n", "total")


def three_windows(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    first = ops(i["a"].withWatermark("t", "0 seconds"), "first", "append").groupBy(F.window("t", "5 seconds")).count()
    second = ops(first, "second", "append").groupBy(F.window("window", "10 seconds")).agg(F.sum("count").alias("count"))
    third = ops(second, "third", "append").groupBy(F.window("window", "20 seconds"))
    totals: DataFrame = third.agg(F.count("*").alias("n"), F.sum("count").alias("total"))
    return totals.select(seconds("window.start"), seconds("window.end"), "n", "total")


def dedup_then_window(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    first = ops(i["a"].withWatermark("t", "10 seconds"), "first").dropDuplicates()
    return windows(ops, first, "append", "second")


def window_then_dedup(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    first = ops(i["a"].withWatermark("t", "0 seconds"), "first", "append").groupBy(F.window("t", "5 seconds")).count()
    flat = first.select(F.window_time("window").alias("t"), F.col("window.start").alias("start"), "count")
    distinct: DataFrame = ops(flat.select("start", "count"), "second").dropDuplicates()
    return distinct.select(seconds("start"), "count")


def sessions(ops: Operators, i: Mapping[str, DataFrame], mode: str, gap: Any = "10 seconds") -> DataFrame:
    words = i["a"].withWatermark("t", "30 seconds")
    grouped = ops(words, "sessions", mode).groupBy(F.session_window("t", gap).alias("session"), "word")
    counts: DataFrame = grouped.agg(F.count("*").alias("n"))
    return counts.select("word", seconds("session.start"), seconds("session.end"), "n")


def words(*lines: tuple[str, int]) -> dict[str, list[tuple[Any, ...]]]:
    return {"a": [(word, time) for line, time in lines for word in line.split()]}


WORDS = {"a": "word string, t timestamp"}
#: SW1, as far as the second batch.
FIRST_SESSIONS = [
    ("hello", 40, 51, 2),
    ("spark", 40, 50, 1),
    ("streaming", 40, 51, 2),
    ("structured", 41, 51, 1),
    ("world", 40, 51, 2),
]
MERGED_SESSIONS = [
    ("hello", 40, 51, 2),
    ("spark", 25, 50, 3),
    ("streaming", 25, 51, 4),
    ("structured", 41, 51, 1),
    ("world", 40, 51, 2),
]
APACHE = [("hello", 60, 70, 1), ("apache", 60, 70, 1), ("spark", 60, 70, 1)]


def dynamic_gap(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    return sessions(ops, i, "append", F.expr("CASE WHEN word = 'long' THEN '20 seconds' ELSE '5 seconds' END"))


def collected(ops: Operators, frame: DataFrame, mode: str) -> DataFrame:
    grouped = ops(frame, "agg", mode).groupBy("k")
    lists: DataFrame = grouped.agg(
        F.collect_list("v").alias("all"),
        F.sort_array(F.collect_set("v")).alias("different"),
        F.expr("array_agg(cast(v as string)) FILTER (WHERE v > 1)").alias("large"),
        F.count("*").alias("n"),
    )
    return lists


def collected_windows(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    grouped = ops(i["a"].withWatermark("t", "10 seconds"), "agg", "append").groupBy(F.window("t", "5 seconds"), "word")
    lists: DataFrame = grouped.agg(
        F.collect_list("x").alias("all"), F.sort_array(F.collect_set("x")).alias("different")
    )
    return lists.select("word", seconds("window.start"), "all", "different")


def collected_sessions(ops: Operators, i: Mapping[str, DataFrame], mode: str) -> DataFrame:
    words = i["a"].withWatermark("t", "10 seconds")
    grouped = ops(words, "sessions", mode).groupBy(F.session_window("t", "5 seconds").alias("session"), "word")
    lists: DataFrame = grouped.agg(
        F.sort_array(F.collect_list("x")).alias("all"), F.sort_array(F.collect_set("x")).alias("different")
    )
    return lists.select("word", seconds("session.start"), "all", "different")


MEASURED = {"a": "word string, t timestamp, x double"}

CASES: dict[str, Case] = {
    "A1 count by value, update": Case(
        V,
        lambda ops, i: counted(ops, i["a"], "agg", "update"),
        [
            Step(one(3), [(3, 1)]),
            Step(one(3, 2), [(3, 2), (2, 1)]),
            RESTART,
            Step(one(3, 2, 1), [(3, 3), (2, 2), (1, 1)]),
            Step(one(4, 4, 4, 4), [(4, 4)]),
        ],
        mode="update",
    ),
    "A2 count by value, complete": Case(
        V,
        lambda ops, i: counted(ops, i["a"], "agg", "complete"),
        [
            Step(one(3), [(3, 1)]),
            Step(one(2), [(3, 1), (2, 1)]),
            RESTART,
            Step(one(3, 2, 1), [(3, 2), (2, 2), (1, 1)]),
            Step(one(4, 4, 4, 4), [(4, 4), (3, 2), (2, 2), (1, 1)]),
        ],
        mode="complete",
    ),
    "A4 rows updated": Case(
        V,
        lambda ops, i: counted(
            ops, i["a"].select(F.explode(F.array(F.col("v"), F.col("v") + 1)).alias("v")), "agg", "update"
        ),
        [
            Step(one(1), [(1, 1), (2, 1)], {"agg": Totals(2, 2)}),
            Step(one(2, 3), [(2, 2), (3, 2), (4, 1)], {"agg": Totals(4, 3)}),
        ],
        mode="update",
    ),
    "collect_list and collect_set, update": Case(
        PAIRS,
        lambda ops, i: collected(ops, i["a"], "update"),
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
    "collect_list and collect_set, complete": Case(
        PAIRS,
        lambda ops, i: collected(ops, i["a"], "complete"),
        [
            Step({"a": [("a", 2), ("b", 7)]}, [("a", [2], [2], ["2"], 1), ("b", [7], [7], ["7"], 1)]),
            Step({"a": [("b", 7)]}, [("a", [2], [2], ["2"], 1), ("b", [7, 7], [7], ["7", "7"], 2)]),
            RESTART,
            Step({"a": [("a", 1)]}, [("a", [2, 1], [1, 2], ["2"], 2), ("b", [7, 7], [7], ["7", "7"], 2)]),
        ],
        mode="complete",
    ),
    "collect_list and collect_set of everything, update": Case(
        PAIRS,
        lambda ops, i: (
            ops(i["a"], "agg", "update")
            .groupBy()
            .agg(F.collect_list("k").alias("all"), F.sort_array(F.collect_set("k")).alias("different"))
        ),
        [
            Step({"a": [("a", 2), (None, 7), ("a", 3)]}, [(["a", "a"], ["a"])]),
            Step({"a": [("b", 7), ("a", 1)]}, [(["a", "a", "b", "a"], ["a", "b"])]),
        ],
        mode="update",
    ),
    "collect_list and collect_set of windows, append": Case(
        MEASURED,
        collected_windows,
        [
            Step({"a": [("a", 10, 1.5), ("b", 11, 0.0), ("b", 12, -0.0), ("a", 13, 1.5), ("a", 16, None)]}, []),
            Step({"a": [("a", 14, -1.0), ("b", 14, 2.0)]}, []),
            RESTART,
            Step(
                {"a": [("a", 25, 4.0)]},
                [("a", 10, [1.5, 1.5, -1.0], [-1.0, 1.5]), ("b", 10, [0.0, -0.0, 2.0], [0.0, 2.0])],
            ),
            Step({"a": [("b", 12, 9.0), ("a", 40, 5.0)]}, [("a", 15, [], []), ("a", 25, [4.0], [4.0])]),
        ],
    ),
    **{
        f"collect_list and collect_set of sessions, {mode}": Case(
            MEASURED,
            lambda ops, i, mode=mode: collected_sessions(ops, i, mode),  # type: ignore[misc]
            [
                Step({"a": [("a", 10, 1.5), ("a", 18, 2.5), ("b", 11, 0.5), ("a", 12, 1.5)]}, None),
                RESTART,
                Step({"a": [("a", 15, 2.5), ("b", 21, None)]}, None),
                Step({"a": [("a", 60, 1.0)]}, None),
            ],
            mode=mode,
        )
        for mode in ("append", "complete")
    },
    **{
        f"late rows of dropDuplicates by {about}": Case(
            {"a": "k string, t timestamp, v int"},
            lambda ops, i, keys=keys, columns=columns: (  # type: ignore[misc]
                ops(i["a"].withWatermark("t", "10 seconds").withColumn("minute", F.date_trunc("minute", "t")), "dedup")
                .dropDuplicates(keys)
                .select(*(seconds(column) if column == "t" else column for column in columns))
            ),
            [
                Step({"a": [("a", 100, 1), ("b", 101, 2)]}, None),
                # The watermark is at 91: the first two are late, and one without a time never is.
                Step({"a": [("c", 50, 3), ("d", 91, 4), ("e", 92, 5), ("f", None, 6), ("a", 93, 7)]}, None),
                RESTART,
                Step({"a": [("c", 95, 8), ("d", 80, 9), ("g", 130, 10)]}, None),
                Step({"a": [("c", 131, 11), ("d", 119, 12), ("d", 132, 13)]}, None),
            ],
        )
        for about, keys, columns in (
            ("a time that is no key", ["k"], ["k", "t", "v"]),
            ("a time that nothing reads", ["k"], ["k", "v"]),
            ("a time of which a key is computed", ["k", "minute"], ["k", "t", "v"]),
        )
    },
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
        lambda ops, i: windows(ops, i["a"].withWatermark("t", "10 seconds"), "append"),
        [
            Step(one(10, 11, 12, 13, 14, 15), []),
            Step(one(25), [(10, 5)], {"agg": Totals(2)}),
            Step(one(10), [], {"agg": Totals(2)}),
        ],
    ),
    "E2 windows, update": Case(
        T,
        lambda ops, i: windows(ops, i["a"].withWatermark("t", "10 seconds"), "update"),
        [
            Step(one(10, 11, 12, 13, 14, 15), [(10, 5), (15, 1)]),
            Step(one(25), [(25, 1)], {"agg": Totals(2)}),
            Step(one(10, 25), [(25, 2)], {"agg": Totals(2)}),
            Step(one(10), [], {"agg": Totals(2)}),
        ],
        mode="update",
    ),
    "E3 windows, complete": Case(
        T,
        lambda ops, i: windows(ops, i["a"].withWatermark("t", "10 seconds"), "complete"),
        [
            Step(one(10, 11, 12), [(10, 3)]),
            Step(one(25), [(10, 3), (25, 1)]),
            Step(one(25), [(10, 3), (25, 2)]),
            Step(one(10), [(10, 4), (25, 2)]),
            Step(one(25), [(10, 4), (25, 3)]),
        ],
        mode="complete",
    ),
    "E sliding windows that do not divide": Case(
        T,
        lambda ops, i: (
            ops(i["a"].withWatermark("t", "5 seconds"), "agg", "append")
            .groupBy(F.window("t", "10 seconds", "4 seconds"))
            .count()
            .select(seconds("window.start"), "count")
        ),
        [Step(one(3, 7, 12), None), Step(one(22, 8), None), Step(one(41), None), Step(one(60), None)],
    ),
    "D1 all columns": Case(
        {"a": "v string"},
        lambda ops, i: ops(i["a"], "dedup").dropDuplicates(),
        [
            Step({"a": [("a",)]}, [("a",)], {"dedup": Totals(1, 1)}),
            Step({"a": [("a",)]}, [], {"dedup": Totals(1, 0)}),
            RESTART,
            Step({"a": [("b",), ("a",)]}, [("b",)], {"dedup": Totals(2, 1)}),
        ],
    ),
    "D2 some columns": Case(
        PAIRS,
        lambda ops, i: ops(i["a"], "dedup").dropDuplicates(["k"]),
        [
            Step({"a": [("a", 1)]}, [("a", 1)], {"dedup": Totals(1, 1)}),
            Step({"a": [("a", 2)]}, [], {"dedup": Totals(1, 0, 0, 0)}),
            Step({"a": [("b", 1)]}, [("b", 1)], {"dedup": Totals(2, 1)}),
        ],
    ),
    "D3 twice": Case(
        PAIRS,
        lambda ops, i: ops(ops(i["a"], "inner").dropDuplicates(), "outer").dropDuplicates(["k"]),
        [
            Step({"a": [("a", 1)]}, [("a", 1)], {"outer": Totals(1, 1), "inner": Totals(1, 1)}),
            Step({"a": [("a", 2)]}, [], {"outer": Totals(1, 0), "inner": Totals(2, 1)}),
            RESTART,
            Step({"a": [("b", 1)]}, [("b", 1)], {"outer": Totals(2, 1), "inner": Totals(3, 1)}),
        ],
    ),
    "D4 watermark among the keys": Case(
        T,
        lambda ops, i: deduplicated(ops, i["a"].withWatermark("t", "10 seconds")),
        [
            Step(
                one(*range(10, 16)) | {"a": times(*range(10, 16)) * 5},
                times(*range(10, 16)),
                {"dedup": Totals(6, 6, 0, 0)},
            ),
            Step(one(25), times(25), {"dedup": Totals(1, 1, 6)}),
            Step(one(10), [], {"dedup": Totals(1, 0, 0, 1)}),
            RESTART,
            Step(one(45), times(45), {"dedup": Totals(1, 1)}),
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
            Step({"a": times(*range(10, 16)) * 5}, times(*range(10, 16)), {"dedup": Totals(6, 6)}),
            Step(one(13, 14, 15, 16, 17), times(16, 17), {"dedup": Totals(8, 2)}),
            Step(one(5), [], {"dedup": Totals(8, 0, 0, 1)}),
            RESTART,
            Step(one(35), times(35), {"dedup": Totals(3, 1)}),
            Step(one(55), times(55), {"dedup": Totals(1, 1)}),
        ],
    ),
    "W2 within the watermark, some columns": Case(
        {"a": "k string, t timestamp"},
        lambda ops, i: (
            ops(i["a"].withWatermark("t", "2 seconds"), "dedup")
            .dropDuplicatesWithinWatermark(["k"])
            .select("k", seconds("t"))
        ),
        [
            Step({"a": [("a", 1)]}, [("a", 1)], {"dedup": Totals(1, 1)}),
            Step({"a": [("a", 2), ("b", 3)]}, [("b", 3)], {"dedup": Totals(2, 1)}),
            Step({"a": [("a", 5), ("b", 4), ("c", 5)]}, None),
            Step({"a": [("a", 9), ("b", 10), ("c", 4)]}, None),
        ],
    ),
    "E7 two watermarks, smallest": Case(
        TWO_TIMES,
        union_of_two,
        [
            Step({"a": times(20), "b": times(30)}, times(20, 30), {"dedup": Totals(2, 2)}),
            Step({"a": times(5)}, [], {"dedup": Totals(2, 0, 0, 1)}),
            RESTART,
            Step({"a": times(11, 12)}, times(11, 12), {"dedup": Totals(4, 2)}),
            Step({"a": times(120), "b": times(130)}, times(120, 130), {"dedup": Totals(2, 2, 4)}),
            Step({"a": times(150)}, times(150), {"dedup": Totals(3, 1)}),
            Step({"b": times(116, 114)}, times(116), {"dedup": Totals(4, 1, 0, 1)}),
        ],
    ),
    "E7 two watermarks, largest": Case(
        TWO_TIMES,
        union_of_two,
        [
            Step({"a": times(20), "b": times(30)}, times(20, 30), {"dedup": Totals(2, 2)}),
            Step({"a": times(12)}, [], {"dedup": Totals(2, 0, 0, 1)}),
            RESTART,
            Step({"a": times(120), "b": times(130)}, times(120, 130), {"dedup": Totals(2, 2, 2)}),
            Step({"a": times(150)}, times(150), {"dedup": Totals(1, 1, 2)}),
        ],
        conf={"spark.sql.streaming.multipleWatermarkPolicy": "max"},
    ),
    "M1 window then window": Case(
        T,
        chained_windows,
        [
            Step(one(*range(10, 22)), [(10, 2, 10)], {"second": Totals(0), "first": Totals(1)}),
            Step(one(*range(10, 30)), [], {"second": Totals(1), "first": Totals(1)}),
            RESTART,
            Step(one(30, 31), [(20, 2, 12)], {"second": Totals(0), "first": Totals(1)}),
        ],
    ),
    "M2 three windows": Case(
        T,
        three_windows,
        [
            Step(one(*range(38)), [(0, 20, 2, 20)], {"third": Totals(1), "second": Totals(1), "first": Totals(1)}),
            Step(
                one(*range(30, 61)),
                [(20, 40, 2, 23), (40, 60, 2, 20)],
                {"third": Totals(0), "second": Totals(0), "first": Totals(1)},
            ),
        ],
    ),
    "M3 deduplication then window": Case(
        T,
        dedup_then_window,
        [Step(one(*range(1, 16)), [(0, 4)], {"second": Totals(3), "first": Totals(10)})],
    ),
    "M5 window then deduplication": Case(
        T,
        window_then_dedup,
        [
            Step(one(1, 5, 10, 15), [(0, 1), (5, 1), (10, 1)], {"second": Totals(3), "first": Totals(1)}),
            RESTART,
            Step(one(16, 20), [(15, 2)], {"second": Totals(4), "first": Totals(1)}),
        ],
    ),
    "SW1 sessions, complete": Case(
        WORDS,
        lambda ops, i: sessions(ops, i, "complete"),
        [
            Step(words(("hello world spark streaming", 40), ("world hello structured streaming", 41)), FIRST_SESSIONS),
            Step(
                words(("spark streaming", 25)),
                [*FIRST_SESSIONS, ("spark", 25, 35, 1), ("streaming", 25, 35, 1)],
            ),
            RESTART,
            Step(words(("spark streaming", 30)), MERGED_SESSIONS),
            Step(words(("hello apache spark", 60)), [*MERGED_SESSIONS, *APACHE]),
            Step(
                words(("structured streaming", 90)),
                [*MERGED_SESSIONS, *APACHE, ("structured", 90, 100, 1), ("streaming", 90, 100, 1)],
            ),
        ],
        mode="complete",
    ),
    "SW sessions, append": Case(
        WORDS,
        lambda ops, i: sessions(ops, i, "append"),
        [
            Step(words(("hello world spark streaming", 40), ("world hello structured streaming", 41)), []),
            Step(words(("spark streaming", 25)), []),
            Step(words(("spark streaming", 30)), []),
            RESTART,
            Step(words(("hello apache spark", 60)), [], {"sessions": Totals(8)}),
            Step(words(("structured streaming", 90)), MERGED_SESSIONS, {"sessions": Totals(5)}),
            Step(words(("late comer", 20)), [], {"sessions": Totals(5)}),
        ],
    ),
    "SW sessions with a gap of their own": Case(
        WORDS,
        dynamic_gap,
        [
            Step(words(("long short", 10), ("long short", 20)), []),
            Step(words(("short long", 80)), [("long", 10, 40, 2), ("short", 10, 15, 1), ("short", 20, 25, 1)]),
        ],
    ),
    "CF2 limit": Case(
        V,
        lambda ops, i: ops(i["a"], "limit").limit(10),
        [
            Step(one(1, 2, 3, 4), times(1, 2, 3, 4), {"limit": Totals(1)}),
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
            Step(
                {"a": [("a", 1, {"x": 5}), ("b", 6, {"x": 6})]}, [("b", 6, 6, 1), ("b", 5, None, 2)], {"top": Totals(4)}
            ),
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
            Step({"a": [("a", 9, None), ("c", None, 7)]}, [("a", 9, None), ("c", None, 7)], {"last": Totals(3)}),
        ],
        spark=False,
        mode="update",
    ),
}

"""Replay cases of joins of two streams; see :mod:`tests.integration.operator_cases`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.integration.operator_cases import RESTART, Case, Operators, Step, one, seconds, times

Inputs = Mapping[str, DataFrame]
TWO = {"a": "v int", "b": "v int"}
TIMED = {"a": "k string, t timestamp, x int", "b": "k string, u timestamp, y int"}


def both(left: list[Any], right: list[Any]) -> dict[str, list[Any]]:
    return {
        "a": [row if isinstance(row, tuple) else (row,) for row in left],
        "b": [row if isinstance(row, tuple) else (row,) for row in right],
    }


def left_of(i: Inputs) -> DataFrame:
    return i["a"].select(F.col("v").alias("k"), (F.col("v") * 2).alias("l"))


def right_of(i: Inputs) -> DataFrame:
    return i["b"].select(F.col("v").alias("k"), (F.col("v") * 3).alias("r"))


def windowed(frame: DataFrame, value: str, times_value: int) -> DataFrame:
    """Return key, window and value, as Spark's suite has them, without the time itself."""
    timed = frame.select(
        F.col("v").alias("k"), F.timestamp_seconds("v").alias("t"), (F.col("v") * times_value).alias(value)
    )
    return timed.withWatermark("t", "10 seconds").select("k", F.window("t", "10 seconds").alias("window"), value)


def windows(ops: Operators, i: Inputs, how: str) -> DataFrame:
    joined = ops(windowed(i["a"], "l", 2), "join").join(windowed(i["b"], "r", 3), ["k", "window"], how)
    return joined.select("k", seconds("window.end"), "l", "r")  # type: ignore[no-any-return]


def by_time(ops: Operators, i: Inputs) -> DataFrame:
    left, right = i["a"].withWatermark("t", "10 seconds").alias("a"), i["b"].withWatermark("u", "10 seconds").alias("b")
    near = "u between t - interval 5 seconds and t + interval 10 seconds"
    on = F.expr(f"a.k = b.k and {near} and (x < y or x + 10 > y * 3) and not x <=> 5")
    joined = ops(left, "join").join(right, on, "full_outer")
    return joined.select("a.k", "b.k", seconds("t"), seconds("u"), "x", "y")  # type: ignore[no-any-return]


def three_ways(ops: Operators, i: Inputs) -> DataFrame:
    first = i["a"].select(F.col("v").alias("l"), (F.col("v") * 2).alias("l2"))
    second = i["b"].select(F.col("v").alias("m"), (F.col("v") * 3).alias("m2"))
    third = i["c"].select(F.col("v").alias("r"), (F.col("v") * 5).alias("r2"))
    inner = ops(first, "inner").join(second, F.col("l") == F.col("m"))
    return ops(inner, "outer").join(third, F.col("l") == F.col("r"))  # type: ignore[no-any-return]


def beyond_the_fleet(ops: Operators, i: Inputs) -> DataFrame:
    left, right = i["a"].alias("a"), i["b"].alias("b")
    # Levenshtein distance is nothing that the fleet evaluates; the comparison beside it is.
    on = F.expr("a.x % 2 = b.y % 2 and levenshtein(a.k, b.k) <= 1 and a.x < b.y + 2")
    return ops(left, "join").join(right, on).select("a.k", "b.k", "x", "y")  # type: ignore[no-any-return]


def until_expired(ops: Operators, i: Inputs) -> DataFrame:
    left, right = i["a"].withWatermark("t", "10 seconds"), i["b"].withWatermark("u", "10 seconds")
    on = F.expr("a.k = b.k and u >= t and u <= e")
    return ops(left.alias("a"), "join").join(right.alias("b"), on).select("a.k", seconds("t"), seconds("u"))  # type: ignore[no-any-return]


def nested(ops: Operators, i: Inputs) -> DataFrame:
    left = i["a"].select(F.struct("x", F.struct("k").alias("in")).alias("s"), F.col("t"))
    right = i["b"].select(F.struct(F.col("y").alias("x"), F.struct("k").alias("in")).alias("s"), F.col("u"))
    left, right = left.withWatermark("t", "10 seconds"), right.withWatermark("u", "10 seconds")
    on = (left["s"] == right["s"]) & (left["t"] == right["u"])
    joined = ops(left, "join").join(right, on, "full_outer")
    return joined.select(left["s"]["in"]["k"], left["s"]["x"], right["s"].isNull(), right["s"]["in"]["k"])  # type: ignore[no-any-return]


def by_key_with_watermarks(
    ops: Operators, i: Inputs, columns: list[str], delays: tuple[str | None, str | None]
) -> DataFrame:
    left, right = i["a"], i["b"]
    if delays[0] is not None:
        left = left.withWatermark("t", delays[0])
    if delays[1] is not None:
        right = right.withWatermark("u", delays[1])
    joined = ops(left, "join").join(right, "k")
    return joined.select(*(seconds(column) if column in "tu" else column for column in columns))  # type: ignore[no-any-return]


def with_a_watermark_on_one_side(ops: Operators, i: Inputs, is_left: bool) -> DataFrame:
    left, right = i["a"], i["b"]
    left, right = (
        (left.withWatermark("t", "10 seconds"), right) if is_left else (left, right.withWatermark("u", "10 seconds"))
    )
    near = "a.k = b.k and u between t - interval 5 seconds and t + interval 10 seconds"
    joined = ops(left.alias("a"), "join").join(right.alias("b"), F.expr(near), "full_outer")
    return joined.select("a.k", "b.k", seconds("t"), seconds("u"), "x", "y")  # type: ignore[no-any-return]


def window_of_one_side(ops: Operators, i: Inputs) -> DataFrame:
    left, right = i["a"].withWatermark("t", "0 seconds").alias("l"), i["b"].withWatermark("u", "10 seconds").alias("r")
    near = "l.k <=> r.k and r.u between l.t and l.t + interval 10 seconds and r.y is not null"
    joined = ops(left, "join").join(right, F.expr(near), "right_outer")
    counts = ops(joined.select(F.col("l.t").alias("t"), F.col("r.k").alias("k")), "agg", "append")
    return counts.groupBy(F.window("t", "10 seconds")).count().select(seconds("window.start"), "count")  # type: ignore[no-any-return]


TWO_TIMED_STREAMS: list[Step | str] = [
    Step({"a": [("a", 100, 1), ("b", 101, 2)], "b": [("a", 102, 1), ("c", 103, 2)]}, None),
    Step(
        {"a": [("a", 60, 3), ("c", 104, 4), ("n", None, 4)], "b": [("b", 61, 3), ("b", 104, 4), ("a", None, 5)]}, None
    ),
    RESTART,
    Step({"a": [("d", 130, 5)], "b": [("d", 131, 6), ("c", 99, 7)]}, None),
    Step({"a": [("b", 131, 6), ("e", 90, 7)], "b": [("b", 140, 8), ("e", 91, 9)]}, None),
    Step({"a": [("z", 170, 8)], "b": [("z", 171, 10)]}, None),
    Step({"a": [("y", 200, 9)], "b": [("y", 201, 11)]}, None),
]

JOIN_CASES: dict[str, Case] = {
    **{
        f"late rows of a join by key, {about}": Case(
            TIMED,
            lambda ops, i, columns=columns, delays=delays: by_key_with_watermarks(ops, i, columns, delays),  # type: ignore[misc]
            TWO_TIMED_STREAMS,
        )
        for about, columns, delays in (
            ("both times read", ["k", "t", "u", "x", "y"], ("10 seconds", "5 seconds")),
            ("no time read", ["k", "x", "y"], ("10 seconds", "5 seconds")),
            ("one time read", ["k", "u", "x", "y"], ("10 seconds", "5 seconds")),
            ("a watermark on one side", ["k", "t", "u", "x", "y"], (None, "5 seconds")),
        )
    },
    **{
        f"full_outer with a watermark on its {'left' if is_left else 'right'} side only": Case(
            TIMED,
            lambda ops, i, is_left=is_left: with_a_watermark_on_one_side(ops, i, is_left),  # type: ignore[misc]
            TWO_TIMED_STREAMS,
        )
        for is_left in (True, False)
    },
    "a window over the left time of a right outer join": Case(
        TIMED,
        window_of_one_side,
        [
            Step({"a": [("a", 3, 1)], "b": [("a", 4, 1)]}, None),
            Step({"a": [("a", 8, 1)], "b": [("a", 14, 1), ("b", 9, 2)]}, None),
            Step({"a": [("b", 12, 2)], "b": [("b", 17, 3)]}, None),
            RESTART,
            *TWO_TIMED_STREAMS,
        ],
    ),
    "J1 inner": Case(
        TWO,
        lambda ops, i: ops(left_of(i), "join").join(right_of(i), "k"),
        [
            Step(one(1), []),
            Step({"b": times(1, 10)}, [(1, 2, 3)]),
            Step(one(10), [(10, 20, 30)]),
            Step({"b": times(1)}, [(1, 2, 3)]),
            RESTART,
            Step(one(1), [(1, 2, 3)] * 2),
            Step(both([100], [100]), [(100, 200, 300)]),
        ],
    ),
    "J6 three ways": Case(
        {**TWO, "c": "v int"},
        three_ways,
        [
            Step({"a": times(1, 5), "b": times(1, 5, 10), "c": times(5, 10)}, [(5, 10, 5, 15, 5, 25)]),
            RESTART,
            Step({"a": times(10)}, [(10, 20, 10, 30, 10, 50)]),
        ],
    ),
    "JO1 left outer of windows": Case(
        TWO,
        lambda ops, i: windows(ops, i, "left_outer"),
        [
            Step(both([1, 2, 3, 4, 5], [3, 4, 5, 6, 7]), [(3, 10, 6, 9), (4, 10, 8, 12), (5, 10, 10, 15)]),
            Step(both([21], [22]), [(1, 10, 2, None), (2, 10, 4, None)]),
            RESTART,
            Step(one(22), [(22, 30, 44, 66)]),
        ],
    ),
    "JO1 full outer of windows": Case(
        TWO,
        lambda ops, i: windows(ops, i, "full_outer"),
        [
            Step(
                both([1, 2, 3, 4, 5], [3, 4, 5, 6, 7]),
                [(3, 10, 6, 9), (4, 10, 8, 12), (5, 10, 10, 15)],
            ),
            Step(
                both([21], [22]),
                [(1, 10, 2, None), (2, 10, 4, None), (6, 10, None, 18), (7, 10, None, 21)],
            ),
            Step(one(22), [(22, 30, 44, 66)]),
            RESTART,
            Step(one(1), []),
            Step({"b": times(5)}, []),
        ],
    ),
    "full outer in a range of time, a condition on both sides": Case(
        TIMED,
        by_time,
        [
            Step(both([("a", 10, 1), ("b", 12, 2), ("a", 11, 5)], [("a", 15, 3), ("b", 13, 1)]), None),
            Step(both([("a", 12, None), ("b", 25, 6)], [("a", 14, 7)]), None),
            Step(both([("c", 60, 7)], [("c", 58, 8)]), None),
            RESTART,
            Step(both([("c", 90, 7)], [("c", 95, 1)]), None),
        ],
    ),
    # Spark takes ``e`` for the left side's event time, and removes the row that the last step matches.
    "inner in a range that ends at a time of no watermark": Case(
        {"a": "k string, t timestamp, e timestamp", "b": "k string, u timestamp"},
        until_expired,
        [
            Step({"a": [("a", 10, 100), ("b", 10, 20)], "b": [("a", 12), ("b", 21)]}, [("a", 10, 12)]),
            Step({"a": [("z", 60, 60)], "b": [("z", 60)]}, [("z", 60, 60)]),
            RESTART,
            Step({"a": [], "b": [("a", 70), ("b", 70)]}, [("a", 10, 70)]),
        ],
        spark=False,
    ),
    "inner with a condition beyond the fleet": Case(
        TIMED,
        beyond_the_fleet,
        [
            Step(both([("abc", 1, 1), ("abd", 1, 3)], [("abd", 1, 1), ("x", 1, 3)]), None),
            Step(both([("y", 1, 1)], [("abe", 1, 5), (None, 1, 5)]), None),
        ],
    ),
    "structs among keys and rows, full outer": Case(
        TIMED,
        nested,
        [
            Step(both([("a", 1, 1), (None, 1, 1)], [("a", 1, 1), (None, 1, 1), ("b", 1, 2)]), None),
            Step(both([("a", 50, None)], [("a", 50, None)]), None),
            Step(both([("a", 90, None)], [("a", 90, 1)]), None),
        ],
    ),
}

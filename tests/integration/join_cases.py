"""Replay cases of joins of two streams; see :mod:`tests.integration.operator_cases`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.integration.operator_cases import RESTART, Case, Operators, Step, Totals, one, seconds, times

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


def windowed(frame: DataFrame, value: str, times_value: int, delay: str | None) -> DataFrame:
    """Return key, window and value, as Spark's suite has them, without the time itself."""
    timed = frame.select(
        F.col("v").alias("k"), F.timestamp_seconds("v").alias("t"), (F.col("v") * times_value).alias(value)
    )
    timed = timed.withWatermark("t", delay) if delay is not None else timed
    return timed.select("k", F.window("t", "10 seconds").alias("window"), value)


def windows(ops: Operators, i: Inputs, how: str, right_delay: str | None = "10 seconds") -> DataFrame:
    left, right = windowed(i["a"], "l", 2, "10 seconds"), windowed(i["b"], "r", 3, right_delay)
    joined = ops(left, "join").join(right, ["k", "window"], how)
    values = ["l"] if how == "left_semi" else ["l", "r"]
    return joined.select("k", seconds("window.end"), *values)  # type: ignore[no-any-return]


def excluding(ops: Operators, i: Inputs, how: str) -> DataFrame:
    left, right = windowed(i["a"], "l", 2, "10 seconds"), windowed(i["b"], "r", 3, "10 seconds")
    on = (left["k"] == right["k"]) & (left["window"] == right["window"]) & (left["l"] > 4)
    joined = ops(left, "join").join(right, on, how)
    columns = [F.coalesce(left["k"], right["k"]), seconds(F.coalesce(left["window"], right["window"])["end"]), "l", "r"]
    return joined.select(*columns)  # type: ignore[no-any-return]


def by_time(ops: Operators, i: Inputs, how: str, extra: str = "true", delay: str = "10 seconds") -> DataFrame:
    left, right = i["a"].withWatermark("t", delay).alias("a"), i["b"].withWatermark("u", delay).alias("b")
    near = "u between t - interval 5 seconds and t + interval 10 seconds"
    joined = ops(left, "join").join(right, F.expr(f"a.k = b.k and {near} and {extra}"), how)
    if how == "left_semi":
        return joined.select("a.k", seconds("t"), "x")  # type: ignore[no-any-return]
    return joined.select("a.k", "b.k", seconds("t"), seconds("u"), "x", "y")  # type: ignore[no-any-return]


def self_join(ops: Operators, i: Inputs) -> DataFrame:
    left = i["a"].select((F.col("v") % 5).alias("key"), F.col("v").alias("l"))
    right = i["a"].select((F.col("v") % 5).alias("key"), F.col("v").alias("r"))
    return ops(left, "join").join(right, "key")  # type: ignore[no-any-return]


def self_join_in_time(ops: Operators, i: Inputs) -> DataFrame:
    stream = i["a"].withWatermark("t", "10 seconds")
    left, right = stream.alias("one"), stream.alias("two")
    near = "one.k = two.k and two.t > one.t and two.t < one.t + interval 15 seconds"
    joined = ops(left, "join").join(right, F.expr(near), "left_outer")
    return joined.select("one.k", seconds("one.t"), seconds("two.t"))  # type: ignore[no-any-return]


def three_ways(ops: Operators, i: Inputs) -> DataFrame:
    first = i["a"].select(F.col("v").alias("l"), (F.col("v") * 2).alias("l2"))
    second = i["b"].select(F.col("v").alias("m"), (F.col("v") * 3).alias("m2"))
    third = i["c"].select(F.col("v").alias("r"), (F.col("v") * 5).alias("r2"))
    inner = ops(first, "inner").join(second, F.col("l") == F.col("m"))
    return ops(inner, "outer").join(third, F.col("l") == F.col("r"))  # type: ignore[no-any-return]


def null_keys(ops: Operators, i: Inputs, *, null_safe: bool, how: str = "inner") -> DataFrame:
    left = i["a"].withWatermark("t", "10 seconds").withColumnRenamed("k", "lk")
    right = i["b"].withWatermark("u", "10 seconds").withColumnRenamed("k", "rk")
    equal = F.col("lk").eqNullSafe(F.col("rk")) if null_safe else F.col("lk") == F.col("rk")
    on = equal & (F.col("t") == F.col("u"))
    return ops(left, "join").join(right, on, how).select("lk", "rk", "x", "y")  # type: ignore[no-any-return]


def beyond_the_fleet(ops: Operators, i: Inputs) -> DataFrame:
    left, right = i["a"].alias("a"), i["b"].alias("b")
    # Levenshtein distance is nothing that the fleet evaluates; the comparison beside it is.
    on = F.expr("a.x % 2 = b.y % 2 and levenshtein(a.k, b.k) <= 1 and a.x < b.y + 2")
    return ops(left, "join").join(right, on).select("a.k", "b.k", "x", "y")  # type: ignore[no-any-return]


def until_expired(ops: Operators, i: Inputs) -> DataFrame:
    left, right = i["a"].withWatermark("t", "10 seconds"), i["b"].withWatermark("u", "10 seconds")
    on = F.expr("a.k = b.k and u >= t and u <= e")
    return ops(left.alias("a"), "join").join(right.alias("b"), on).select("a.k", seconds("t"), seconds("u"))  # type: ignore[no-any-return]


def join_then_window(ops: Operators, i: Inputs) -> DataFrame:
    left = i["a"].select("v", F.timestamp_seconds("v").alias("t")).withWatermark("t", "0 seconds")
    right = i["b"].select(F.col("v").alias("w"), F.timestamp_seconds("v").alias("u")).withWatermark("u", "0 seconds")
    joined = ops(left, "join").join(right, (F.col("v") == F.col("w")) & (F.col("t") == F.col("u"))).select("v", "t")
    counts: DataFrame = ops(joined, "agg", "append").groupBy(F.window("t", "5 seconds")).count()
    return counts.select(seconds("window.start"), "count")


def range_join_then_window(ops: Operators, i: Inputs) -> DataFrame:
    left, right = i["a"].withWatermark("t", "0 seconds"), i["b"].withWatermark("u", "0 seconds")
    near = F.expr("a.k = b.k and u between t and t + interval 10 seconds")
    joined = ops(left.alias("a"), "join").join(right.alias("b"), near, "left_outer").select("t", "y")
    counts: DataFrame = ops(joined, "agg", "append").groupBy(F.window("t", "5 seconds")).agg(F.count("*"), F.count("y"))
    return counts.select(seconds("window.start"), "count(1)", "count(y)")


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


def with_a_watermark_on_one_side(ops: Operators, i: Inputs, how: str, is_left: bool) -> DataFrame:
    left, right = i["a"], i["b"]
    left, right = (
        (left.withWatermark("t", "10 seconds"), right) if is_left else (left, right.withWatermark("u", "10 seconds"))
    )
    near = "a.k = b.k and u between t - interval 5 seconds and t + interval 10 seconds"
    joined = ops(left.alias("a"), "join").join(right.alias("b"), F.expr(near), how)
    if how == "left_semi":
        return joined.select("a.k", seconds("t"), "x")  # type: ignore[no-any-return]
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
        f"{how} with a watermark on its {'left' if is_left else 'right'} side only": Case(
            TIMED,
            lambda ops, i, how=how, is_left=is_left: with_a_watermark_on_one_side(ops, i, how, is_left),  # type: ignore[misc]
            TWO_TIMED_STREAMS,
        )
        for how, is_left in (
            ("left_outer", False),
            ("left_semi", False),
            ("right_outer", True),
            ("full_outer", True),
            ("full_outer", False),
        )
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
    "J2 inner of windows, one watermark": Case(
        TWO,
        lambda ops, i: windows(ops, i, "inner", None),
        [
            Step(one(1), [], {"join": Totals(1, 1)}),
            Step({"b": times(1)}, [(1, 10, 2, 3)], {"join": Totals(2, 1)}),
            RESTART,
            Step(one(25), [], {"join": Totals(1, 1)}),
            Step({"b": times(25)}, [(25, 30, 50, 75)], {"join": Totals(2, 1)}),
            RESTART,
            Step({"b": times(1)}, [], {"join": Totals(2)}),
            Step(one(5), [], {"join": Totals(2, 0, None, 1)}),
        ],
    ),
    "J5 self join": Case(
        {"a": "v int"},
        self_join,
        [
            Step(one(1, 2), [(1, 1, 1), (2, 2, 2)]),
            RESTART,
            Step(one(3, 6), [(3, 3, 3), (1, 1, 6), (1, 6, 1), (1, 6, 6)]),
        ],
    ),
    "self join in time": Case(
        {"a": "k string, t timestamp"},
        self_join_in_time,
        [
            Step({"a": [("a", 1), ("a", 5), ("b", 2)]}, [("a", 1, 5)]),
            Step({"a": [("a", 30), ("b", None)]}, None),
            Step({"a": [("c", 60), ("a", 10)]}, None),
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
            Step(both([21], [22]), [(1, 10, 2, None), (2, 10, 4, None)], {"join": Totals(2, 12, 5)}),
            RESTART,
            Step(one(22), [(22, 30, 44, 66)], {"join": Totals(3, 1)}),
        ],
    ),
    "JO1 right outer of windows": Case(
        TWO,
        lambda ops, i: windows(ops, i, "right_outer"),
        [
            Step(both([1, 2, 3, 4, 5], [3, 4, 5, 6, 7]), [(3, 10, 6, 9), (4, 10, 8, 12), (5, 10, 10, 15)]),
            Step(both([21], [22]), [(6, 10, None, 18), (7, 10, None, 21)], {"join": Totals(2, 12, 5)}),
            Step(one(22), [(22, 30, 44, 66)], {"join": Totals(3, 1)}),
        ],
    ),
    "JO1 full outer of windows": Case(
        TWO,
        lambda ops, i: windows(ops, i, "full_outer"),
        [
            Step(
                both([1, 2, 3, 4, 5], [3, 4, 5, 6, 7]),
                [(3, 10, 6, 9), (4, 10, 8, 12), (5, 10, 10, 15)],
                {"join": Totals(10, 10)},
            ),
            Step(
                both([21], [22]),
                [(1, 10, 2, None), (2, 10, 4, None), (6, 10, None, 18), (7, 10, None, 21)],
                # As in Spark's progress, rows of an outer side are not counted when they leave.
                {"join": Totals(2, 2, 0)},
            ),
            Step(one(22), [(22, 30, 44, 66)], {"join": Totals(3, 1)}),
            RESTART,
            Step(one(1), [], {"join": Totals(3, 0, 0, 1)}),
            Step({"b": times(5)}, [], {"join": Totals(3, 0, 0, 1)}),
        ],
    ),
    "left semi of windows": Case(
        TWO,
        lambda ops, i: windows(ops, i, "left_semi"),
        [
            Step(both([1, 2, 3, 4, 5], [3, 4, 5, 6, 7]), [(3, 10, 6), (4, 10, 8), (5, 10, 10)]),
            Step(both([21], [22, 22]), []),
            RESTART,
            Step(one(22, 22), [(22, 30, 44)] * 2),
            Step({"b": times(21, 21)}, [(21, 30, 42)]),
            Step(one(1), [], {"join": Totals(4, None, None, 1)}),
        ],
    ),
    "JO2 left outer, early exclusion": Case(
        TWO,
        lambda ops, i: excluding(ops, i, "left_outer"),
        [
            Step(
                both([1, 2, 3], [3, 4, 5]), [(3, 10, 6, 9), (1, 10, 2, None), (2, 10, 4, None)], {"join": Totals(4, 4)}
            ),
            Step(both([20], [21]), []),
            Step({"b": times(20)}, [(20, 30, 40, 60)]),
        ],
    ),
    "JO2 full outer, early exclusion": Case(
        TWO,
        lambda ops, i: excluding(ops, i, "full_outer"),
        [
            Step(both([1, 2, 3], [3, 4, 5]), [(3, 10, 6, 9), (1, 10, 2, None), (2, 10, 4, None)]),
            Step(both([20], [21]), [(4, 10, None, 12), (5, 10, None, 15)], {"join": Totals(2)}),
            Step({"b": times(20)}, [(20, 30, 40, 60)]),
        ],
    ),
    "JO6 null-safe keys": Case(
        TIMED,
        lambda ops, i: null_keys(ops, i, null_safe=True),
        [
            Step(
                both([(None, 1, 1), ("a", 1, 2)], [(None, 1, 10), ("a", 1, 20)]),
                [("a", "a", 2, 20), (None, None, 1, 10)],
            ),
            RESTART,
            Step(both([(None, 1, 3), ("", 1, 4)], []), [(None, None, 3, 10)]),
        ],
    ),
    "JO6 null keys match nothing": Case(
        TIMED,
        lambda ops, i: null_keys(ops, i, null_safe=False, how="left_outer"),
        [
            Step(both([(None, 1, 1), ("a", 1, 2)], [(None, 1, 10), ("a", 1, 20)]), [("a", "a", 2, 20)]),
            Step(both([("z", 50, 3)], [("z", 50, 4)]), [("z", "z", 3, 4), (None, None, 1, None)]),
        ],
    ),
    "inner in a range of time": Case(
        TIMED,
        lambda ops, i: by_time(ops, i, "inner"),
        [
            Step(both([("a", 10, 1), ("b", 12, 2)], [("a", 15, 3), ("b", 30, 4)]), [("a", "a", 10, 15, 1, 3)]),
            Step(
                both([("a", 5, 5), ("b", 25, 6)], [("a", 4, 7)]),
                [("a", "a", 5, 15, 5, 3), ("b", "b", 25, 30, 6, 4), ("a", "a", 5, 4, 5, 7)],
            ),
            Step(both([("c", 60, 7)], [("c", 58, 8)]), [("c", "c", 60, 58, 7, 8)], {"join": Totals(2)}),
            RESTART,
            Step(both([("c", 40, 9)], [("c", 65, 10)]), [("c", "c", 60, 65, 7, 10)], {"join": Totals(3, 1, 0, 1)}),
        ],
    ),
    "full outer in a range of time, a condition on both sides": Case(
        TIMED,
        lambda ops, i: by_time(ops, i, "full_outer", "(x < y or x + 10 > y * 3) and not x <=> 5"),
        [
            Step(both([("a", 10, 1), ("b", 12, 2), ("a", 11, 5)], [("a", 15, 3), ("b", 13, 1)]), None),
            Step(both([("a", 12, None), ("b", 25, 6)], [("a", 14, 7)]), None),
            Step(both([("c", 60, 7)], [("c", 58, 8)]), None),
            RESTART,
            Step(both([("c", 90, 7)], [("c", 95, 1)]), None),
        ],
    ),
    "left semi in a range of time": Case(
        TIMED,
        lambda ops, i: by_time(ops, i, "left_semi", "x < y"),
        [
            Step(both([("a", 10, 1), ("b", 12, 2), ("a", 11, 5)], [("a", 15, 3), ("b", 13, 1)]), [("a", 10, 1)]),
            Step(both([("a", 12, 4)], [("a", 14, 7), ("a", 15, 9)]), [("a", 11, 5), ("a", 12, 4)]),
            Step(both([("c", 60, 7)], [("c", 58, 8)]), [("c", 60, 7)]),
        ],
    ),
    # Spark takes ``e`` for the left side's event time, and removes the row that the last step matches.
    "inner in a range that ends at a time of no watermark": Case(
        {"a": "k string, t timestamp, e timestamp", "b": "k string, u timestamp"},
        until_expired,
        [
            Step({"a": [("a", 10, 100), ("b", 10, 20)], "b": [("a", 12), ("b", 21)]}, [("a", 10, 12)]),
            Step({"a": [("z", 60, 60)], "b": [("z", 60)]}, [("z", 60, 60)], {"join": Totals(4)}),
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
    "M4 join then window": Case(
        TWO,
        join_then_window,
        [
            Step(both([1, 2, 3, 4], [1, 2, 3, 4]), [], {"agg": Totals(1), "join": Totals(0)}),
            Step(both([5], [5]), [(0, 4)], {"agg": Totals(1), "join": Totals(0)}),
        ],
    ),
    "left outer join in a range of time, then window": Case(
        TIMED,
        range_join_then_window,
        [
            Step(both([("a", 1, 1), ("b", 2, 2)], [("a", 4, 3)]), []),
            Step(both([("a", 12, 4)], [("a", 11, 5)]), None),
            RESTART,
            Step(both([("a", 20, 6)], [("a", 21, 7)]), None),
            Step(both([("a", 40, 8)], [("a", 41, 9)]), None),
        ],
    ),
}

"""Replay cases of user-defined state per key: the pandas form beside Spark's own, and the Arrow form.

PySpark 3.5's own worker fails with today's pyarrow where a key has several rows in a batch (it slices by a float), so cases that Spark
runs too give each key one row a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from spark_jobs.functions.state_batch import StateBatch
from spark_jobs.plan.spark_version import SPARK
from tests.integration.operator_cases import RESTART, Case, Operators, Step

LETTERS = {"a": "k string"}
VALUES = {"a": "k string, v int"}
TIMES = {"a": "k string, t timestamp"}
NONE, EVENT = GroupStateTimeout.NoTimeout, GroupStateTimeout.EventTimeTimeout


def letters(text: str) -> dict[str, list[tuple[Any, ...]]]:
    return {"a": [(letter,) for letter in text]}


def in_pandas(
    ops: Operators, frame: DataFrame, func: Any, output: str, state: str, mode: str = "update", timeout: str = NONE
) -> DataFrame:
    grouped = ops(frame, "users", mode).groupBy("k")
    return grouped.applyInPandasWithState(func, output, state, mode, timeout)  # type: ignore[no-any-return]


def in_arrow(
    ops: Operators, frame: DataFrame, func: Any, output: str, state: str, mode: str = "update", timeout: str = NONE
) -> DataFrame:
    grouped = ops(frame, "users", mode).groupBy("k")
    return grouped.applyInArrowWithState(func, output, state, mode, timeout)  # type: ignore[no-any-return]


# The functions are made inside others, so that Spark's workers get them by value.


def counting(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    def count(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        total = sum(len(pdf) for pdf in pdfs) + (state.get[0] if state.exists else 0)
        if total >= 3:
            state.remove()
            return
        state.update((total,))
        yield pd.DataFrame({"k": [key[0]], "n": [str(total)]})

    return in_pandas(ops, i["a"], count, "k string, n string", "n bigint")


def counting_in_arrow(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    def count(keys: pa.Table, rows: pa.Table, state: StateBatch) -> pa.Table:
        totals = pc.add(state.get("n", 0), np.diff(state.offsets))
        state.update({"n": totals})
        stays = pc.less(totals, 3)
        state.remove(where=pc.invert(stays))
        return keys.append_column("n", totals.cast(pa.string())).filter(stays)

    return in_arrow(ops, i["a"], count, "k string, n string", "n bigint")


def remembering(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    def remember(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        before = state.getOption[0] if state.exists else 0
        pdf = pd.concat(list(pdfs))
        state.update((before + len(pdf),))
        yield pd.DataFrame({"k": [key[0]] * len(pdf), "v": pdf["v"].to_numpy(), "before": [before] * len(pdf)})

    return in_pandas(ops, i["a"], remember, "k string, v int, before bigint", "n bigint")


def counted_after(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    def once(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        state.update((sum(len(pdf) for pdf in pdfs),))
        yield pd.DataFrame({"k": [key[0]]})

    first = in_pandas(ops, i["a"], once, "k string", "n bigint", "append")
    return ops(first, "counts", "complete").groupBy("k").count()  # type: ignore[no-any-return]


def sessions_by_hand(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """A key times out 5 s of event time after its newest row."""

    def sessions(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            (count, newest), mark = state.get, state.getCurrentWatermarkMs()
            assert all(pdf.empty for pdf in pdfs)
            state.remove()
            yield pd.DataFrame({"k": [key[0]], "n": [count], "until": [newest], "watermark": [mark // 1000]})
            return
        count, newest = state.getOption or (0, 0)
        for pdf in pdfs:
            seconds = pdf["t"].dt.tz_localize("UTC").dt.as_unit("s").astype("int64")
            count, newest = count + len(pdf), max(newest, int(seconds.max()))
        state.update((count, newest))
        state.setTimeoutTimestamp(max((newest + 5) * 1000, state.getCurrentWatermarkMs()))

    def fit(*args: Any) -> Iterator[pd.DataFrame]:
        yield from sessions(*args)

    marked = i["a"].withWatermark("t", "2 seconds")
    return in_pandas(ops, marked, fit, "k string, n int, until int, watermark int", "n int, newest int", timeout=EVENT)


def sessions_in_arrow(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    def sessions(keys: pa.Table, rows: pa.Table, state: StateBatch) -> pa.Table | None:
        if state.has_timed_out:
            closed = keys.append_column("n", state.get("n")).append_column("until", state.get("newest"))
            state.remove()
            mark = pa.array([state.current_watermark_ms // 1000] * keys.num_rows)
            return closed.append_column("watermark", mark)
        new = rows.group_by("key_index", use_threads=False).aggregate([("t", "max")])["t_max"]
        newest = pc.max_element_wise(new.cast(pa.timestamp("s", "UTC")).cast(pa.int64()), state.get("newest", 0))
        state.update({"n": pc.add(state.get("n", 0), np.diff(state.offsets)), "newest": newest})
        due = pc.multiply(pc.add(newest, 5), 1000)
        state.set_timeout_timestamp(pc.max_element_wise(due, state.current_watermark_ms))
        return None

    marked = i["a"].withWatermark("t", "2 seconds")
    output = "k string, n int, until int, watermark int"
    return in_arrow(ops, marked, sessions, output, "n int, newest int", timeout=EVENT)


def rich(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """State and rows of many types, keys that are null, columns with nulls."""

    def collect(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        pdf = pd.concat(list(pdfs))
        values, tags, last, price = state.getOption or ([], {}, None, None)
        values = list(values) + [None if pd.isna(v) else int(v) for v in pdf["v"]]
        tags = {**tags, str(len(values)): f"{pdf['v'].dtype}"}
        prices = pdf["d"].dropna()
        state.update((values, tags, pdf["t"].max().to_pydatetime(), None if prices.empty else prices.max()))
        description = f"{values} {sorted(tags.items())} {last} {price} {type(key[0]).__name__}"
        yield pd.DataFrame({"k": [key[0]], "told": [description]})

    state = "seen array<int>, tags map<string,string>, last timestamp, price decimal(10,2)"
    return in_pandas(ops, i["a"].selectExpr("*", "cast(v as decimal(10,2)) d"), collect, "k string, told string", state)


def struct_keys(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    def count(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        state.update((sum(len(pdf) for pdf in pdfs) + (state.get[0] if state.exists else 0),))
        yield pd.DataFrame({"k": [f"{key[0]} {key[1]}"], "n": [state.get[0]]})

    frame = i["a"].withColumn("s", F.struct("k", (F.col("v") % 2).alias("odd")))
    keyed = ops(frame, "users", "update").groupBy("s", "v")
    return keyed.applyInPandasWithState(count, "k string, n int", "n int", "update", NONE)  # type: ignore[no-any-return]


SESSIONS = [
    Step({"a": [("a", 10), ("b", 11)]}, []),
    Step({"a": [("a", 12), ("b", 17), ("c", 18)]}, []),
    # The watermark goes to 23: a (until 12) and b (17) are over; the row of d makes its key time out at once.
    RESTART,
    Step({"a": [("c", 25), ("d", 17)]}, [("a", 2, 12, 23), ("b", 2, 17, 23), ("d", 1, 17, 23)]),
    # Rows up to 23 are late.
    Step({"a": [("d", 23), ("c", 24)]}, []),
    Step({"a": [("z", 60)]}, [("c", 3, 25, 58)]),
]

COUNTS = [
    Step(letters("a"), [("a", "1")]),
    Step(letters("ab"), [("a", "2"), ("b", "1")]),
    RESTART,
    Step(letters("ab"), [("b", "2")]),
    RESTART,
    Step(letters("ac"), [("a", "1"), ("c", "1")]),
]

GROUP_STATE_CASES: dict[str, Case] = {
    "F1 running count": Case(LETTERS, counting, COUNTS, mode="update"),
    "F1 running count in Arrow": Case(LETTERS, counting_in_arrow, COUNTS, spark=False, mode="update"),
    "F2 values with what was before": Case(
        VALUES,
        remembering,
        [
            Step({"a": [("a", 1)]}, [("a", 1, 0)]),
            Step({"a": [("a", 2), ("a", 3), ("b", 1)]}, [("a", 2, 1), ("a", 3, 1), ("b", 1, 0)]),
            RESTART,
            Step(
                {"a": [("b", 2), ("c", 1), ("d", 1), ("e", 1)]},
                [("b", 2, 1), ("c", 1, 0), ("d", 1, 0), ("e", 1, 0)],
            ),
            Step({"a": [("a", 4)]}, [("a", 4, 3)]),
        ],
        spark=False,
        mode="update",
    ),
    "F3 with an aggregation after it": Case(
        LETTERS,
        counted_after,
        [
            Step(letters("a"), [("a", 1)]),
            Step(letters("ab"), [("a", 2), ("b", 1)]),
            RESTART,
            Step(letters("ab"), [("a", 3), ("b", 2)]),
            RESTART,
            Step(letters("ac"), [("a", 4), ("b", 2), ("c", 1)]),
        ],
        mode="complete",
    ),
    "F event-time timeouts": Case(TIMES, sessions_by_hand, SESSIONS, mode="update"),
    "F event-time timeouts in Arrow": Case(TIMES, sessions_in_arrow, SESSIONS, spark=False, mode="update"),
    "F types and nulls": Case(
        {"a": "k string, v int, t timestamp"},
        rich,
        [
            Step(
                {"a": [("a", 1, 5), (None, None, 6), ("b", 2, 7)]},
                [
                    ("a", "[1] [('1', 'int32')] None None str"),
                    ("b", "[2] [('1', 'int32')] None None str"),
                    (None, "[None] [('1', 'float64')] None None NoneType"),
                ],
            ),
            Step(
                {"a": [("a", 3, 9), (None, 4, 1), ("b", None, 7)]},
                [
                    ("a", "[1, 3] [('1', 'int32'), ('2', 'int32')] 1970-01-01 00:00:05 1.00 str"),
                    ("b", "[2, None] [('1', 'int32'), ('2', 'float64')] 1970-01-01 00:00:07 2.00 str"),
                    (None, "[None, 4] [('1', 'float64'), ('2', 'int32')] 1970-01-01 00:00:06 None NoneType"),
                ],
            ),
        ],
        # Spark 4.2's own worker reads the state's type in lower case, in which that of an array or a map is not found.
        spark=not SPARK.PROCESSOR_CLASSES,
        mode="update",
    ),
    "F struct keys": Case(
        VALUES,
        struct_keys,
        [
            Step({"a": [("a", 1), ("a", 2), ("b", 1)]}, None),
            Step({"a": [("a", 1), (None, None), ("b", 2)]}, None),
        ],
        mode="update",
    ),
}

"""Processors of transformWithState and their cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.processor import StatefulProcessor as FleetProcessor
from tests.integration.operator_cases import RESTART, Case, Operators, Step

ROWS = pa.schema([("id", pa.string()), ("v", pa.int32())])
OUTPUT = "id string, out string"
#: PySpark's class where it has one, which is of the fleet's, too.
StatefulProcessor: Any = SPARK.PROCESSOR_CLASSES[0] if SPARK.PROCESSOR_CLASSES else FleetProcessor

# Processors are made inside functions, so that Spark's workers get them by value.


def counter(in_pandas: bool, timers: bool = False) -> StatefulProcessor:
    """Return a counter of a key's rows; with timers, the count of key 0 begins again after each batch."""

    class Counter(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.count = handle.getValueState("count", "n bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            n = (self.count.get() or (0,))[0] + sum(len(batch) if in_pandas else 1 for batch in rows)
            self.count.update((n,))
            if timers and key == ("0",):
                handle, now = self.handle, timerValues.getCurrentProcessingTimeInMs()
                handle.registerTimer(now + 1)
            yield self.row(key, n)

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
            assert expiredTimerInfo.getExpiryTimeInMs() < timerValues.getCurrentProcessingTimeInMs()
            assert list(self.handle.listTimers()) == [expiredTimerInfo.getExpiryTimeInMs()]
            self.count.clear()
            yield self.row(key, -1)

        def row(self, key: Any, n: int) -> Any:
            return pd.DataFrame({"id": [key[0]], "out": [str(n)]}) if in_pandas else Row(id=key[0], out=str(n))

    return Counter()


def transform(
    ops: Operators, frame: DataFrame, processor: StatefulProcessor, *, in_pandas: bool, **options: Any
) -> Any:
    grouped = ops(frame, "users", "update").groupBy("k")
    call = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
    return call(processor, **{"outputStructType": OUTPUT, "outputMode": "Update", "timeMode": "None", **options})


def counts(in_pandas: bool) -> Callable[[Operators, Mapping[str, DataFrame]], DataFrame]:
    return lambda ops, i: transform(ops, i["a"], counter(in_pandas), in_pandas=in_pandas)


def sessions(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Collect a key's rows in a list, which is emitted 5 s of event time after the newest one."""

    class Sessions(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.seen = handle.getListState("seen", "t timestamp")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for timer in self.handle.listTimers():
                self.handle.deleteTimer(timer)
            for row in rows:
                self.seen.appendValue((row.t,))
            newest = max(t for (t,) in self.seen.get())
            self.handle.registerTimer(int(newest.timestamp() * 1000) + 5000)
            return []

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
            n = len(list(self.seen.get()))
            self.seen.clear()
            mark, at = timerValues.getCurrentWatermarkInMs(), expiredTimerInfo.getExpiryTimeInMs()
            # Spark takes Rows only.
            yield Row(id=key[0], out=f"{n} until {at // 1000 - 5} at {mark // 1000}")

    marked = i["a"].withWatermark("t", "2 seconds")
    return transform(ops, marked, Sessions(), in_pandas=False, timeMode="eventTime")  # type: ignore[no-any-return]


def chained(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """A processor whose rows go on to an aggregation, with an event time of their own."""

    class Pass(StatefulProcessor):
        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for pdf in rows:
                yield pd.DataFrame({"k": key * len(pdf), "at": pdf["t"]})

    marked = i["a"].withWatermark("t", "5 seconds")
    passed = (
        ops(marked, "pass", "append")
        .groupBy("k")
        .transformWithStateInPandas(Pass(), "k string, at timestamp", "append", "EVENTTIME", eventTimeColumnName="at")
    )
    return ops(passed, "counts", "append").groupBy("at").count().selectExpr("cast(at as long) at", "count")  # type: ignore[no-any-return]


def words(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """A map with keys that come and go; grouped by a struct, with nulls."""

    class Words(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.seen = handle.getMapState("seen", "word string, odd boolean", "n int")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for row in rows:
                word = (row.k, None if row.v is None else row.v % 2 == 1)
                if self.seen.containsKey(word) and self.seen.getValue(word)[0] == 2:
                    self.seen.removeKey(word)
                else:
                    self.seen.updateValue(word, ((self.seen.getValue(word) or (0,))[0] + 1,))
            counts = sorted((str(tuple(entry)), n) for entry, (n,) in self.seen.iterator())
            # Spark has a dictionary there.
            name = Row(**key[0]) if isinstance(key[0], dict) else key[0]
            yield Row(id=str(name), out=str(counts))

    marked = i["a"].withColumn("s", F.struct((F.col("v") > 5).alias("big")))
    grouped = ops(marked, "words", "update").groupBy("s")
    return grouped.transformWithState(Words(), OUTPUT, "update", "None")  # type: ignore[no-any-return]


def started(in_pandas: bool) -> Callable[[Operators, Mapping[str, DataFrame]], DataFrame]:
    """Return a query of counts that start from a table."""

    def query(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
        class Started(type(counter(in_pandas))):  # type: ignore[misc]
            def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
                n = int(initialState["n"].sum()) if in_pandas else initialState.n
                self.count.update(((self.count.get() or (0,))[0] + n,))

        table = i["a"].sparkSession.createDataFrame([("0", 10), ("9", 5), (None, 1)], "k string, n bigint")
        options = {"initialState": table.groupBy("k")}
        return transform(ops, i["a"], Started(), in_pandas=in_pandas, **options)  # type: ignore[no-any-return]

    return query


def collections(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    """Keep lists and maps of values of several types; of a list only its two newest elements."""

    class Collections(StatefulProcessor):
        def init(self, handle: Any) -> None:
            last = T.StructType().add("v", T.IntegerType()).add("words", T.ArrayType(T.StringType()))
            self.last = handle.getListState("last", last)
            self.sums = handle.getMapState("sums", "odd boolean", valueSchema="n double, at map<string, int>")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for row in rows:
                elements = [*self.last.get(), (row.v, [row.k, None])]
                self.last.put(elements[-2:])
                odd = (row.v % 2 == 1,)
                n = self.sums.getValue(odd)[0] if self.sums.containsKey(odd) else 0.5
                self.sums.updateValue(odd, (n + row.v, {row.k: row.v}))
            seen = [(v, list(words)) for v, words in self.last.get()]
            sums = sorted((odd, n, sorted(at.items())) for (odd,), (n, at) in self.sums.iterator())
            times = timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()
            yield Row(out=f"{seen} {sums} {self.last.exists()} {times}", id=key[0])

    return transform(ops, i["a"], Collections(), in_pandas=False)  # type: ignore[no-any-return]


T1 = [
    Step({"a": [("0", 123), ("0", 46), ("1", 146), ("1", 346)]}, [("0", "2"), ("1", "2")]),
    RESTART,
    Step({"a": [("0", 123), (None, 6)]}, [("0", "3"), (None, "1")]),
    Step({"a": [("2", None)]}, [("2", "1")]),
]
VALUES, TIMES = {"a": "k string, v int"}, {"a": "k string, t timestamp"}
CASES = {
    "T1 counts": Case(VALUES, counts(False), T1, spark=False, mode="update"),
    "T1 counts in pandas": Case(VALUES, counts(True), T1, spark=False, mode="update"),
    **{
        f"initial state{' in pandas' * in_pandas}": Case(
            VALUES,
            started(in_pandas),
            [
                Step({"a": [("0", 1), ("1", 1), (None, 1)]}, [("0", "11"), ("1", "1"), (None, "2")]),
                RESTART,
                Step({"a": [("9", 1), ("0", 1)]}, [("0", "12"), ("9", "6")]),
            ],
            spark=False,
            mode="update",
        )
        for in_pandas in (False, True)
    },
    "lists and maps": Case(
        VALUES,
        collections,
        [
            Step({"a": [("a", 1), ("a", 2), ("b", 7)]}, None),
            RESTART,
            Step({"a": [("a", 3), ("a", 4)]}, None),
        ],
        spark=False,
        mode="update",
    ),
    "event-time timers": Case(
        TIMES,
        sessions,
        [
            Step({"a": [("a", 10), ("b", 11)]}, []),
            Step({"a": [("a", 12), ("b", 17), ("c", 18)]}, []),
            RESTART,
            # The watermark goes to 23: a (17) and b (22) are over, and the row of d is before it.
            Step(
                {"a": [("c", 25), ("d", 17)]},
                [("a", "2 until 12 at 23"), ("b", "2 until 17 at 23"), ("d", "1 until 17 at 23")],
            ),
            # Rows up to 23 are late.
            Step({"a": [("d", 23), ("c", 24)]}, []),
            Step({"a": [("z", 60)]}, [("c", "3 until 25 at 58")]),
        ],
        spark=False,
        mode="update",
    ),
    "chained": Case(
        TIMES,
        chained,
        [
            Step({"a": [("a", 10), ("b", 15)]}, [(10, 1)]),
            RESTART,
            Step({"a": [("a", 11), ("c", 25)]}, [(11, 1), (15, 1)]),
            Step({"a": [("a", 5)]}, []),
            Step({"a": [("a", 21), ("a", 40)]}, [(21, 1), (25, 1)]),
        ],
        spark=False,
    ),
    "map under struct keys": Case(
        VALUES,
        words,
        [
            Step(
                {"a": [("x", 1), ("y", 9), ("x", 3), (None, None)]},
                [
                    ("Row(big=False)", "[(\"('x', True)\", 2)]"),
                    ("Row(big=True)", "[(\"('y', True)\", 1)]"),
                    ("Row(big=None)", "[('(None, None)', 1)]"),
                ],
            ),
            RESTART,
            Step(
                {"a": [("x", 1), ("z", 2), ("y", 8)]},
                [
                    ("Row(big=False)", "[(\"('z', False)\", 1)]"),
                    ("Row(big=True)", "[(\"('y', False)\", 1), (\"('y', True)\", 1)]"),
                ],
            ),
        ],
        spark=False,
        mode="update",
    ),
}

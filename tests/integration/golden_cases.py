"""Queries, inputs and answers of Spark's suites for the checkpoints that they have of earlier versions, in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tests.integration.operator_cases import Operators
from tests.integration.processor_cases import StatefulProcessor

Batch = Sequence[tuple[Any, ...]]
Query = Callable[[Operators, DataFrame], DataFrame]

#: What happens to a checkpoint, as the table has it; other outcomes are refusals.
IMPORTED, AFTER_A_BATCH = "imported", "imported after a batch"
OF_FORMAT_1, BY_SPARK = "refused: another format of functions' state", "refused, by Spark as well"
OF_DEVELOPMENT = "refused: of a development version"
STATELESS, WITH_SPARK_4 = "refused: the query has no state", "refused: import it with Spark 4"
#: What the error says.
SAYS = {
    AFTER_A_BATCH: "nothing was written.* let the old query run a batch on this version of Spark",
    OF_FORMAT_1: "is not imported; nothing was written; begin with a new checkpoint, or give the state as rows",
    OF_DEVELOPMENT: "development version of Spark, or moved since.*nothing was written; put the checkpoint back",
    STATELESS: "the checkpoint has other stateful operators than the query; nothing was written",
    WITH_SPARK_4: "nothing was written; import it with Spark 4",
}


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A checkpoint of Spark's suites.

    Attributes
    ----------
    folder
        Its folder, without what all have in common; begins with the version of Spark.
    operator
        Of its query, for the table.
    source
        Columns of its source.
    before
        The batches that it has read.
    steps
        Batches that come then, each with the rows that a suite, or the definition of the operator, gives.
    outcomes
        With Spark 3.5, and with Spark 4.2.
    """

    folder: str
    operator: str
    source: str
    before: Sequence[Batch]
    query: Query
    steps: Sequence[tuple[Batch, Batch]]
    mode: str = "update"
    outcomes: tuple[str, str] = (IMPORTED, IMPORTED)
    conf: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return self.folder.partition("-")[0].partition("/")[0]


#: Of rows that a program repartitions, Spark before 3.3 looked for a group where they were then. Spark 4.2 partitions them by the
#: session's setting, and finds the groups only if that is the checkpoint's.
_REPARTITIONED = {"spark.sql.shuffle.partitions": "5"}


def ints(*values: int) -> Batch:
    return [(value,) for value in values]


def counted(*keys: str) -> Query:
    return lambda ops, frame: ops(frame, "agg", "update").groupBy(*keys).agg(F.count("*"))


def counted_in_complete(ops: Operators, frame: DataFrame) -> DataFrame:
    return ops(frame, "agg", "complete").groupBy("value").agg(F.count("*"))  # type: ignore[no-any-return]


def counted_by_repartitioned_keys(ops: Operators, frame: DataFrame) -> DataFrame:
    return counted("key1", "key2")(ops, repartitioned(frame))


def repartitioned(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("value key1", "value * 2 key2", "value * 3 value").repartition("key1")


def windows(ops: Operators, frame: DataFrame) -> DataFrame:
    times = frame.withColumn("eventTime", F.timestamp_seconds("value")).withWatermark("eventTime", "10 seconds")
    grouped = ops(times, "agg", "append").groupBy(F.window("eventTime", "5 seconds").alias("window"))
    counts = grouped.agg(F.count("*").alias("count"))
    return counts.select(F.col("window.start").cast("long"), "count")  # type: ignore[no-any-return]


def sessions(ops: Operators, frame: DataFrame) -> DataFrame:
    times = frame.selectExpr("_1 value", "_2 userId", "cast(_3 as timestamp) eventTime")
    events = times.withWatermark("eventTime", "30 seconds")
    events = events.selectExpr("explode(split(value, ' ')) sessionId", "userId", "eventTime").repartition("userId")
    grouped = ops(events, "agg", "append").groupBy(
        F.session_window("eventTime", "10 seconds").alias("session"), "sessionId", "userId"
    )
    starts, ends = "cast(session.start as long)", "cast(session.end as long)"
    counts = grouped.agg(F.count("*").alias("numEvents"))
    return counts.selectExpr("sessionId", "userId", starts, ends, "numEvents")  # type: ignore[no-any-return]


def joined(ops: Operators, frame: DataFrame) -> DataFrame:
    times = frame.select(F.col("_1").alias("value"), F.timestamp_seconds("_2").alias("timestamp"))
    left = times.selectExpr("value leftId", "timestamp leftTime").withWatermark("leftTime", "5 seconds")
    right = times.where("value % 2 = 0").selectExpr("value rightId", "timestamp rightTime")
    both = ops(left, "join", "append").join(
        right.withWatermark("rightTime", "5 seconds"),
        F.expr("rightId = leftId AND rightTime >= leftTime AND rightTime <= leftTime + interval 5 seconds"),
        "inner",
    )
    columns = ("leftId", "cast(leftTime as int)", "rightId", "cast(rightTime as int)")
    return both.selectExpr(*columns)  # type: ignore[no-any-return]


def distinct(*keys: str) -> Query:
    return lambda ops, frame: ops(frame, "seen", "append").dropDuplicates([*keys])


def distinct_of_repartitioned(ops: Operators, frame: DataFrame) -> DataFrame:
    return distinct("key1", "key2")(ops, repartitioned(frame))


def distinct_of_all_columns(ops: Operators, frame: DataFrame) -> DataFrame:
    columns = ("value", "value + 10 key", "cast(value as string) topic", "value + 100 partition", "value + 5 offset")
    seen = ops(frame.selectExpr(*columns), "seen", "append").dropDuplicates()
    return seen.select("key", "value", "topic", "partition", "offset")  # type: ignore[no-any-return]


def limited(ops: Operators, frame: DataFrame) -> DataFrame:
    return ops(frame, "limit", "append").limit(10)  # type: ignore[no-any-return]


_NUMBERS = (
    "value", "value % 5 id", "cast(value as string) str", "cast(value as float) f", "cast(value as double) d",
    "cast(value as decimal) dec", "value % 3 mod", "named_struct('key', cast(value as string), 'value', value) s",
)  # fmt: skip
_COMMON = (
    "avg(value) avg_v", "avg(f) avg_f", "avg(d) avg_d", "avg(dec) avg_dec", "count(value) cnt", "first(value) first_v",
    "first(s) first_s", "last(value) last_v", "last(s) last_s", "min(struct(value, str)) min_struct", "max(value) max_v",
    "sum(value) sum_v", "sum(f) sum_f", "sum(d) sum_d", "collect_list(value) col_list", "collect_set(mod) col_set",
)  # fmt: skip
_SELECTED = (
    "id", "avg_v", "avg_f", "avg_d", "avg_dec", "cnt", "first_v", "first_s.value", "last_v", "last_s.value",
    "min_struct.value", "max_v", "sum_v", "sum_f", "sum_d", "sort_array(col_list)", "sort_array(col_set)",
)  # fmt: skip
_STATISTICS = (
    "kurtosis(d) kts", "skewness(d) skew", "approx_count_distinct(mod) acd", "approx_count_distinct(f) acd_f",
    "approx_count_distinct(d) acd_d", "approx_count_distinct(dec) acd_dec", "approx_count_distinct(str) acd_str",
    "stddev_pop(d) sp", "stddev_samp(d) ss", "var_pop(d) vp", "var_samp(d) vs", "covar_pop(value, mod) cp",
    "covar_samp(value, mod) cs", "corr(value, mod) c",
)  # fmt: skip


def aggregated(aggregates: Sequence[str], selected: Sequence[str], columns: Sequence[str] = _NUMBERS) -> Query:
    def query(ops: Operators, frame: DataFrame) -> DataFrame:
        grouped = ops(frame.selectExpr(*columns), "agg", "complete").groupBy("id")
        return grouped.agg(*map(F.expr, aggregates)).selectExpr(*selected)  # type: ignore[no-any-return]

    return query


def commonly_aggregated(k: int) -> tuple[Any, ...]:
    """Return the result of a group of k and the numbers 5, 10 and 15 above it."""
    means, sums = [k + 7.5] * 4, [4 * k + 30, 4.0 * k + 30, 4.0 * k + 30]
    return (k, *means, 4, k, k, k + 15, k + 15, k, k + 15, *sums, [k, k + 5, k + 10, k + 15], [0, 1, 2])


def of_scala(name: str) -> T.StructType:
    """Return the type of a number in the state of a Scala function, which is never null."""
    return T.StructType([T.StructField(name, T.LongType(), nullable=False)])


def counted_by_function(ops: Operators, frame: DataFrame) -> DataFrame:
    def count(key: Any, rows: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"key1": [key[0]], "key2": [key[1]], "cnt": ["-1"]})
            return
        total = sum(map(len, rows)) + (state.get[0] if state.exists else 0)
        state.update((total,))
        state.setTimeoutDuration(3_600_000)
        yield pd.DataFrame({"key1": [key[0]], "key2": [key[1]], "cnt": [str(total)]})

    times = frame.selectExpr("_1", "_2", "timestamp_seconds(_3) timestamp").withWatermark("timestamp", "10 seconds")
    grouped = ops(times.repartition("_1"), "function", "update").groupBy("_1", "_2")
    return grouped.applyInPandasWithState(  # type: ignore[no-any-return]
        count,
        "key1 string, key2 string, cnt string",
        of_scala("count"),
        "update",
        GroupStateTimeout.ProcessingTimeTimeout,
    )


def latest_by_function(ops: Operators, frame: DataFrame) -> DataFrame:
    def latest(key: Any, rows: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            state.remove()
            yield pd.DataFrame({"key": [key[0]], "newest": [-1]})
            return
        seconds = [int(time.timestamp()) for frame in rows for time in frame["eventTime"]]
        newest = max([*seconds, *(state.get if state.exists else ())])
        state.update((newest,))
        state.setTimeoutTimestamp((newest + 5) * 1000)
        yield pd.DataFrame({"key": [key[0]], "newest": [newest]})

    times = frame.selectExpr("_1 value", "timestamp_seconds(_2) eventTime").withWatermark("eventTime", "10 seconds")
    grouped = ops(times, "function", "update").groupBy("value")
    return grouped.applyInPandasWithState(  # type: ignore[no-any-return]
        latest, "key string, newest long", of_scala("value"), "update", GroupStateTimeout.EventTimeTimeout
    )


def counted_by_processor(ops: Operators, frame: DataFrame) -> DataFrame:
    class Counter(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.count = handle.getValueState("countState", "value bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            total = sum(1 for _ in rows) + (self.count.get()[0] if self.count.exists() else 0)
            self.count.update((total,))
            yield Row(id=key[0], out=str(total))

    grouped = ops(frame, "processor", "update").groupBy("value")
    return grouped.transformWithState(Counter(), "id string, out string", "update", "None")  # type: ignore[no-any-return]


_PAIRS, _TRIPLES, _NAMED = (
    "_1 INT NOT NULL, _2 BIGINT NOT NULL",
    "_1 STRING, _2 STRING, _3 BIGINT NOT NULL",
    "_1 STRING",
)
_VALUE = "value INT NOT NULL"


def pairs(*values: int) -> Batch:
    return [(value, value) for value in values]


def matches(*values: int) -> Batch:
    return [(value,) * 4 for value in values]


def joins(folder: str, before: int, written: str = "", **others: Any) -> Golden:
    batches = [pairs(*range(first, first + 5)) for first in range(1, before + 16, 5)]
    steps = [(batch, matches(*(value for value, _ in batch if value % 2 == 0))) for batch in batches[before // 5 :]]
    return Golden(
        folder=folder, operator=f"join{written}", source=_PAIRS, before=batches[: before // 5], query=joined, steps=steps,
        mode="append", **others,
    )  # fmt: skip


def of_spark_4(folder: str, written: str = "", **others: Any) -> list[Golden]:
    """Return the checkpoints of Spark 4.0's suites of its reader of state."""
    overlapping = [pairs(*range(first, first + 3)) for first in range(1, 5)]
    apart = [pairs(*range(first, first + 3)) for first in range(1, 11, 3)]
    cases = [
        Golden(
            folder=f"{folder}/dedup", operator=f"`dropDuplicates`{written}", source=_PAIRS, before=overlapping,
            query=distinct("_1"), steps=[(pairs(5, 6, 7), pairs(7)), (pairs(7, 8), pairs(8))], mode="append", **others,
        ),
        Golden(
            folder=f"{folder}/limit", operator=f"`limit`{written}", source=_PAIRS, before=apart, query=limited,
            steps=[(pairs(13, 14), [])], mode="append", **others,
        ),
        *(joins(f"{folder}/join{number}", 15, written, **others) for number in (1, 2)),
    ]  # fmt: skip
    if not others:
        cases.append(
            Golden(
                folder=f"{folder}/agg", operator="aggregation", source=_PAIRS, before=overlapping, query=counted("_1"),
                steps=[(pairs(5, 6, 7), [(5, 3), (6, 2), (7, 1)]), (pairs(7), [(7, 2)])], **others,
            )
        )  # fmt: skip
    return cases


def by_function(folder: str, *timed_out: tuple[str, str, str]) -> Golden:
    """Return a checkpoint of a function whose timeouts were set by a clock that began at 0."""
    return Golden(
        folder=folder,
        operator="function with state",
        source=_TRIPLES,
        before=[[("a", "a", 1)]],
        query=counted_by_function,
        # Else batches without data never end: each looks for groups that timed out.
        conf={"spark.sql.streaming.noDataMicroBatches.enabled": "false"},
        steps=[
            ([("a", "b", 1)], [*timed_out, ("a", "b", "1")]),
            ([("a", "b", 2), ("c", "d", 3)], [("a", "b", "2"), ("c", "d", "1")]),
        ],
    )


GOLDEN = [
    Golden(
        folder="2.1.0", operator="aggregation", source=_VALUE, before=[ints(1, 2, 3, 4), ints(3, 4, 5, 6), ints(5, 6, 7, 8)],
        query=counted_in_complete, mode="complete", conf={"spark.sql.shuffle.partitions": "10"},
        steps=[
            (ints(9), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 1), (8, 1), (9, 1)]),
            (ints(8, 9), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2), (7, 1), (8, 2), (9, 2)]),
        ],
        outcomes=(AFTER_A_BATCH, AFTER_A_BATCH),
    ),
    Golden(
        folder="2.3.1-flatMapGroupsWithState-state-format-1", operator="function with state",
        source="_1 STRING, _2 INT NOT NULL", before=[[("a", 11), ("a", 13), ("a", 15)], [("a", 4)]],
        query=latest_by_function, steps=[([("a", 10)], [("a", 15)]), ([("b", 31)], [("a", -1), ("b", 31)])],
        outcomes=(OF_FORMAT_1, OF_FORMAT_1),
    ),
    Golden(
        folder="2.3.1-for-multi-watermark-policy", operator="none", source=_VALUE, before=[], query=counted("value"),
        steps=[], outcomes=(STATELESS, STATELESS),
    ),
    Golden(
        folder="2.3.1-streaming-aggregate-state-format-1", operator="aggregation", source=_VALUE,
        before=[ints(3), ints(3, 2)], query=counted("value"),
        steps=[(ints(3, 2, 1), [(1, 1), (2, 2), (3, 3)]), (ints(4, 4, 4, 4), [(4, 4)]), (ints(1, 3), [(1, 2), (3, 4)])],
        outcomes=(AFTER_A_BATCH, AFTER_A_BATCH),
    ),
    Golden(
        folder="2.3.1-without-commit-log-metadata", operator="windows", source=_VALUE, before=[ints(15), ints(10, 12, 14)],
        query=windows, mode="append",
        steps=[(ints(25), [(10, 3)]), (ints(50), [(15, 1), (25, 1)]), (ints(50), []), (ints(70), [(50, 2)])],
        outcomes=(AFTER_A_BATCH, AFTER_A_BATCH),
    ),
    joins("2.4.0-streaming-join", 5, outcomes=(AFTER_A_BATCH, BY_SPARK)),
    Golden(
        folder="2.4.5-for-compatibility-test-common-functions", operator="aggregation", source=_VALUE,
        before=[ints(*range(10))], query=aggregated(_COMMON, _SELECTED), mode="complete",
        steps=[
            (ints(*range(10, 20)), [commonly_aggregated(k) for k in range(5)]),
            (
                ints(20),
                [
                    (0, 10.0, 10.0, 10.0, 10.0, 5, 0, 0, 20, 20, 0, 20, 50, 50.0, 50.0, [0, 5, 10, 15, 20], [0, 1, 2]),
                    *map(commonly_aggregated, range(1, 5)),
                ],
            ),
        ],
        outcomes=(AFTER_A_BATCH, AFTER_A_BATCH),
    ),
    Golden(
        folder="2.4.5-for-compatibility-test-statistical-functions", operator="aggregation", source="value BIGINT NOT NULL",
        before=[ints(*range(10))], query=aggregated(_STATISTICS, ["*"]), mode="complete",
        steps=[
            (
                ints(*range(10, 20)),
                [
                    (k, -1.36, 0.0, 3, 4, 4, 4, 4, 5.5901699437494745, 6.454972243679028, 31.25, 41.666666666666664,
                     *((1.25, 1.6666666666666667, 0.31622776601683794) if k in (1, 4)
                       else (-0.625, -0.8333333333333334, -0.13483997249264842)))
                    for k in range(5)
                ],
            ),
        ],
        outcomes=(AFTER_A_BATCH, AFTER_A_BATCH),
    ),
    Golden(
        folder="2.4.5-for-compatibility-test-deduplicate", operator="`dropDuplicates`", source="value BIGINT NOT NULL",
        before=[ints(*range(5))], query=distinct_of_all_columns, mode="append",
        steps=[
            (ints(3, 4, 5, 6), [(15, 5, "5", 105, 10), (16, 6, "6", 106, 11)]),
            (ints(0, 6, 7), [(17, 7, "7", 107, 12)]),
        ],
        outcomes=(AFTER_A_BATCH, AFTER_A_BATCH),
    ),
    Golden(
        folder="2.4.5-for-compatibility-test-sum-decimal", operator="sum of a decimal", source=_VALUE,
        before=[ints(*range(10))], mode="complete",
        query=aggregated(
            ["sum(dec) s", "collect_list(value) v"], ["*"], ["value", "value % 2 id", "cast(value as decimal) dec"]
        ),
        steps=[(ints(*range(10, 20)), [])],
        outcomes=(BY_SPARK, BY_SPARK),
    ),
    Golden(
        folder="3.0.0-streaming-statestore-codec", operator="aggregation", source=_VALUE, before=[ints(1, 2, 3)],
        query=counted("value"), steps=[(ints(1, 2), [(1, 2), (2, 2)]), (ints(3, 4), [(3, 2), (4, 1)])],
        outcomes=(AFTER_A_BATCH, AFTER_A_BATCH),
    ),
    by_function("3.1.0-flatmapgroupswithstate-repartition", ("a", "a", "-1")),
    by_function("3.2.0-flatmapgroupswithstate1-repartition", ("a", "a", "-1"), ("c", "c", "-1")),
    by_function("3.2.0-flatmapgroupswithstate2-repartition", ("a", "a", "-1")),
    Golden(
        folder="3.2.0-deduplication-with-repartition", operator="`dropDuplicates`", source=_VALUE,
        before=[ints(1, 1, 2), ints(3, 4)], conf=_REPARTITIONED, query=distinct_of_repartitioned, mode="append",
        steps=[(ints(2, 3, 4, 5), [(5, 10, 15)]), (ints(1, 5, 6), [(6, 12, 18)])],
    ),
    Golden(
        folder="3.2.0-session-window-with-repartition", operator="sessions", source=_TRIPLES,
        before=[[("hello world spark streaming", "key1", 40), ("world hello structured streaming", "key2", 41)]],
        conf=_REPARTITIONED, query=sessions, mode="append",
        steps=[
            ([("spark streaming", "key1", 25), ("hello", "key2", 45)], []),
            (
                [("spark", "key9", 200)],
                [
                    *((word, "key1", 40, 50, 1) for word in ("hello", "spark", "streaming", "world")),
                    *((word, "key1", 25, 35, 1) for word in ("spark", "streaming")),
                    *((word, "key2", 41, 51, 1) for word in ("streaming", "structured", "world")),
                    ("hello", "key2", 41, 55, 2),
                ],
            ),
        ],
    ),
    Golden(
        folder="3.2.0-streaming-aggregate-with-repartition", operator="aggregation", source=_VALUE,
        before=[ints(3), ints(3, 2)], conf=_REPARTITIONED, query=counted_by_repartitioned_keys,
        steps=[(ints(3, 2, 1), [(1, 2, 1), (2, 4, 2), (3, 6, 3)]), (ints(1, 4), [(1, 2, 2), (4, 8, 1)])],
    ),
    *(
        Golden(
            folder=f"{version}-streaming-deduplication", operator="`dropDuplicates`",
            source="_1 STRING, _2 INT NOT NULL, _3 STRING", before=[[("a", 1, "-")], [("a", 2, "-"), ("b", 3, "-")]],
            query=distinct("_1"), mode="append",
            steps=[([("a", 5, "a"), ("b", 2, "b"), ("c", 9, "c")], [("c", 9, "c")]), ([("c", 1, "c")], [])],
        )
        for version in ("3.3.0", "3.5.1")
    ),
    joins("3.5.1-streaming-join", 5),
    Golden(
        folder="3.5.4", operator="none", source=_VALUE, before=[], query=counted("value"), steps=[],
        outcomes=(STATELESS, STATELESS),
    ),
    *of_spark_4("4.0.0/hdfs"),
    *of_spark_4("4.0.0/rocksdb"),
    *of_spark_4(
        "4.0.0-checkpoint-v2/rocksdb", ", checkpoint format 2", outcomes=(WITH_SPARK_4, IMPORTED),
        conf={"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"},
    ),
    *(
        Golden(
            folder=f"4.0.0-tws-{encoding}", operator="`transformWithState`", source="value STRING",
            before=[[("a",)], [("a",), ("b",)]], query=counted_by_processor,
            steps=[([("a",), ("c",)], [("a", "3"), ("c", "1")]), ([("b",)], [("b", "2")])],
            outcomes=(WITH_SPARK_4, OF_DEVELOPMENT),
        )
        for encoding in ("avro", "unsaferow")
    ),
    Golden(
        folder="4.0.1-dedup-spark-53942", operator="`dropDuplicates`", source=_VALUE, before=[ints(1, 1, 2, 3, 4)],
        query=distinct_of_repartitioned, mode="append", steps=[(ints(4, 5), [(5, 10, 15)])],
    ),
]  # fmt: skip

"""transformWithState in streaming queries, in both forms: cases of Spark 4's own tests, restarts, other variables, refusals.

On Spark 4, processors extend PySpark's own class, and the cases also run on Spark's own operator, which must give the same rows.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from spark_jobs.fleet import Fleet
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.processor import StatefulProcessor as FleetProcessor
from tests.integration.case_systems import Counts, Inputs, System, check_case, configured, on_spark
from tests.integration.operator_cases import RESTART, Case, Operators, Step, Totals
from tests.integration.streams import Feed, Run, short_list

ROWS = pa.schema([("id", pa.string()), ("v", pa.int32())])
OUTPUT = "id string, out string"
#: PySpark's class where it has one, which is of the fleet's, too.
StatefulProcessor: Any = SPARK.PROCESSOR_CLASSES[0] if SPARK.PROCESSOR_CLASSES else FleetProcessor
#: For Spark's own operator.
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

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
            Step({"a": [("a", 10), ("b", 11)]}, [], {"users": Totals(2)}),
            Step({"a": [("a", 12), ("b", 17), ("c", 18)]}, [], {"users": Totals(3)}),
            RESTART,
            # The watermark goes to 23: a (17) and b (22) are over, and the row of d is before it.
            Step(
                {"a": [("c", 25), ("d", 17)]},
                [("a", "2 until 12 at 23"), ("b", "2 until 17 at 23"), ("d", "1 until 17 at 23")],
                {"users": Totals(1)},
            ),
            # Rows up to 23 are late.
            Step({"a": [("d", 23), ("c", 24)]}, [], {"users": Totals(1, None, None, 1)}),
            Step({"a": [("z", 60)]}, [("c", "3 until 25 at 58")], {"users": Totals(1)}),
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


@pytest.mark.parametrize("case_name", short_list(CASES, ["T1 counts"]))
def test_case(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str) -> None:
    case = CASES[case_name]

    def ours(frame: DataFrame, operator: str, mode: str) -> Any:
        return fleet.stateful(frame, name=f"{name}-{operator}", outputMode=mode, shards=2)

    inputs, totals = Inputs(spark, tmp_path / "in", case.inputs), Counts(fleet, name)
    systems = {"the fleet": System(case, inputs, ours, tmp_path / "ck")}
    with configured(
        spark, {"spark.sql.streaming.stateStore.providerClass": ROCKSDB} if SPARK.PROCESSOR_CLASSES else {}
    ):
        if SPARK.PROCESSOR_CLASSES:
            systems["Spark"] = System(case, inputs, on_spark, tmp_path / "spark-ck")
        check_case(case_name, case, inputs, systems, totals)


class ProcessorQuery:
    """The query of a state, restarted for each batch unless a test starts it itself."""

    def __init__(self, spark: SparkSession, fleet: Fleet, folder: Path, name: str) -> None:
        self.feed, self._fleet, self._folder, self._name = Feed(spark, folder / "in", ROWS), fleet, folder, name

    def start(self, processor: StatefulProcessor, *, in_pandas: bool = False, **options: Any) -> Run:
        grouped = self._fleet.stateful(self.feed.stream(), name=self._name, shards=2).groupBy("id")
        call = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        options = {"outputStructType": OUTPUT, "outputMode": "update", "timeMode": "None", **options}
        return Run(call(processor, **options), "update", self._folder / "ck")

    def batch(self, run: Run, *rows: tuple[Any, Any]) -> list[tuple[Any, ...]]:
        self.feed.add(rows)
        return sorted((tuple(row) for row in run.take()), key=repr)

    def batches(self, processor: StatefulProcessor, *batches: Any, **options: Any) -> list[list[tuple[Any, ...]]]:
        run = self.start(processor, **options)
        try:
            return [self.batch(run, *rows) for rows in batches]
        finally:
            run.stop()


@pytest.fixture
def query(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> ProcessorQuery:
    return ProcessorQuery(spark, fleet, tmp_path, name)


@pytest.mark.replay
@pytest.mark.parametrize("in_pandas", [False, True])
def test_t2_the_initial_state_is_taken_in_once(spark: SparkSession, query: ProcessorQuery, in_pandas: bool) -> None:
    def summing() -> StatefulProcessor:
        class Sum(StatefulProcessor):
            def init(self, handle: Any) -> None:
                self.sum = handle.getValueState("sum", "n int")

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                new = sum(int(batch["v"].sum()) for batch in rows) if in_pandas else sum(row.v for row in rows)
                self.sum.update(((self.sum.get() or (0,))[0] + new,))
                total = str(self.sum.get()[0])
                yield pd.DataFrame({"id": key, "out": total}) if in_pandas else Row(id=key[0], out=total)

            def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
                value = int(initialState.at[0, "initVal"]) if in_pandas else initialState.initVal
                self.sum.update((value + (self.sum.get() or (0,))[0],))

        return Sum()

    def options() -> dict[str, Any]:
        initial = spark.createDataFrame([(789, "0"), (987, "3")], "initVal int, id string").groupBy("id")
        return {"in_pandas": in_pandas, "initialState": initial}

    first = [("0", 123), ("0", 46), ("1", 146), ("1", 346)]
    assert query.batches(summing(), first, **options()) == [[("0", "958"), ("1", "492")]]
    assert query.batches(summing(), [("0", 67), ("3", 12)], [("4", 1)], **options()) == [
        [("0", "1025"), ("3", "999")],
        [("4", "1")],
    ]
    # By now it is not read any more.
    assert query.batches(summing(), [("3", 1)], **options()) == [[("3", "1000")]]


@pytest.mark.replay
@pytest.mark.parametrize("in_pandas", [False, True])
def test_t4_timers_of_processing_time_fire_without_new_rows(query: ProcessorQuery, in_pandas: bool) -> None:
    """Spark runs a batch for them; those that a run left fire in the first batch of the next one."""
    options = {"in_pandas": in_pandas, "timeMode": "ProcessingTime"}
    first = [("0", 123), ("1", 6)]
    second = [("0", 123), ("0", 46), ("1", 146), ("1", 346)]
    third = [("0", 123), ("0", 223), ("0", 323), ("1", 246), ("1", 6)]
    expected_batches = [[("0", "-1"), ("0", str(n)), ("1", str(m))] for n, m in ((1, 1), (2, 3), (3, 5))]
    run = query.start(counter(in_pandas, timers=True), **options)
    try:
        for rows, expected in zip((first, second, third), expected_batches, strict=True):
            out, deadline = query.batch(run, *rows), time.monotonic() + 120
            while ("0", "-1") not in out and time.monotonic() < deadline:
                time.sleep(0.05)
                out = sorted([*out, *(tuple(row) for row in run.take())], key=repr)
            assert out == expected
    finally:
        run.stop()


@pytest.mark.replay
def test_t7_what_is_not_refreshed_in_time_expires(query: ProcessorQuery) -> None:
    ttl = 5000

    def expiring() -> StatefulProcessor:
        class Expiring(StatefulProcessor):
            def init(self, handle: Any) -> None:
                self.plain = handle.getValueState("state", "n int")
                self.value = handle.getValueState("ttl-state", "n int", ttl)
                self.list = handle.getListState("ttl-list-state", "n int", ttl)
                self.map = handle.getMapState("ttl-map-state", "id string", "n int", ttl)

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                n = len(list(rows))
                plain, value = (n + (variable.get() or (0,))[0] for variable in (self.plain, self.value))
                elements = n + sum(element for (element,) in self.list.get())
                entry = n + (self.map.getValue(key) or (0,))[0]
                self.plain.update((plain,))
                if not (value == 2 and key == ("0",)):
                    self.value.update((value,))
                    self.list.put([(elements,), (elements,)])
                    self.map.updateValue(key, (entry,))
                yield (key[0], f"{timerValues.getCurrentProcessingTimeInMs()} {value} {elements} {entry} {plain}")

        return Expiring()

    by_key = dict.fromkeys("01", ((0, 0, 0), 0, 0))

    def expected(now_ms: int) -> list[tuple[str, str]]:
        """Return what Spark's rule makes of each key at a batch's time, no matter when that is: machines may be slow."""
        emitted = []
        for key, (previous, until_ms, plain) in by_key.items():
            value, elements, entry = previous if until_ms > now_ms else (0, 0, 0)
            new = value + 1, elements + 1, entry + 1
            emitted.append((key, f"{now_ms} {new[0]} {new[1]} {new[2]} {plain + 1}"))
            kept = new[0] == 2 and key == "0"
            written = (new[0], 2 * new[1], new[2]), now_ms + ttl
            by_key[key] = (*((previous, until_ms) if kept else written), plain + 1)
        return emitted

    run, times = query.start(expiring(), timeMode="ProcessingTime"), []
    try:
        for number in range(3):
            if number == 2:
                run.stop()
                run = query.start(expiring(), timeMode="ProcessingTime")
                time.sleep(max(0.0, (times[0] + ttl) / 1000 - time.time()))
            out = query.batch(run, ("0", 1), ("1", 1))
            times.append(int(out[0][1].split()[0]))
            assert out == expected(times[-1])
    finally:
        run.stop()
    assert times[2] >= times[0] + ttl
    assert by_key["0"][2] == 3


def variables(*declared: tuple[str, str], lists: Sequence[str] = (), delete: Sequence[str] = ()) -> StatefulProcessor:
    """Return a processor that emits the values of its variables, and sets each (its first column) to one more, or appends to it."""

    class Variables(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.states = {name: handle.getValueState(name, schema) for name, schema in declared}
            self.lists = {name: handle.getListState(name, "n int") for name in lists}
            for name in delete:
                handle.deleteIfExists(name)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for name, state in self.states.items():
                value = state.get()
                yield (name, str(None if value is None else tuple(value)))
                state.update((1 + (value[0] if value and value[0] else 0), *(value or ())[1:]))
            for name, state in self.lists.items():
                yield (name, str(len(list(state.get()))))
                state.appendValue((5,))

    return Variables()


@pytest.mark.replay
def test_a_maps_keys_come_in_the_order_in_which_they_were_put(query: ProcessorQuery) -> None:
    """Announced: Spark 4 has them by their encoded form."""

    class Pages(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.pages = handle.getMapState("pages", "page int", "n int")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for row in rows:
                self.pages.updateValue((row.v,), (1,))
            yield key[0], str([page for (page,), _ in self.pages.iterator()])

    batches = query.batches(Pages(), [("a", 7), ("a", -2)], [("a", 3), ("a", 7)])
    assert batches == [[("a", "[7, -2]")], [("a", "[7, -2, 3]")]]


def test_a_processor_below_a_watermark_is_run_once_more_when_it_has_moved(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    """As Spark 4 runs one without timers, too: its batches have the same numbers."""
    inputs = Inputs(spark, tmp_path / "in", {"a": "k string, t timestamp"})
    marked = inputs.streams()["a"].withWatermark("t", "0 seconds")
    operators = {"users": fleet.stateful(marked, name=name, outputMode="update", shards=2)}
    frame = transform(lambda _, operator, __: operators[operator], marked, counter(False), in_pandas=False)
    run = Run(frame, "update", tmp_path / "ck")
    try:
        for rows, expected in (
            ([("a", 10)], {0: [("a", "1")], 1: []}),
            ([("a", 9)], {2: [("a", "2")]}),
            ([("a", 20)], {3: [("a", "3")], 4: []}),
        ):
            inputs.add({"a": rows})
            assert run.take_batches() == expected
    finally:
        run.stop()


def test_variables_come_go_and_are_deleted(query: ProcessorQuery) -> None:
    row = [("a", 1)]
    a, b, a_wide = ("a", "n int"), ("b", "n int"), ("a", "n bigint")
    assert query.batches(variables(a, b, lists="l"), row, row)[1] == [("a", "(1,)"), ("b", "(1,)"), ("l", "1")]
    # Wider, with another column; the other variable is away for a while.
    assert query.batches(variables(("a", "n bigint, more string")), row) == [[("a", "(2, None)")]]
    assert query.batches(variables(a_wide, b), row) == [[("a", "(3,)"), ("b", "(2,)")]]
    assert query.batches(variables(a_wide, delete=("b", "l", "x")), row, row) == [
        [("a", "(4,)")],
        [("a", "(5,)")],
    ]
    assert query.batches(variables(a_wide, b, lists="l"), row) == [[("a", "(6,)"), ("b", "None"), ("l", "0")]]
    with pytest.raises(StateMismatchError, match=r"cannot become int32.*existing=.*int64.*asked=.*int32"):
        query.start(variables(a, b))
    with pytest.raises(StateMismatchError, match="options differ"):
        query.start(variables(a_wide, b), timeMode="ProcessingTime")
    with pytest.raises(StateMismatchError, match=r"keys differ.*existing=`k0 string`.*asked=`k0 int32`"):
        query._fleet.stateful(query.feed.stream(), name=query._name).groupBy("v").transformWithState(
            variables(a_wide, b), OUTPUT, "update", "None"
        )
    assert query.batches(variables(a_wide, b), row) == [[("a", "(7,)"), ("b", "(1,)")]]


def test_a_task_that_fails_and_is_repeated_counts_once(query: ProcessorQuery, tmp_path: Path) -> None:
    flag = tmp_path / "failed"

    def failing() -> StatefulProcessor:
        class Failing(type(counter(False))):  # type: ignore[misc]
            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                yield from super().handleInputRows(key, rows, timerValues)
                if key == ("b",) and not flag.exists():
                    flag.touch()
                    raise ValueError("once")

        return Failing()

    rows = [(key, 1) for key in "abcdef"]
    assert query.batches(failing(), rows, rows) == [[(key, str(n)) for key in "abcdef"] for n in (1, 2)]
    assert flag.exists()


def test_what_cannot_be_is_refused_when_the_query_is_built(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    stream = Feed(spark, tmp_path / "in", ROWS).stream()
    timed = stream.withColumn("t", F.timestamp_seconds("v"))
    initial = spark.createDataFrame([(1, "0")], "v int, id string")

    def build(
        processor: Any, frame: DataFrame = stream, output: str = OUTPUT, mode: str = "update", *more: Any
    ) -> None:
        grouped = fleet.stateful(frame, name=name).groupBy("id")
        grouped.transformWithState(processor, output, mode, *(more or ("None",)))

    class Unpicklable(type(counter(False))):  # type: ignore[misc]
        def __init__(self) -> None:
            self.session = spark

    plain = counter(False)
    for message, arguments in {
        "extends statefleet.StatefulProcessor": (lambda: None,),
        "cannot be pickled": (Unpicklable(),),
        "append or update": (plain, stream, OUTPUT, "complete"),
        "one of None, ProcessingTime, EventTime": (plain, stream, OUTPUT, "update", "sometimes"),
        "have this name|schema of x": (variables(("x", "int")),),
        "event-time timeouts need a watermark": (plain, stream, OUTPUT, "update", "EventTime"),
        "a batch DataFrame grouped": (plain, stream, OUTPUT, "update", "None", initial),
        "columns of other types": (plain, stream, OUTPUT, "update", "None", initial.groupBy("v")),
        "timestamp column of outputStructType": (plain, stream, OUTPUT, "append", "None", None, "out"),
        "needs a watermark": (plain, timed, "id string, at timestamp", "append", "None", None, "at"),
        "outputMode Append": (
            plain,
            timed.withWatermark("t", "1 second"),
            "id string, at timestamp",
            "update",
            "None",
            None,
            "at",
        ),
    }.items():
        with pytest.raises(InvalidRequestError, match=message):
            build(*arguments)


@pytest.mark.replay
def test_rows_that_would_be_late_for_the_next_operator_stop_the_query(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    class Old(StatefulProcessor):
        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield (key[0], dt.datetime(1970, 1, 2))

    feed = Feed(spark, tmp_path / "in", ROWS)
    marked = feed.stream().withColumn("t", F.timestamp_seconds(F.col("v") + 1_000_000)).withWatermark("t", "0 seconds")
    old = fleet.stateful(marked, name=name, outputMode="append", shards=2).groupBy("id")
    frame = old.transformWithState(Old(), "id string, at timestamp", "append", "None", eventTimeColumnName="at")
    run = Run(frame, "append", tmp_path / "ck")
    try:
        feed.add([("a", 1)])
        assert len(run.take()) == 1
        feed.add([("a", 2)])
        with pytest.raises(Exception, match="not after the watermark"):
            run.take()
    finally:
        run.stop()

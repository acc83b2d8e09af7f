"""transformWithState in streaming queries, in both forms: cases of Spark 4's own tests, restarts, other variables, refusals.

On Spark 4, processors extend PySpark's own class, and the cases also run on Spark's own operator, which must give the same rows.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.case_systems import ROCKSDB, Inputs, compare_case, configured
from tests.integration.processor_cases import CASES, OUTPUT, ROWS, StatefulProcessor, counter, transform
from tests.integration.streams import Feed, Run, short_list


@pytest.mark.parametrize("case_name", short_list(CASES, ["T1 counts", "initial state"]))
def test_case(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str) -> None:
    is_sparks = bool(SPARK.PROCESSOR_CLASSES)
    conf = ROCKSDB if is_sparks else {}
    compare_case(spark, fleet, tmp_path, name, case_name, CASES[case_name], with_spark=is_sparks, conf=conf)


class ProcessorQuery:
    """The query of a state, restarted for each batch unless a test starts it itself."""

    def __init__(self, spark: SparkSession, fleet: Fleet, folder: Path, name: str) -> None:
        self.feed, self._fleet, self._folder, self._name = Feed(folder / "in", ROWS), fleet, folder, name

    def start(self, processor: StatefulProcessor, *, in_pandas: bool = False, **options: Any) -> Run:
        grouped = self._fleet.stateful(self.feed.stream(), name=self._name, shards=2).groupBy("id")
        call = grouped.transformWithStateInPandas if in_pandas else grouped.transformWithState
        options = {"outputStructType": OUTPUT, "outputMode": "update", "timeMode": "None", **options}
        return Run(call(processor, **options), "update", self._folder / "ck")

    def batch(self, run: Run, *rows: tuple[Any, Any]) -> list[tuple[Any, ...]]:
        self.feed.add(rows)
        return sorted((tuple(row) for row in run.take()), key=repr)

    def batches(self, processor: StatefulProcessor, *batches: Any, **options: Any) -> list[list[tuple[Any, ...]]]:
        with self.start(processor, **options) as run:
            return [self.batch(run, *rows) for rows in batches]


@pytest.fixture
def query(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> ProcessorQuery:
    return ProcessorQuery(spark, fleet, tmp_path, name)


@pytest.mark.replay
@pytest.mark.parametrize("in_pandas", [False, True])
def test_t4_timers_of_processing_time_fire_without_new_rows(query: ProcessorQuery, in_pandas: bool) -> None:
    """Spark runs a batch for them; those that a run left fire in the first batch of the next one."""
    options = {"in_pandas": in_pandas, "timeMode": "ProcessingTime"}
    first = [("0", 123), ("1", 6)]
    second = [("0", 123), ("0", 46), ("1", 146), ("1", 346)]
    third = [("0", 123), ("0", 223), ("0", 323), ("1", 246), ("1", 6)]
    expected_batches = [[("0", "-1"), ("0", str(n)), ("1", str(m))] for n, m in ((1, 1), (2, 3), (3, 5))]
    with query.start(counter(in_pandas, timers=True), **options) as run:
        for rows, expected in zip((first, second, third), expected_batches, strict=True):
            out, deadline = query.batch(run, *rows), time.monotonic() + 120
            while ("0", "-1") not in out and time.monotonic() < deadline:
                time.sleep(0.05)
                out = sorted([*out, *(tuple(row) for row in run.take())], key=repr)
            assert out == expected


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
    with Run(frame, "update", tmp_path / "ck") as run:
        for rows, expected in (
            ([("a", 10)], {0: [("a", "1")], 1: []}),
            ([("a", 9)], {2: [("a", "2")]}),
            ([("a", 20)], {3: [("a", "3")], 4: []}),
        ):
            inputs.add({"a": rows})
            assert run.take_batches() == expected


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


def test_a_type_that_does_not_fit_is_refused_by_start_where_the_batch_before_had_another(query: ProcessorQuery) -> None:
    """When it is built, the state's last batch may be one to repeat, and then the types before it would count."""

    def with_type(kind: str) -> StatefulProcessor:
        class Typed(StatefulProcessor):
            def init(self, handle: Any) -> None:
                self.state = handle.getValueState("state", f"n {kind}")

            def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
                self.state.update((1,))
                yield Row(id=key[0], out=kind)

        return Typed()

    assert query.batches(with_type("int"), [("a", 1)]) == [[("a", "int")]]
    assert query.batches(with_type("bigint"), [("a", 1)]) == [[("a", "bigint")]]
    with pytest.raises(AnalysisException, match="n cannot become int32, it is int64"):
        query.start(with_type("int"))
    assert query.batches(with_type("bigint"), [("a", 1)]) == [[("a", "bigint")]]


def test_what_cannot_be_is_refused_when_the_query_is_built(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    stream = Feed(tmp_path / "in", ROWS).stream()
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


@pytest.mark.parametrize(("own", "mode"), [("update", "append"), ("append", "update")])
def test_a_processors_own_mode_does_not_bind_its_query_as_in_spark_4(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, own: str, mode: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([("a", 1), ("a", 2), ("b", 3)])
    frames = {"fleet": fleet.stateful(feed.stream(), name=name, shards=2)}
    if SPARK.PROCESSOR_CLASSES:
        frames["spark"] = feed.stream()
    for which, frame in frames.items():
        counts = frame.groupBy("id").transformWithState(counter(False), OUTPUT, own, "None")
        # Files take rows that stand only, as a query in append mode promises them.
        sink = "parquet" if mode == "append" else "memory"
        writer = counts.writeStream.outputMode(mode).format(sink).queryName(f"{which}_{mode}")
        writer = writer.option("path", str(tmp_path / which)) if mode == "append" else writer
        with configured(spark, ROCKSDB if which == "spark" else {}):
            query = writer.option("checkpointLocation", str(tmp_path / f"{which}-ck")).start()
            query.processAllAvailable()
            query.stop()
        rows = spark.read.parquet(str(tmp_path / which)) if mode == "append" else spark.table(f"{which}_{mode}")
        assert sorted(map(tuple, rows.collect())) == [("a", "2"), ("b", "1")]


@pytest.mark.replay
def test_rows_that_would_be_late_for_the_next_operator_stop_the_query(fleet: Fleet, tmp_path: Path, name: str) -> None:
    class Old(StatefulProcessor):
        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            yield (key[0], dt.datetime(1970, 1, 2))

    feed = Feed(tmp_path / "in", ROWS)
    marked = feed.stream().withColumn("t", F.timestamp_seconds(F.col("v") + 1_000_000)).withWatermark("t", "0 seconds")
    old = fleet.stateful(marked, name=name, outputMode="append", shards=2).groupBy("id")
    frame = old.transformWithState(Old(), "id string, at timestamp", "append", "None", eventTimeColumnName="at")
    with Run(frame, "append", tmp_path / "ck") as run:
        feed.add([("a", 1)])
        assert len(run.take()) == 1
        feed.add([("a", 2)])
        with pytest.raises(Exception, match="not after the watermark"):
            run.take()

"""What a program catches of PySpark's it also catches here: each call is made wrongly in PySpark, and in the same way in the fleet.

The table of docs/operators.md names the classes. Queries that Spark refuses once they are built are in `test_refusals.py`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import (
    AnalysisException,
    IllegalArgumentException,
    ParseException,
    PySparkException,
    PySparkRuntimeError,
    PySparkTypeError,
    StreamingQueryException,
)
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.integration.case_systems import ROCKSDB, configured
from tests.integration.processor_cases import StatefulProcessor, counter
from tests.integration.spark_checks import check_as_spark_does
from tests.integration.streams import Feed, Run, Streams, stopping

pytestmark = pytest.mark.filterwarnings("ignore::spark_jobs.plan.operator_rules.UnboundedStateWarning")
IS_SPARK_4 = bool(SPARK.PROCESSOR_CLASSES)
#: Makes a DataFrame one of the fleet; or leaves it Spark's.
Operators = Callable[[DataFrame], Any]


def in_pandas(grouped: Any, *, function: Any = lambda *_: (), **changed: Any) -> Any:
    arguments = {
        "outputStructType": "k string",
        "stateStructType": "n long",
        "outputMode": "append",
        "timeoutConf": GroupStateTimeout.NoTimeout,
        **changed,
    }
    return grouped.applyInPandasWithState(function, **arguments)


def transformed(grouped: Any, *, processor: Any = None, **changed: Any) -> Any:
    arguments = {"outputStructType": "id string, out string", "outputMode": "append", "timeMode": "None", **changed}
    return grouped.transformWithStateInPandas(processor or counter(in_pandas=True), **arguments)


def unpicklable(spark: SparkSession) -> StatefulProcessor:
    processor = counter(in_pandas=True)
    processor.session = spark.sparkContext
    return processor


#: By the class that PySpark documents: calls on a DataFrame or a frame of the fleet. ``!mode`` at the end is the query's output mode.
WRONG: dict[type[Exception], dict[str, Callable[[Operators, Streams], Any]]] = {
    AnalysisException: {
        "group by no column": lambda op, i: op(i["a"]).groupBy("nope").count(),
        "aggregate no column": lambda op, i: op(i["a"]).groupBy("k").agg(F.sum("nope")),
        "no such function": lambda op, i: op(i["a"]).groupBy("k").agg({"x": "nope"}),
        "no aggregate": lambda op, i: op(i["a"]).groupBy("k").agg(F.col("x")),
        "pivot": lambda op, i: op(i["a"]).groupBy("k").pivot("x", [1]).count(),
        "watermark of no column": lambda op, i: op(i["a"]).withWatermark("nope", "1 second").distinct(),
        "join on no column": lambda op, i: op(i["at"]).join(i["bt"], "nope"),
        "sort": lambda op, i: op(i["a"]).orderBy("k"),
        "describe": lambda op, i: op(i["a"]).describe(),
        "intersect": lambda op, i: op(i["a"]).intersect(i["a"]),
        "timeouts without a watermark": lambda op, i: in_pandas(
            op(i["a"]).groupBy("k"), timeoutConf=GroupStateTimeout.EventTimeTimeout
        ),
    },
    ParseException: {
        "type of a function's output": lambda op, i: in_pandas(op(i["a"]).groupBy("k"), outputStructType="k nope"),
        "type of a function's state": lambda op, i: in_pandas(op(i["a"]).groupBy("k"), stateStructType="n nope"),
    },
    IllegalArgumentException: {
        "mode of a function": lambda op, i: in_pandas(op(i["a"]).groupBy("k"), outputMode="nope"),
        "complete mode of a function": lambda op, i: in_pandas(op(i["a"]).groupBy("k"), outputMode="complete"),
    },
    PySparkTypeError: {
        "group by a number": lambda op, i: op(i["a"]).groupBy(1.5).count(),
        "no delay": lambda op, i: op(i["a"]).withWatermark("t", None).distinct(),
        "output that is no struct": lambda op, i: in_pandas(op(i["a"]).groupBy("k"), outputStructType="int"),
        "output that is no type": lambda op, i: in_pandas(op(i["a"]).groupBy("k"), outputStructType=5),
    },
    # PySpark 4 raises a PySparkAttributeError.
    AttributeError: {"no such method": lambda op, i: op(i["a"]).nope},
    TypeError: {"no function": lambda op, i: in_pandas(op(i["a"]).groupBy("k"), function=5)},
}
WRONG_PROCESSORS: dict[type[Exception], dict[str, Callable[[Operators, Streams], Any]]] = {
    AnalysisException: {
        "event time without a watermark": lambda op, i: transformed(
            op(i["a"]).groupBy("k"), outputStructType="t timestamp", timeMode="EventTime", eventTimeColumnName="t"
        ),
        "processors of all !complete": lambda op, i: transformed(op(i["a"]).groupBy("k")),
    },
    ParseException: {
        "type of a processor's output": lambda op, i: transformed(op(i["a"]).groupBy("k"), outputStructType="k nope")
    },
    IllegalArgumentException: {
        "mode of a processor": lambda op, i: transformed(op(i["a"]).groupBy("k"), outputMode="nope"),
        "time mode": lambda op, i: transformed(op(i["a"]).groupBy("k"), timeMode="nope"),
    },
    PySparkTypeError: {
        "no output of a processor": lambda op, i: transformed(op(i["a"]).groupBy("k"), outputStructType=None)
    },
    PicklingError: {
        "processor with a session": lambda op, i: transformed(
            op(i["a"]).groupBy("k"), processor=unpicklable(i["a"].sparkSession)
        )
    },
}


#: Calls that PySpark refuses at once, and the fleet in the same words.
IN_SPARKS_WORDS: dict[type[Exception], dict[str, Callable[[Operators, Streams], Any]]] = {
    PySparkTypeError: {
        "duplicates of the letters of a string": lambda op, i: op(i["a"]).dropDuplicates("kx"),
        "duplicates within the watermark of a string": lambda op, i: (
            op(i["a"]).withWatermark("t", "1 second").dropDuplicatesWithinWatermark("k")
        ),
        "columns by a float": lambda op, i: op(i["a"])[1.5],
        **({} if IS_SPARK_4 else {"groups of a tuple": lambda op, i: op(i["a"]).groupBy(("k", "x"))}),
    },
    AnalysisException: {
        "duplicates of an unknown column": lambda op, i: op(i["a"]).dropDuplicates(["nope"]),
        "the sum of strings": lambda op, i: op(i["a"]).groupBy("x").sum("k"),
        "the largest of strings": lambda op, i: op(i["a"]).groupBy("x").max("k"),
        "the average of times": lambda op, i: op(i["a"]).groupBy("x").avg("t"),
        "the sum of an unknown column": lambda op, i: op(i["a"]).groupBy("x").sum("nope"),
        "a negative limit": lambda op, i: op(i["a"]).limit(-1),
        "an unknown column": lambda op, i: op(i["a"]).select("nope"),
        **{
            f"{action} of a stream": lambda op, i, action=action: getattr(op(i["a"]), action)()  # type: ignore[misc]
            for action in ("count", "show", "collect", "toPandas", "cache", "isEmpty")
        },
    },
}


def labels(wrong: dict[type[Exception], dict[str, Any]]) -> set[str]:
    return {label for calls in wrong.values() for label in calls}


def listed(wrong: dict[type[Exception], dict[str, Any]]) -> list[Any]:
    return [pytest.param(kind, call, label, id=label) for kind, calls in wrong.items() for label, call in calls.items()]


@pytest.mark.parametrize(
    ("kind", "call", "label"), [*listed(WRONG), *listed(WRONG_PROCESSORS), *listed(IN_SPARKS_WORDS)]
)
def test_a_query_that_pyspark_refuses_is_refused_by_an_error_of_the_same_class(
    spark: SparkSession, fleet: Fleet, streams: Streams, name: str, kind: type[Exception], call: Any, label: str
) -> None:
    mode = label.partition("!")[2] or "append"

    def attempt(operators: Operators) -> None:
        result = call(operators, streams)
        # What is refused in Spark's words is refused by the call itself.
        if isinstance(result, DataFrame) and label not in labels(IN_SPARKS_WORDS):
            check_as_spark_does(spark, result, mode)

    if IS_SPARK_4 or label not in labels(WRONG_PROCESSORS):
        with pytest.raises(kind) as theirs:
            attempt(lambda frame: frame)
        # PySpark's public class, which this error's own class extends.
        kind = next(
            base for base in type(theirs.value).__mro__ if base.__module__ != "pyspark.errors.exceptions.captured"
        )
    with pytest.raises(kind) as ours:
        attempt(lambda frame: fleet.stateful(frame, name=name, outputMode=mode if "!" in label else None))
    if label in labels(IN_SPARKS_WORDS):
        # Numbers of columns differ from one analysis to the next.
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


#: Calls of a processor on variables that it deleted, which PySpark refuses by a PySparkRuntimeError.
ON_DELETED: dict[str, Callable[[Any], Any]] = {
    "exists of a value": lambda p: p.value.exists(),
    "get of a value": lambda p: p.value.get(),
    "update of a value": lambda p: p.value.update((1,)),
    "clear of a value": lambda p: p.value.clear(),
    "exists of a list": lambda p: p.list.exists(),
    "put of a list": lambda p: p.list.put([(1,)]),
    "append to a list": lambda p: p.list.appendValue((1,)),
    "exists of a map": lambda p: p.map.exists(),
    "value of a map": lambda p: p.map.getValue(("a",)),
    "update of a map": lambda p: p.map.updateValue(("a",), (1,)),
}
#: Wrong calls after which PySpark's worker loses its connection, so a program cannot catch them there.
WRONG_CALLS: dict[str, Callable[[Any], Any]] = {
    "value state after init": lambda p: p.handle.getValueState("late", "n int"),
    "list state after init": lambda p: p.handle.getListState("late", "n int"),
    "map state after init": lambda p: p.handle.getMapState("late", "k string", "n int"),
    "deletion after init": lambda p: p.handle.deleteIfExists("late"),
    "timer without timers": lambda p: p.handle.registerTimer(5),
    "no timer to delete": lambda p: p.handle.deleteTimer(5),
}


def calling(calls: dict[str, Callable[[Any], Any]]) -> StatefulProcessor:
    """Return a processor that deletes its variables, makes each wrong call, and emits what caught the error."""
    caught = PySparkRuntimeError

    class Calling(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.value, self.list = handle.getValueState("v", "n int"), handle.getListState("l", "n int")
            self.map = handle.getMapState("m", "k string", "n int")
            for state in "vlm":
                handle.deleteIfExists(state)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for label, call in calls.items():
                try:
                    call(self)
                    outcome = "no error"
                except caught as error:
                    text = str(error)
                    outcome = text.partition(": ")[0] if label.startswith("exists") else "caught"
                yield Row(id=label, out=outcome)

        def close(self) -> None:
            pass

    return Calling()


@pytest.mark.parametrize(
    "is_fleets", [True, pytest.param(False, marks=pytest.mark.skipif(not IS_SPARK_4, reason="3.5 has none"))]
)
def test_a_processor_catches_what_it_catches_in_pyspark(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, is_fleets: bool
) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("id", pa.string())]))
    feed.add([("a",)])
    frame = fleet.stateful(feed.stream(), name=name, shards=2) if is_fleets else feed.stream()
    calls = {**ON_DELETED, **WRONG_CALLS} if is_fleets else ON_DELETED
    query = frame.groupBy("id").transformWithState(calling(calls), "id string, out string", "update", "None")
    with configured(spark, {} if is_fleets else ROCKSDB), Run(query, "update", tmp_path / "checkpoint") as run:
        outcomes = {row.id: row.out for row in run.take()}
    checking = "Error checking {} state exists"
    expected = dict.fromkeys(calls, "caught")
    expected |= {
        f"exists of a {kind}": checking.format("map" if kind == "map" else "value") for kind in ("value", "list", "map")
    }
    assert outcomes == expected


@pytest.mark.parametrize(
    "build",
    [
        lambda rows, mode: rows.groupBy(F.window("t", "10 seconds"), "t").count(),
        lambda rows, mode: rows.groupBy(F.window("t", "10 seconds"), F.col("t").alias("at")).count(),
        lambda rows, mode: rows.withColumn("at", F.col("t")).dropDuplicates(["k"]),
        lambda rows, mode: rows.withColumn("at", F.col("t")).dropDuplicatesWithinWatermark(["k"]),
        lambda rows, mode: in_pandas(rows.withColumn("at", F.col("t")).groupBy("k"), outputMode=mode),
    ],
)
def test_several_event_times_end_sparks_query_and_are_refused_when_the_fleets_is_built(
    fleet: Fleet, tmp_path: Path, name: str, build: Callable[[Any, str], DataFrame]
) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.string()), ("t", pa.timestamp("us", "UTC"))]))
    feed.add([("a", dt.datetime(2024, 1, 1, tzinfo=dt.UTC))])
    rows = feed.stream().withWatermark("t", "1 second")
    run = Run(build(rows, "append"), "append", tmp_path / "checkpoint")
    with pytest.raises(StreamingQueryException, match="More than one event time columns are available"):
        run.wait()
    for mode in ("append", "update"):
        with pytest.raises(AnalysisException, match="several columns of event time") as refused:
            build(fleet.stateful(rows, name=name, outputMode=mode), mode)
        assert isinstance(refused.value, InvalidRequestError)
        # What the error advises is accepted.
        advised = F.window("t", "10 seconds"), F.expr("t + interval 0 seconds").alias("at")
        fleet.stateful(rows, name=name, outputMode=mode).groupBy(*advised).count()


def test_duplicates_are_late_by_their_key_where_spark_leaves_out_the_other_event_time(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.string()), ("t", pa.timestamp("us", "UTC"))]))
    begin = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)

    def result(operators: Callable[[DataFrame], Any]) -> DataFrame:
        rows = feed.stream().withWatermark("t", "1 second").select("k", "t", F.window("t", "10 seconds"))
        return operators(rows).dropDuplicates(["k", "window"]).select("k", "window")  # type: ignore[no-any-return]

    sides = {
        "fleet": result(lambda rows: fleet.stateful(rows, name=name, shards=2)),
        "Spark": result(lambda rows: rows),
    }
    with stopping([Run(frame, "append", tmp_path / side) for side, frame in sides.items()]) as runs:
        # The third row is late by its own time, and not by its window; the fourth is late by both.
        for second in (0, 100, 95, 85):
            feed.add([("a", begin + dt.timedelta(seconds=second))])
            for run in runs:
                run.wait()
        ours, sparks = (run.take() for run in runs)
        assert sorted(ours) == sorted(sparks)
        assert [row["window"]["start"].second for row in sorted(ours)] == [0, 30, 40]


def test_an_error_of_a_query_shows_its_plan_without_the_facts_of_operators(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.string())]))
    feed.add([("no number",)])
    rows = feed.stream().select(F.assert_true(F.lit(False), F.lit("stop")).alias("e"), "k")
    query = fleet.stateful(rows, name=name, shards=2, outputMode="update").groupBy("k").agg(F.count("e"), F.sum("k"))
    run = Run(query, "update", tmp_path / "checkpoint")
    with pytest.raises(StreamingQueryException):
        run.wait()
    text = str(run.query.exception())
    assert f"__route:{name}:" in text, "the plan is shown"
    assert not any(fact in text for fact in ('"uri"', "accumulators", "late_columns"))


@pytest.mark.parametrize("kind", [kind for kind in WRONG if issubclass(kind, PySparkException)])
def test_the_documentation_names_the_classes(kind: type[Exception]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    assert f"`{kind.__name__}`" in page

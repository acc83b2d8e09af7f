"""``fleet.stateful(df)`` beside the DataFrame: what passes through it, what it answers, and what it says of the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from spark_jobs.api.stateful import StatefulDataFrame
from statefleet.fleet import Fleet
from tests.integration.comparable_results import facts
from tests.integration.streams import Feed, Run

Frame = StatefulDataFrame


@pytest.fixture
def df(spark: SparkSession) -> DataFrame:
    rate = spark.readStream.format("rate").load()
    return rate.selectExpr("cast(value as string) k", "timestamp t", "cast(value as int) x", "double(value) v")


@pytest.fixture
def frame(fleet: Fleet, df: DataFrame, name: str) -> Frame:
    return fleet.stateful(df, name=name)


def in_pandas(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    yield from frames


def in_arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


#: By the name of the method: a use of it, on a frame and on its DataFrame. A second argument of the same kind is ``second``.
PASSING: dict[str, Callable[[Any, Any], Any]] = {
    "alias": lambda frame, second: frame.alias("a").select("a.k"),
    "coalesce": lambda frame, second: frame.coalesce(1),
    "crossJoin": lambda frame, second: frame.crossJoin(frame.sparkSession.range(2)),
    "drop": lambda frame, second: frame.drop("x", frame.v),
    "dropna": lambda frame, second: frame.dropna(subset=["k"]),
    "fillna": lambda frame, second: frame.fillna(0, subset=["x"]),
    "filter": lambda frame, second: frame.filter(frame.x > 1),
    "hint": lambda frame, second: frame.hint("rebalance"),
    "join": lambda frame, second: frame.join(frame.sparkSession.range(2).withColumnRenamed("id", "x"), "x", "left"),
    "mapInArrow": lambda frame, second: frame.mapInArrow(in_arrow, "k string, t timestamp, x int, v double"),
    "mapInPandas": lambda frame, second: frame.mapInPandas(in_pandas, frame.schema),
    "melt": lambda frame, second: frame.melt("k", ["x", "v"], "name", "value"),
    "observe": lambda frame, second: frame.observe("seen", F.count(F.lit(1)).alias("n")),
    "repartition": lambda frame, second: frame.repartition(3, "k"),
    "repartitionByRange": lambda frame, second: frame.repartitionByRange(3, "k"),
    "replace": lambda frame, second: frame.replace(1, 2, subset=["x"]),
    "sample": lambda frame, second: frame.sample(0.5, 1),
    "sampleBy": lambda frame, second: frame.sampleBy("x", {1: 0.5}, 1),
    "select": lambda frame, second: frame.select("k", F.explode(F.array("x", F.lit(2))), frame["v"]),
    "selectExpr": lambda frame, second: frame.selectExpr("k", "x + 1 as y"),
    "to": lambda frame, second: frame.to(frame.select("x", "k").schema),
    "toDF": lambda frame, second: frame.toDF("a", "b", "c", "d"),
    "transform": lambda frame, second: frame.transform(lambda inner, column: inner.select(column), "k"),
    "union": lambda frame, second: frame.union(second),
    "unionAll": lambda frame, second: frame.unionAll(second),
    "unionByName": lambda frame, second: frame.unionByName(other=second.drop("v"), allowMissingColumns=True),
    "unpivot": lambda frame, second: frame.unpivot("k", ["x", "v"], "name", "value"),
    "where": lambda frame, second: frame.where("x > 1"),
    "withColumn": lambda frame, second: frame.withColumn("y", frame.x + 1),
    "withColumnRenamed": lambda frame, second: frame.withColumnRenamed("x", "y"),
    "withColumns": lambda frame, second: frame.withColumns({"y": frame["x"], "z": F.lit(1)}),
    "withColumnsRenamed": lambda frame, second: frame.withColumnsRenamed({"x": "y", "k": "l"}),
    "withMetadata": lambda frame, second: frame.withMetadata("x", {"told": 1}),
    "withWatermark": lambda frame, second: frame.withWatermark("t", "5 seconds"),
    "na": lambda frame, second: frame.na.drop().na.fill(1).na.replace(1, 2),
    "a column": lambda frame, second: frame[frame.x > 1],
    "columns": lambda frame, second: frame[["k", "x"]],
}

#: Methods whose results are other ones each time: of functions, chance, and DataFrames made on the way.
OTHER_EACH_TIME = {"crossJoin", "mapInArrow", "mapInPandas", "sampleBy"}

IS_SPARK_4 = hasattr(DataFrame, "repartitionById")
if IS_SPARK_4:
    OTHER_EACH_TIME |= {"withWatermark"}
    PASSING["repartitionById"] = lambda frame, second: frame.repartitionById(3, F.col("x"))


@pytest.mark.parametrize("method", PASSING)
def test_what_looks_at_each_row_by_itself_stays_stateful(frame: Frame, df: DataFrame, method: str) -> None:
    passed, expected = PASSING[method](frame, frame), PASSING[method](df, df)
    assert isinstance(passed, StatefulDataFrame)
    assert passed.schema == expected.schema
    if method not in OTHER_EACH_TIME:
        assert passed._df.sameSemantics(expected)
    assert frame._df is df, "a frame does not change"


def test_every_attribute_of_a_dataframe_passes_or_is_accounted_for(frame: Frame) -> None:
    reasons: dict[str, str] = {}
    for attribute in dir(DataFrame):
        if attribute.startswith("_"):
            continue
        try:
            getattr(frame, attribute)
        except AttributeError as error:
            reasons[attribute] = str(error)
        except AnalysisException:
            pass  # Spark says of `write` itself that it is not a stream's
    expected = {
        "asTable", "createGlobalTempView", "createOrReplaceGlobalTempView", "createOrReplaceTempView", "createTempView", "crosstab",
        "describe", "exceptAll", "executionInfo", "exists", "freqItems", "intersect", "intersectAll", "lateralJoin", "nearestByJoin",
        "offset", "orderBy", "pandas_api", "plot", "randomSplit", "registerTempTable", "sameSemantics", "scalar", "semanticHash",
        "sort", "sortWithinPartitions", "sql_ctx", "stat", "storageLevel", "subtract", "summary", "to_koalas", "to_pandas_on_spark",
        "unpersist", "zipWithIndex",
    }  # fmt: skip
    # Each version of PySpark has some that the other does not have.
    assert set(reasons) == expected & set(dir(DataFrame))
    assert all(f"'StatefulDataFrame' object has no attribute {name!r}: " in text for name, text in reasons.items())


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        ("orderBy", "sorting is not supported.*complete output mode, as in Spark.*or use topN"),
        ("describe", "name those that you need in agg"),
        ("createTempView", "make the view of the DataFrame that fleet.stateful was given"),
        ("subtract", "left_anti.*then use distinct"),
        ("pandas_api", "call it on the DataFrame that fleet.stateful was given, or on the result"),
        ("nothing", "'StatefulDataFrame' object has no attribute 'nothing'$"),
        ("_jdf", "where Spark takes a DataFrame, give it the one that fleet.stateful was given"),
    ],
)
def test_what_is_not_there_says_why_and_what_to_do(frame: Frame, attribute: str, says: str) -> None:
    with pytest.raises(AttributeError, match=says):
        getattr(frame, attribute)
    assert not hasattr(frame, attribute)


def test_what_is_asked_of_a_dataframe_is_answered(
    frame: Frame, df: DataFrame, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (frame.schema, frame.columns, frame.dtypes, frame.isStreaming) == (df.schema, df.columns, df.dtypes, True)
    assert frame.sparkSession is spark
    for column in (frame.x, frame["x"], frame[2], frame.colRegex("`x`")):
        assert isinstance(column, Column)
        assert df.select(column).columns == ["x"]
    frame.printSchema()
    ours = capsys.readouterr().out
    df.printSchema()
    assert ours == capsys.readouterr().out
    frame.explain()
    assert "Physical Plan" in capsys.readouterr().out
    assert str(frame.toDF("_1", "_2", "_3", "_4")._1) == "Column<'_1'>"
    assert {"groupBy", "where", "schema", "x", "topN"} <= set(dir(frame))
    assert repr(frame) == f"StatefulDataFrame({df!r})"


def test_a_helper_that_asks_for_a_dataframe_takes_it(frame: Frame) -> None:
    again = copy.copy(frame.where("x > 1"))
    for candidate in (frame, again):
        assert isinstance(candidate, DataFrame)
        assert type(candidate) is StatefulDataFrame
        assert not hasattr(candidate, "_jdf")
    assert again.groupBy("k").count().columns == ["k", "count"]
    # What it has not is not shown as its own.
    assert not {"createTempView", "orderBy", "toPandas"} & set(dir(frame))


def test_shortcuts_of_aggregates_have_sparks_columns(frame: Frame, df: DataFrame) -> None:
    for use in (lambda rows: rows.agg({"x": "sum", "*": "count"}), lambda rows: rows.groupBy("k").sum()):
        assert facts(use(frame)) == facts(use(df))


def test_groups_say_what_they_have_not(frame: Frame) -> None:
    grouped = frame.groupBy("k")
    with pytest.raises(AttributeError, match=r"rows of one batch at a time.*use applyInPandasWithState"):
        grouped.applyInPandas(in_pandas, "k string")
    with pytest.raises(AttributeError, match=r"'StatefulGroupedData' object has no attribute 'nothing'$"):
        grouped.nothing  # noqa: B018
    with pytest.raises(InvalidRequestError, match=r"pivot is not supported.*as in Spark.*FILTER"):
        grouped.pivot("x", [1, 2])


def test_frames_of_one_state_come_together_and_those_of_two_do_not(
    fleet: Fleet, frame: Frame, df: DataFrame, name: str
) -> None:
    again = fleet.stateful(df.where("x > 1"), name=name)
    assert frame.union(again).isStreaming
    of_other_state = fleet.stateful(df, name=f"{name}-other")
    for combine in (
        frame.union,
        lambda second: frame.join(second, "k"),
        lambda second: frame.unionByName(other=second),
    ):
        with pytest.raises(InvalidRequestError, match="these two frames name two; give this one the DataFrame"):
            combine(of_other_state)
    for options in ({"outputMode": "append"}, {"shards": 3}):
        with pytest.raises(InvalidRequestError, match="give both the same name and options"):
            frame.union(fleet.stateful(df, name=name, **options))  # type: ignore[arg-type]


def test_errors_of_sparks_own_methods_say_to_take_the_dataframe(frame: Frame, df: DataFrame) -> None:
    for call in (lambda: df.join(frame, "k"), lambda: df.union(frame), lambda: F.broadcast(frame)):  # type: ignore[arg-type]
        with pytest.raises(
            AttributeError, match=r"'_jdf': where Spark takes a DataFrame, give it the one that fleet.stateful"
        ):
            call()


def test_transform_gives_what_its_function_makes(frame: Frame, df: DataFrame) -> None:
    assert type(frame.transform(lambda rows: rows.limit(1))) is type(df)
    with pytest.raises(TypeError, match="returns a frame or a DataFrame, not int"):
        frame.transform(lambda rows: 1)


@pytest.mark.parametrize("mode", ["Append", "UPDATE", "cOmplete"])
def test_output_modes_are_taken_in_any_case(fleet: Fleet, df: DataFrame, name: str, mode: str) -> None:
    marked = fleet.stateful(df.withWatermark("t", "1 second"), name=name, outputMode=mode)
    assert marked.groupBy(F.window("t", "1 second")).count().columns == ["window", "count"]
    assert fleet._coordinator.describe_state(name) is None, "building a query makes no state"


def test_without_an_operator_the_rows_are_written_as_they_are(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("x", pa.int64())]))
    feed.add([(1,), (2,), (3,)])
    with Run(fleet.stateful(feed.stream(), name=name).where("x > 1"), "append", tmp_path / "ck") as run:  # type: ignore[arg-type]
        assert sorted(row["x"] for row in run.take()) == [2, 3]
    assert not any(entry["name"] == name for entry in fleet.status()["queries"])

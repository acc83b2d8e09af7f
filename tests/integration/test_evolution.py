"""A query that is restarted on its checkpoint with other aggregates than before, and Spark's types in the state's files."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import StateMismatchError
from spark_jobs.operators.aggregate import build_plan
from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run

ROWS = pa.schema([("k", pa.string()), ("v", pa.int32()), ("d", pa.decimal128(8, 2))])


def row(key: str, value: int) -> tuple[str, int, Decimal]:
    return key, value, Decimal(value) / 4


def test_a_query_goes_on_with_other_aggregates(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)

    def batch(columns: list[Column], *rows: tuple[str, int]) -> dict[str, tuple[Any, ...]]:
        frame = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").agg(*columns)
        with Run(frame, "update", tmp_path / "ck") as run:
            feed.add([row(*arguments) for arguments in rows])
            return {key: tuple(values) for key, *values in run.take()}

    narrow, wide = F.min("v"), F.min(F.col("v").cast("bigint"))
    amount, more = F.sum("d"), F.sum(F.col("d").cast("decimal(12,2)"))
    quarters = [Decimal("0.25"), Decimal("1.50")]
    assert batch([F.count("*"), narrow], ("a", 5), ("a", 3), ("b", 9)) == {"a": (2, 3), "b": (1, 9)}
    # The same query: nothing is read again.
    loaded = sum(metrics["bytes_loaded"] for metrics in fleet.metrics().values())
    assert batch([F.count("*"), narrow], ("a", 4)) == {"a": (3, 3)}
    assert sum(metrics["bytes_loaded"] for metrics in fleet.metrics().values()) == loaded
    # Added (an average and a sum, before the others), and reordered.
    assert batch([F.avg("v"), amount, narrow, F.count("*")], ("a", 1)) == {"a": (1.0, quarters[0], 1, 4)}
    assert sum(metrics["bytes_loaded"] for metrics in fleet.metrics().values()) > loaded
    # Wider, twice, and one is gone.
    assert batch([F.count("*"), more, wide], ("a", 5), ("b", 6)) == {
        "a": (5, quarters[1], 1),
        "b": (2, quarters[1], 6),
    }
    # Back again: it starts from nothing, everywhere.
    assert batch([F.avg("v"), F.count("*"), wide], ("b", 2)) == {"b": (2.0, 3, 2)}
    assert batch([F.avg("v"), F.count("*"), wide], ("b", 4)) == {"b": (3.0, 4, 2)}
    # Narrower again: refused when the query is built, both are shown, and the state goes on.
    with pytest.raises(StateMismatchError, match=r"cannot become int32.*existing=.*int64.*asked=.*int32"):
        batch([F.count("*"), narrow])
    with pytest.raises(StateMismatchError, match=r"cannot go on as.*existing=.*Average\(`v`\).*asked="):
        batch([F.count("*"), F.avg(F.col("v").cast("decimal(9,0)"))])
    assert batch([F.count("*"), wide], ("a", 7)) == {"a": (6, 1)}


def meanings(frame: DataFrame, *columns: Column) -> list[tuple[str, str]]:
    accumulators = build_plan(frame.groupBy("k").agg(*columns), "update").schema.accumulators
    return [(item.meaning, item.cast) for item in accumulators]


def test_a_meaning_stays_the_same_however_the_query_is_written(spark: SparkSession, tmp_path: Path) -> None:
    frame = Feed(tmp_path / "in", ROWS).stream()
    frame = frame.withColumn("items", F.array("v"))
    wider = frame.withColumn("v", F.col("v").cast("bigint"))

    def columns() -> list[Column]:
        less = F.aggregate("items", F.lit(0), lambda total, item: total - item)
        return [
            F.count("*"),
            F.stddev("v"),
            F.avg("v"),
            F.count_if(F.col("v") > 3),
            F.max(less),
            F.expr("sum(v) FILTER (WHERE k = 'x')"),
            F.sum(F.expr("nullif(v, 1)")),
            F.first("v", ignorenulls=True),
        ]

    first = meanings(frame, *columns())
    assert first == meanings(frame, *columns()) == meanings(frame.alias("other"), *columns())
    assert first == meanings(wider, *columns())
    assert len(set(first)) == len(first)
    assert first[0] == ("Count(1)", "")
    assert first[2:4] == [("Average(`v`).sum", ""), ("Average(`v`).count", "")]
    assert meanings(frame, F.sum("V")) == [("Sum(`v`)", "")]
    assert meanings(frame, F.min(F.col("v").cast("bigint"))) == [("Min(`v`)", "BIGINT")]
    more = F.aggregate("items", F.lit(0), lambda total, item: item - total)
    assert meanings(frame, F.max(more))[0] not in first


def test_the_files_tell_the_types_that_spark_has(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    declared = {"__CHAR_VARCHAR_TYPE_STRING": "varchar(5)"}
    stream = feed.stream().select(
        F.col("k").alias("k", metadata=declared),
        F.expr("make_dt_interval(0, v)").cast("interval day to hour").alias("hours"),
        F.col("d"),
        F.expr("to_timestamp_ntz('2020-01-01 00:00:00')").alias("local"),
    )
    columns = [F.max("hours"), F.sum("d"), F.max("local"), F.collect_list("hours"), F.collect_set("local")]
    result = fleet.stateful(stream, name=name, shards=1).groupBy("k").agg(*columns)
    assert [(column.name, column.dataType) for column in result.schema] == [
        (column.name, column.dataType) for column in stream.groupBy("k").agg(*columns).schema
    ]
    plan = build_plan(stream.groupBy("k").agg(*columns), "update")
    stored_types = T.StructType.fromJson(json.loads(json.dumps(plan.schema.spark_schema())))
    assert stored_types["k0"].metadata == declared
    kinds = [field.dataType.simpleString() for field in stored_types]
    assert kinds[:5] == ["string", "interval day to hour", "decimal(18,2)", "boolean", "timestamp_ntz"]
    assert kinds[5:] == ["array<interval day to hour>", "array<timestamp_ntz>"]
    with Run(result, "update", tmp_path / "ck") as run:
        feed.add([row("a", 5), row("a", 30)])
        (emitted,) = run.take()
        assert str(emitted["max(hours)"]) == "1 day, 6:00:00"
        assert [str(value) for value in emitted["collect_list(hours)"]] == ["5:00:00", "1 day, 6:00:00"]
        assert emitted["collect_set(local)"] == [dt.datetime(2020, 1, 1)]
    if fleet.uri.startswith("file://"):
        (file,) = Path(fleet.uri.removeprefix("file://"), name).rglob("*.delta")
        facts = json.loads(pa.ipc.open_file(str(file)).schema.metadata[b"statefleet"])
        assert T.StructType.fromJson(facts["spark"]) == stored_types

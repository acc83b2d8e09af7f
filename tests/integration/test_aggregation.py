"""Aggregations on the fleet against Spark's own: schema, values, output modes, watermarks, restarts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from spark_jobs.operators.accumulators import FUNCTIONS
from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.logical import analysed
from statefleet.fleet import Fleet
from tests.integration.comparable_results import facts, normal
from tests.integration.streams import Feed, Run, short_list

UTC = dt.UTC
ALL_TYPES = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("b", pa.bool_()),
        pa.field("i8", pa.int8()),
        pa.field("i16", pa.int16()),
        pa.field("i32", pa.int32()),
        pa.field("i64", pa.int64()),
        pa.field("f32", pa.float32()),
        pa.field("f64", pa.float64()),
        pa.field("d", pa.decimal128(10, 2)),
        pa.field("d38", pa.decimal128(38, 3)),
        pa.field("s", pa.string()),
        pa.field("bin", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("ts", pa.timestamp("us", tz="UTC")),
    ]
)


def all_types_row(n: int) -> tuple[Any, ...]:
    if n % 7 == 3:
        return (f"k{n % 3}", *([None] * (len(ALL_TYPES) - 1)))
    return (
        None if n % 5 == 4 else f"k{n % 3}",
        n % 2 == 0,
        n % 128,
        -n,
        n * 1000,
        n * 10**12,
        n / 4,
        -n / 8 if n % 4 else 0.0,
        Decimal(n) / 4,
        Decimal(n) * 10**20,
        f"text-{n % 4}",
        bytes([n % 256, 0]),
        dt.date(2020, 1, 1) + dt.timedelta(days=n),
        dt.datetime(2020, 1, 1, tzinfo=UTC) + dt.timedelta(seconds=n * 10),
    )


AGGREGATES: list[Column | Callable[[], Column]] = [
    lambda: F.count("*").alias("n"),
    lambda: F.count("i64"),
    lambda: F.sum("i8"),
    lambda: F.sum(F.col("i64") * 2),
    lambda: F.sum("f32"),
    lambda: F.sum("d"),
    lambda: F.sum("d38"),
    lambda: F.avg("i32"),
    lambda: F.avg("d"),
    lambda: F.mean("f64").alias("m"),
    lambda: F.stddev("f64"),
    lambda: F.var_pop("i32"),
    lambda: F.stddev_pop("f32"),
    lambda: F.variance("d"),
    lambda: (F.sum("i64") / F.count("i64") + 1).alias("expression"),
    lambda: F.count_if(F.col("i32") > 3000),
    lambda: F.bool_and("b"),
    lambda: F.expr("sum(i32) FILTER (WHERE b)"),
    lambda: F.expr("count(*) FILTER (WHERE i32 > 2000)"),
    lambda: F.max(F.col("ts")),
    lambda: F.size(F.expr("array_agg(i32) FILTER (WHERE b)")),
    *[lambda name=name: F.min(name) for name in ALL_TYPES.names[1:]],
    *[lambda name=name: F.max(name) for name in ALL_TYPES.names[1:]],
    *[lambda name=name: F.sort_array(F.collect_list(name)) for name in ALL_TYPES.names[1:]],
    *[lambda name=name: F.sort_array(F.collect_set(name)) for name in ALL_TYPES.names[1:]],
]


@pytest.mark.replay
def test_every_aggregate_over_every_type_equals_spark(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", ALL_TYPES)
    columns = [make() for make in AGGREGATES]
    result = fleet.stateful(feed.stream(), name=name, outputMode="complete", shards=2).groupBy("k").agg(*columns)
    expected = feed.stream().groupBy("k").agg(*columns)
    assert facts(result) == facts(expected)
    run = Run(result, "complete", tmp_path / "ck")
    try:
        for start in (0, 20, 40):
            feed.add([all_types_row(n) for n in range(start, start + 20)])
            assert normal(run.take()) == normal(feed.batch().groupBy("k").agg(*columns).collect())
    finally:
        run.stop()


def test_every_name_of_a_held_function_is_sparks_name_of_it(spark: SparkSession) -> None:
    frame = spark.createDataFrame([], "v double, b boolean, i long, h binary")
    arguments = dict.fromkeys(("count_if", "bool_and", "bool_or", "every", "some", "any"), "b")
    arguments |= dict.fromkeys(("max_by", "min_by", "corr", "covar_pop", "covar_samp"), "v, i")
    arguments |= dict.fromkeys(("bit_and", "bit_or", "bit_xor", "bitmap_construct_agg"), "i")
    arguments |= {
        "hll_sketch_agg": "i",
        "hll_union_agg": "h",
        "bitmap_or_agg": "h",
        "percentile": "v, 0.5D",
        "count_min_sketch": "i, 0.1D, 0.9D, 1",
    }
    arguments |= {"percentile_approx": "v, 0.5D", "approx_percentile": "v, 0.5D", "histogram_numeric": "v, 5"}
    for function_class, function in FUNCTIONS.items():
        for name in function.names:
            argument = arguments.get(name, "v, i" if name.startswith("regr_") else "v")
            text = f"{name}({argument})"
            if name in ("percentile_cont", "percentile_disc"):
                text = f"{name}(0.5) WITHIN GROUP (ORDER BY v)"
            use = F.product("v") if name == "product" else F.expr(text)
            (result,) = analysed(frame.groupBy().agg(use)).aggregates
            use = AggregateExpression.at(result.unaliased)
            assert use is not None, name
            assert use.function.kind == function_class, name


def test_every_type_is_a_key(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(spark, tmp_path / "in", ALL_TYPES)
    result = fleet.stateful(feed.stream(), name=name, outputMode="complete").groupBy(*ALL_TYPES.names).count()
    assert facts(result) == facts(feed.stream().groupBy(*ALL_TYPES.names).count())
    run = Run(result, "complete", tmp_path / "ck")
    try:
        for start in (0, 10):
            feed.add([all_types_row(n) for n in range(start, start + 15)])
            assert normal(run.take()) == normal(feed.batch().groupBy(*ALL_TYPES.names).count().collect())
    finally:
        run.stop()


def test_first_and_last_skip_nulls_when_asked(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(spark, tmp_path / "in", pa.schema([("k", pa.int64()), ("v", pa.string())]))
    columns = [F.first("v"), F.last("v"), F.first("v", ignorenulls=True), F.last("v", ignorenulls=True)]
    result = fleet.stateful(feed.stream(), name=name).groupBy("k").agg(*columns)
    assert facts(result) == facts(feed.stream().groupBy("k").agg(*columns))
    run = Run(result, "update", tmp_path / "ck")
    try:
        feed.add([(1, None), (2, "x")])
        assert normal(run.take()) == [(1, None, None, None, None), (2, "x", "x", "x", "x")]
        feed.add([(1, "a")])
        assert normal(run.take()) == [(1, None, "a", "a", "a")]
        feed.add([(1, None)])
        assert normal(run.take()) == [(1, None, None, "a", "a")]
    finally:
        run.stop()


def test_global_aggregate_and_shortcuts(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(spark, tmp_path / "in", pa.schema([("k", pa.int64()), ("v", pa.int64())]))
    everything = fleet.stateful(feed.stream(), name=f"{name}-all").agg({"v": "sum", "*": "count"})
    assert facts(everything) == facts(feed.stream().agg({"v": "sum", "*": "count"}))
    sums = fleet.stateful(feed.stream(), name=f"{name}-sum").groupBy("k").sum()
    assert facts(sums) == facts(feed.stream().groupBy("k").sum())
    runs = [Run(everything, "update", tmp_path / "ck1"), Run(sums, "update", tmp_path / "ck2")]
    try:
        feed.add([(1, 10), (1, 20), (2, 5)])
        assert [tuple(row) for row in runs[0].take()] == [(35, 3)]
        assert normal(runs[1].take()) == normal(feed.batch().groupBy("k").sum().collect())
    finally:
        for run in runs:
            run.stop()


# -- reference cases: count by value (A1, A2), windows (E1, E2, E3) ------------------------------------------------

SECONDS = pa.schema([pa.field("ts", pa.timestamp("us", tz="UTC"))])


def at(*seconds: int) -> list[tuple[dt.datetime]]:
    return [(dt.datetime.fromtimestamp(second, UTC),) for second in seconds]


def windowed(frame: Any) -> DataFrame:
    counts: DataFrame = frame.groupBy(F.window("ts", "5 seconds")).agg(F.count("*").alias("n"))
    return counts.select(F.col("window.start").cast("long").alias("start"), "n")


WINDOW_CASES = {
    # (input seconds, emitted windows), of batches without data that follow, too.
    "append": [((10, 11, 12, 13, 14, 15), []), ((25,), [(10, 5)]), ((10,), [])],
    "update": [
        ((10, 11, 12, 13, 14, 15), [(10, 5), (15, 1)]),
        ((25,), [(25, 1)]),
        ((10, 25), [(25, 2)]),
        ((10,), []),
    ],
    "complete": [
        ((10, 11, 12), [(10, 3)]),
        ((25,), [(10, 3), (25, 1)]),
        ((25,), [(10, 3), (25, 2)]),
        ((10,), [(10, 4), (25, 2)]),
        ((25,), [(10, 4), (25, 3)]),
    ],
}


@pytest.mark.parametrize("mode", short_list(sorted(WINDOW_CASES), {"append"}))
def test_windows_follow_the_reference_cases(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, mode: str
) -> None:
    feeds = [Feed(spark, tmp_path / side / "in", SECONDS) for side in ("fleet", "spark")]
    marked = [feed.stream().withWatermark("ts", "10 seconds") for feed in feeds]
    runs = [
        Run(windowed(fleet.stateful(marked[0], name=name, outputMode=mode)), mode, tmp_path / "fleet" / "ck"),
        Run(windowed(marked[1]), mode, tmp_path / "spark" / "ck"),
    ]
    try:
        for seconds, emitted in WINDOW_CASES[mode]:
            for feed, run in zip(feeds, runs, strict=True):
                feed.add(at(*seconds))
                assert normal(run.take()) == emitted, (run is runs[0], seconds)
    finally:
        for run in runs:
            run.stop()


def test_append_emits_a_window_in_a_batch_without_data(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", SECONDS)
    stream = feed.stream().withWatermark("ts", "10 seconds")
    run = Run(windowed(fleet.stateful(stream, name=name, outputMode="append")), "append", tmp_path / "ck")
    try:
        feed.add(at(10, 11))
        run.wait()
        feed.add(at(25))
        run.wait()
        assert run.take_batches() == {0: [], 1: [], 2: [], 3: [(10, 2)]}
        feed.add(at(10, 11, 26))
        run.wait()
        (query,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
        # Rows count after the map side has combined them, as numRowsDroppedByWatermark counts in Spark.
        assert query["rows_late"] == 1
        assert query["watermark_ms"] == 16_000
    finally:
        run.stop()


@pytest.mark.replay
def test_sliding_windows_equal_spark(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feeds = [Feed(spark, tmp_path / side / "in", SECONDS) for side in ("fleet", "spark")]

    def sliding(frame: Any) -> DataFrame:
        result: DataFrame = frame.groupBy(F.window("ts", "10 seconds", "5 seconds")).count()
        return result

    marked = [feed.stream().withWatermark("ts", "5 seconds") for feed in feeds]
    ours = sliding(fleet.stateful(marked[0], name=name, outputMode="append"))
    assert facts(ours) == facts(sliding(marked[1]))
    runs = [
        Run(ours, "append", tmp_path / "fleet" / "ck"),
        Run(sliding(marked[1]), "append", tmp_path / "spark" / "ck"),
    ]
    try:
        for seconds in ((3, 7, 12), (22, 8), (41,), (60,)):
            for feed in feeds:
                feed.add(at(*seconds))
            assert normal(runs[0].take()) == normal(runs[1].take())
    finally:
        for run in runs:
            run.stop()


VALUES = pa.schema([("v", pa.int64())])


def test_update_counts_continue_over_a_restart_without_reading_state_again(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", VALUES)

    def start() -> Run:
        return Run(fleet.stateful(feed.stream(), name=name).groupBy("v").count(), "update", tmp_path / "ck")

    run = start()
    feed.add([(3,)])
    assert normal(run.take()) == [(3, 1)]
    feed.add([(3,), (2,)])
    assert normal(run.take()) == [(2, 1), (3, 2)]
    run.stop()
    loaded = sum(metrics["bytes_loaded"] for metrics in fleet.metrics().values())
    run = start()
    feed.add([(3,), (2,), (1,)])
    assert normal(run.take()) == [(1, 1), (2, 2), (3, 3)]
    feed.add([(4,)] * 4)
    assert normal(run.take()) == [(4, 4)]
    run.stop()
    assert sum(metrics["bytes_loaded"] for metrics in fleet.metrics().values()) == loaded


# -- what is refused ----------------------------------------------------------------------------------------------


def test_unsupported_requests_are_refused_when_the_query_is_built(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", ALL_TYPES)
    stateful = fleet.stateful(feed.stream(), name=name)
    with pytest.raises(AnalysisException, match="nowhere"):
        stateful.groupBy("nowhere").count()
    with pytest.raises(InvalidRequestError, match="Distinct aggregations are not supported on streaming DataFrames"):
        stateful.groupBy("k").agg(F.countDistinct("s"))
    with pytest.raises(InvalidRequestError, match="at least one more grouping column"):
        stateful.groupBy(F.session_window("ts", "5 minutes")).count()
    with pytest.raises(InvalidRequestError, match="watermark"):
        fleet.stateful(feed.stream(), name=name, outputMode="append").groupBy("k").count()
    with pytest.raises(InvalidRequestError, match="streaming"):
        fleet.stateful(spark.range(3), name=name)
    with pytest.raises(InvalidRequestError, match="folder"):
        fleet.stateful(feed.stream(), name="a/b")
    with pytest.raises(InvalidRequestError, match="upsert"):
        fleet.stateful(feed.stream(), name=name, outputMode="upsert")


@pytest.mark.replay
def test_a_query_that_does_not_fit_the_state_is_refused(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(spark, tmp_path / "in", ALL_TYPES)
    run = Run(fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").sum("i64"), "update", tmp_path / "ck")
    # Twice: the first batch could be repeated from nothing, which anything fits.
    for number in (1, 2):
        feed.add([all_types_row(number)])
        run.take()
    run.stop()
    with pytest.raises(StateMismatchError, match=r"keys differ.*k0 string.*k0 int32"):
        fleet.stateful(feed.stream(), name=name, shards=2).groupBy("i32").sum("i64")
    with pytest.raises(StateMismatchError, match="accumulators differ"):
        fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").sum("f64")
    with pytest.raises(StateMismatchError, match="output mode"):
        fleet.stateful(feed.stream(), name=name, outputMode="complete", shards=2).groupBy("k").sum("i64")
    sums = fleet.stateful(feed.stream(), name=name).groupBy("k").sum("i64")
    with pytest.raises(AnalysisException, match=r"the state was made in another output mode.*`update`.*`complete`"):
        Run(sums, "complete", tmp_path / "ck")
    # Another checkpoint is another query, and the state is untouched.
    with pytest.raises(AnalysisException, match="belongs to another query"):
        Run(sums, "update", tmp_path / "ck-other")

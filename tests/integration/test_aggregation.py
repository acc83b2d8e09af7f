"""Aggregations on the fleet against Spark's own: schema, values, output modes, watermarks, restarts."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.operators.accumulators import FUNCTIONS
from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.logical import analysed
from statefleet.fleet import Fleet
from tests.integration.aggregate_rows import ROWS, row
from tests.integration.comparable_results import facts, normal
from tests.integration.streams import Feed, Run, stopping

UTC = dt.UTC


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


def test_every_type_is_a_key(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    result = fleet.stateful(feed.stream(), name=name, outputMode="complete").groupBy(*ROWS.names).count()
    assert facts(result) == facts(feed.stream().groupBy(*ROWS.names).count())
    with Run(result, "complete", tmp_path / "ck") as run:
        for start in (0, 10):
            feed.add([row(n) for n in range(start, start + 15)])
            assert normal(run.take()) == normal(feed.batch().groupBy(*ROWS.names).count().collect())


def test_global_aggregate_and_shortcuts(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.int64()), ("v", pa.int64())]))
    everything = fleet.stateful(feed.stream(), name=f"{name}-all").agg({"v": "sum", "*": "count"})
    assert facts(everything) == facts(feed.stream().agg({"v": "sum", "*": "count"}))
    sums = fleet.stateful(feed.stream(), name=f"{name}-sum").groupBy("k").sum()
    assert facts(sums) == facts(feed.stream().groupBy("k").sum())
    with stopping([Run(everything, "update", tmp_path / "ck1"), Run(sums, "update", tmp_path / "ck2")]) as runs:
        feed.add([(1, 10), (1, 20), (2, 5)])
        assert [tuple(row) for row in runs[0].take()] == [(35, 3)]
        assert normal(runs[1].take()) == normal(feed.batch().groupBy("k").sum().collect())


# -- windows and restarts; the reference cases are in operator_cases.py --------------------------------------------

SECONDS = pa.schema([pa.field("ts", pa.timestamp("us", tz="UTC"))])


def at(*seconds: int) -> list[tuple[dt.datetime]]:
    return [(dt.datetime.fromtimestamp(second, UTC),) for second in seconds]


def windowed(frame: Any) -> DataFrame:
    counts: DataFrame = frame.groupBy(F.window("ts", "5 seconds")).agg(F.count("*").alias("n"))
    return counts.select(F.col("window.start").cast("long").alias("start"), "n")


def test_append_emits_a_window_in_a_batch_without_data(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", SECONDS)
    stream = feed.stream().withWatermark("ts", "10 seconds")
    with Run(windowed(fleet.stateful(stream, name=name, outputMode="append")), "append", tmp_path / "ck") as run:
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


# -- what is refused ----------------------------------------------------------------------------------------------

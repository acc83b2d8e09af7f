"""What readers are shown of states without Spark: names, types and values of the results that Spark makes of the same rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model import StateStoreId
from coordinator.storage.uris import open_object_store
from spark_jobs.fleet import Fleet
from spark_jobs.operators.accumulators import held_functions
from store_actors.operators.shown import ShownColumns
from store_actors.schema import StateSchema
from store_actors.serving.operator_shards import OperatorShards
from tests.integration.streams import Feed
from tests.integration.test_aggregates import COARSE, ROWS, row, stream

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

AGGREGATES = [
    "count(*)",
    "count(i32)",
    "count(1) FILTER (WHERE b)",
    "count_if(b)",
    "regr_count(i32, f32)",
    *(f"sum({name})" for name in ("i8", "f32", "d", "d38", "dti", "ym", "s")),
    *(f"try_sum({name})" for name in ("i64", "d38 * 1000", "f64")),
    *(f"{name}({column})" for name in ("avg", "try_avg") for column in ("i8", "i64", "f64", "d", "d38", "dti", "ym")),
    "mean(i32)",
    *(f"{name}({column})" for name in ("min", "max") for column in ("f64", "d", "s", "t", "day", "bin", "st", "ym")),
    *(f"{name}(b)" for name in ("bool_and", "every", "bool_or", "some", "any")),
    *(f"{name}(s, i64)" for name in ("max_by", "min_by")),
    "max_by(mp, i64)",
    *(f"{name}(arr)" for name in ("first", "first_value", "any_value", "last", "last_value")),
    "first(i32, true) FILTER (WHERE NOT b)",
    *(f"{name}({column})" for name in ("stddev", "std", "stddev_samp", "stddev_pop") for column in ("i32", "f64")),
    *(f"{name}(i32)" for name in ("variance", "var_samp", "var_pop", "skewness", "kurtosis")),
    *(f"{name}(d, f32)" for name in ("corr", "covar_pop", "covar_samp")),
    *(f"regr_{name}(i32, f32)" for name in ("avgx", "avgy", "r2", "sxx", "syy", "sxy", "slope", "intercept")),
    *(f"{name}(i32)" for name in ("bit_and", "bit_or", "bit_xor", "mode", "median")),
    *(f"percentile({column}, 0.3)" for column in ("i8", "dti", "ym")),
    "percentile(i32, array(0.0, 0.25))",
    "percentile_cont(0.3) WITHIN GROUP (ORDER BY f64)",
    "percentile_disc(0.3) WITHIN GROUP (ORDER BY f64 DESC)",
    *(f"percentile_approx({column}, 0.3)" for column in ("i32", "d", "t")),
    *(f"approx_percentile({column}, array(0.1, 0.5))" for column in ("d", "day")),
    "count_min_sketch(i64, 0.1D, 0.9D, 7)",
    "hll_sketch_agg(s)",
    f"hll_union_agg({COARSE[0]})",
    *(f"histogram_numeric({column}, 5)" for column in ("i32", "f64", "d", "t")),
    "approx_count_distinct(i64)",
    "approx_count_distinct(s, 0.3)",
    "approx_count_distinct(i64, 0.001)",
    "bitmap_construct_agg(bitmap_bit_position(i32))",
    "bitmap_or_agg(bin)",
    *(f"{name}({column})" for name in ("collect_list", "array_agg", "collect_set") for column in ("i32", "st")),
]
OVER_AGGREGATES = [
    "sum(i64) / count(*)",
    "sum(d) / count(*)",
    "sum(d) * 2 + max(d)",
    "sum(i32) - min(i32)",
    "abs(-avg(f64))",
    "sqrt(var_pop(f64)) > 1",
    "if(count(i32) > 3, max(s), 'few')",
    "case when min(i32) < 20 then 1.5D when max(b) then 2.5D end",
    "coalesce(min(i32), -1)",
    "named_struct('low', min(f32), 'high', max(f32))",
    "max(st).q",
    "count(i32) is not null and not max(b)",
    "max(d38) <=> null",
    "cast(count(*) as double)",
    "floor(avg(f64)) + ceil(avg(f32))",
    "sum(dti) / 3",
]
#: Not known without Spark: the aggregates in them are shown.
OTHERS = {
    "concat(max(s), '!')": ["max(concat(s, x))"],
    "upper(k)": [],
}


class Emitted:
    """What a query in complete mode gives its sink, as Arrow has it."""

    def __init__(self, frame: DataFrame, checkpoint: Path) -> None:
        self.table: pa.Table = pa.table({})

        def keep(emitted: DataFrame, _: int) -> None:
            months = [
                F.col(f"`{one.name}`").cast("interval month").cast("int").alias(one.name)
                if isinstance(one.dataType, T.YearMonthIntervalType)
                else F.col(f"`{one.name}`")
                for one in emitted.schema.fields
            ]
            self.table = pa.Table.from_batches(emitted.select(*months)._collect_as_arrow())

        writer = frame.writeStream.outputMode("complete").foreachBatch(keep).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()


def state_of(fleet: Fleet, name: str) -> tuple[StateSchema, pa.Table]:
    """Schema and all rows of an operator's state, as they are stored."""
    told = fleet._coordinator.describe_state(name)
    assert told is not None
    schema = StateSchema.from_json(told.schema)
    shards = OperatorShards(open_object_store(fleet.uri), fleet._coordinator)  # type: ignore[arg-type]
    tables = []
    for shard in range(told.num_shards):
        version = fleet._coordinator.locate(name, shard).newest_version
        tables.append(shards.read(StateStoreId(f"{fleet.uri}/{name}", 0, shard), version, schema))
    return schema, pa.concat_tables(tables)


def plain(table: pa.Table, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """Rows in an order of their own, NaN as text."""

    def value(one: Any) -> Any:
        if isinstance(one, float) and math.isnan(one):
            return "nan"
        if isinstance(one, (list, tuple)):
            return [value(part) for part in one]
        return {name: value(part) for name, part in one.items()} if isinstance(one, dict) else one

    rows = [tuple(map(value, one.values())) for one in table.to_pylist()]
    return sorted(rows, key=lambda one: repr(one[: len(keys)]))


def bare(kind: pa.DataType) -> str:
    """A type without what it says of nulls, time zones and names of elements."""
    text = re.sub(r" not null|, tz=[^\]]*", "", str(kind))
    return re.sub(r"\b(item|element): ", "", text)


def assert_shown_as(shown: pa.Table, expected: pa.Table, keys: Sequence[str]) -> None:
    assert shown.column_names == expected.column_names
    assert [bare(one.type) for one in shown.schema] == [bare(one.type) for one in expected.schema]
    mine, theirs = plain(shown, keys), plain(expected, keys)
    assert len(mine) == len(theirs)
    differ = {
        (shown.column_names[place], repr(a), repr(b))
        for one, other in zip(mine, theirs, strict=True)
        for place, (a, b) in enumerate(zip(one, other, strict=True))
        if a != b
    }
    assert not differ


def test_every_aggregate_is_shown_as_spark_emits_it(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    texts = [*AGGREGATES, *OVER_AGGREGATES]
    told = {re.match(r"\w+", text)[0] for text in texts} | {"product"}  # type: ignore[index]
    assert told >= set(held_functions())
    feed = Feed(spark, tmp_path / "in", ROWS)
    for begin, end in ((0, 1), (1, 24), (24, 48)):
        feed.add([row(n) for n in range(begin, end)])
    columns = [F.expr(text).alias(f"{place} {text}") for place, text in enumerate(texts)]
    query = (
        fleet.stateful(stream(feed), name=name, outputMode="complete", shards=2)
        .groupBy("k")
        .agg(*columns, F.product("f64"))
    )
    emitted = Emitted(query, tmp_path / "ck")
    schema, state = state_of(fleet, name)
    shown = ShownColumns.of(schema)
    assert shown.not_shown == {}
    assert_shown_as(shown.rows(state, None), emitted.table, shown.keys)

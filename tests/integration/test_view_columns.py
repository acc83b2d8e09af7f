"""Views of states without Spark: names, types and values are those of the results that Spark makes of the same rows."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from coordinator.model.errors import InvalidRequestError
from coordinator.storage.uris import open_object_store
from spark_jobs.operators.accumulators import supported_functions
from spark_jobs.operators.aggregate import build_plan
from spark_jobs.operators.join import build_join
from spark_jobs.plan.spark_version import SPARK
from statefleet import StatefulProcessor
from statefleet.fleet import Fleet
from statefleet.reads.state import LiveState
from store_actors.operators.view_columns import ViewColumns
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.integration.aggregate_rows import COARSE, ROWS, row, stream
from tests.integration.case_systems import configured
from tests.integration.key_columns import COLUMNS, with_columns
from tests.integration.streams import Feed, short_list
from tests.stored_shards import stored_rows

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
    "round(avg(f64), 2)",
    "round(avg(d), 1)",
]


class Emitted:
    """The table that a query in complete mode gives its sink in its second and last batch, as Arrow has it."""

    def __init__(self, frame: DataFrame, checkpoint: Path) -> None:
        self.table: pa.Table = pa.table({})

        def keep(emitted: DataFrame, batch: int) -> None:
            if batch == 0:
                return
            months = [
                F.col(f"`{field.name}`").cast("interval month").cast("int").alias(field.name)
                if isinstance(field.dataType, T.YearMonthIntervalType)
                else F.col(f"`{field.name}`")
                for field in emitted.schema.fields
            ]
            self.table = pa.Table.from_batches(emitted.select(*months)._collect_as_arrow())

        writer = frame.writeStream.outputMode("complete").foreachBatch(keep).trigger(availableNow=True)
        writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()


def read(fleet: Fleet, name: str, part: str = "") -> tuple[ViewColumns, pa.Table]:
    """Return the view of a state, and all of its rows as they are stored."""
    metadata = fleet._coordinator.describe_state(name)
    assert metadata is not None
    schema = metadata.schema
    view = ViewColumns.of(schema, part)
    shards = OperatorShards(Partitions(open_object_store(fleet.uri), fleet._coordinator))  # type: ignore[arg-type]
    tables = []
    for shard in range(metadata.num_shards):
        located = fleet._coordinator.locate(name, shard)
        if view.store is None:
            tables.append(stored_rows(shards, located.store_id, located.newest_version, schema))
        else:
            store = fleet._client.open_read(name, shard, (view.store,), None).store(view.store.name)
            tables += [pa.Table.from_batches([batch]) for batch in store.iterator()]
    return view, pa.concat_tables(tables)


def plain(table: pa.Table, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the rows, sorted, with NaN as text."""

    def value(item: Any) -> Any:
        if isinstance(item, float) and math.isnan(item):
            return "nan"
        if isinstance(item, (list, tuple)):
            return [value(part) for part in item]
        return {name: value(part) for name, part in item.items()} if isinstance(item, dict) else item

    rows = [tuple(map(value, row.values())) for row in table.to_pylist()]
    return sorted(rows, key=lambda row: repr(row[: len(keys)]))


def bare(kind: pa.DataType) -> str:
    """Return a type without what it says of nulls, time zones and names of elements."""
    text = re.sub(r" not null|, tz=[^\]]*", "", str(kind))
    return re.sub(r"\b(item|element): ", "", text)


def assert_shown_as(table: pa.Table, expected: pa.Table, keys: Sequence[str]) -> None:
    assert table.column_names == expected.column_names
    assert [bare(field.type) for field in table.schema] == [bare(field.type) for field in expected.schema]
    rows, expected_rows = plain(table, keys), plain(expected, keys)
    assert len(rows) == len(expected_rows)
    differ = {
        (table.column_names[index], repr(a), repr(b))
        for row, expected_row in zip(rows, expected_rows, strict=True)
        for index, (a, b) in enumerate(zip(row, expected_row, strict=True))
        if a != b
    }
    assert not differ


def assert_found_by_keys(view: ViewColumns, state: pa.Table) -> None:
    """The keys of the view lead to the rows of which it shows them."""
    keys = view.rows(state.select(view.needed(view.keys)), view.keys)
    leaves = view.key_leaves(keys.select(keys.column_names[::-1]))
    of_state = state.select(leaves.schema.names)
    assert {repr(row) for row in leaves.to_pylist()} <= {repr(row) for row in of_state.to_pylist()}
    assert leaves.schema.types == of_state.schema.types


def assert_read_by_keys(state: LiveState, table: pa.Table, keys: Sequence[str]) -> None:
    """Programs get the same rows: all of them, those of each key, and those of each first part of the keys."""
    names = table.column_names
    assert (state.keys, plain(state.scan().to_arrow().select(names), names)) == (tuple(keys), plain(table, names))
    rows = table.to_pylist()
    for shown in rows:
        key = {column: shown[column] for column in keys}
        same = [each for each in rows if all(repr(each[column]) == repr(value) for column, value in key.items())]
        assert sorted(map(repr, state.get_all(key))) == sorted(map(repr, same))
        if len(keys) > 1:
            starts_alike = [each for each in rows if repr(each[keys[0]]) == repr(shown[keys[0]])]
            found = state.prefix_scan({keys[0]: shown[keys[0]]}).to_arrow().select(names).to_pylist()
            assert sorted(map(repr, found)) == sorted(map(repr, starts_alike))
    if tuple(keys) == ("user",):
        assert state.get_all({"user": "eve"}) == []


@pytest.mark.replay
def test_every_aggregate_is_shown_as_spark_emits_it(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    texts = [*AGGREGATES, *OVER_AGGREGATES]
    names = {re.match(r"\w+", text)[0] for text in texts} | {"product"}  # type: ignore[index]
    assert names >= set(supported_functions())
    feed = Feed(tmp_path / "in", ROWS)
    for begin, end in ((0, 24), (24, 48)):
        feed.add([row(n) for n in range(begin, end)])
    columns = [F.expr(text).alias(f"{number} {text}") for number, text in enumerate(texts)]
    # Without ANSI mode, for the sum of a text.
    with configured(spark, {"spark.sql.ansi.enabled": "false"}):
        rows = fleet.stateful(stream(feed), name=name, outputMode="complete", shards=2)
        emitted = Emitted(rows.groupBy("k").agg(*columns, F.product("f64")), tmp_path / "ck")
    view, state = read(fleet, name)
    assert view.not_shown == {}
    assert_shown_as(view.rows(state, None), emitted.table, view.keys)
    assert_found_by_keys(view, state)


# -- what Spark alone computes ------------------------------------------------------------------------------------------


def test_what_readers_cannot_compute_is_reported_and_its_aggregates_are_shown(spark: SparkSession) -> None:
    rows = spark.createDataFrame([], "k string, a int, t timestamp, s string")
    grouped = rows.groupBy("k", F.window("t", "1 minute").alias("w"))
    results = [
        F.concat(F.max("s"), F.lit("!")).alias("loud"),
        F.max("s").alias("quiet"),
        F.expr("upper(hex(sum(a)))").alias("text"),
        F.count("*").alias("k"),
        F.sum("a"),
        F.upper("k"),
    ]
    view = ViewColumns.of(build_plan(grouped.agg(*results), "update").schema)
    assert view.schema.names == ["k", "w", "quiet", "sum(a)"]
    assert view.keys == ("k", "w")
    assert {name: why.partition("(")[0] for name, why in view.not_shown.items()} == {
        "loud": "readers cannot compute concat",
        "text": "readers cannot compute upper",
        "k": "another column has this name",
        "upper(k)": "readers cannot compute upper",
    }
    assert view.needed(["quiet"]) == ("a0_value",)


def test_all_keys_are_shown_also_those_that_a_query_leaves_out(spark: SparkSession) -> None:
    rows = spark.createDataFrame([], "k string, a int, b double")
    rolled = ViewColumns.of(build_plan(rows.rollup("k", "a").count(), "update").schema)
    assert rolled.schema.names == ["k", "a", "spark_grouping_id", "count"]
    assert rolled.keys == ("k", "a", "spark_grouping_id")
    computed = ViewColumns.of(build_plan(rows.groupBy(F.col("b") * 2, F.col("a").alias("x")).count(), "update").schema)
    assert computed.keys == ("(b * 2)", "x")


def test_what_ansi_mode_refuses_is_not_computed_otherwise(spark: SparkSession) -> None:
    rows = spark.createDataFrame([], "k string, a int, d decimal(9,2), x double")
    texts = ["avg(a)", "avg(d)", "sum(d)", "stddev(x)", "avg(a) / count(*)", "sum(a) + 1", "cast(sum(a) as int)"]
    with configured(spark, {"spark.sql.ansi.enabled": "true"}):
        view = ViewColumns.of(build_plan(rows.groupBy("k").agg(*map(F.expr, texts)), "update").schema)
    assert view.schema.names == ["k", "avg(a)", "avg(d)", "sum(d)", "stddev(x)", "(avg(a) / count(1))", "sum(a)"]
    assert list(view.not_shown) == ["(sum(a) + 1)", "CAST(sum(a) AS INT)"]


def test_keys_of_any_type_are_shown_and_found(fleet: Fleet, tmp_path: Path, name: str) -> None:
    names = [column for column in COLUMNS if column not in ("nothing", "nothings", "years", "many_months", "months_in")]
    feed = Feed(tmp_path / "in", pa.schema([("i", pa.int32())]))
    feed.add([(number,) for number in range(-3, 25)])
    query = fleet.stateful(with_columns(feed.stream(), COLUMNS), name=name, shards=2).groupBy(*names).count()
    run(query, "update", tmp_path / "ck")
    view, state = read(fleet, name)
    assert view.keys == tuple(names)
    rows = with_columns(feed.batch(), {column: COLUMNS[column] for column in names})
    spark_rows = rows.withColumn("months", F.expr("cast(months as int)")).groupBy(*names).count()
    expected = pa.Table.from_batches(spark_rows._collect_as_arrow())
    assert_shown_as(view.rows(state, None), expected, [*names, "count"])
    assert_found_by_keys(view, state)


# -- operators ----------------------------------------------------------------------------------------------------------

CLICKS = pa.schema(
    [
        pa.field("user", pa.string()),
        pa.field("page", pa.string()),
        pa.field("ts", pa.timestamp("us", tz="UTC")),
        pa.field("ms", pa.int64()),
        pa.field("x", pa.float64()),
    ]
)
START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def at(seconds: int) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


#: Two batches.
BATCHES: list[list[tuple[Any, ...]]] = [
    [("ann", "/", at(0), 30, -0.0), ("ann", "/a", at(5), 70, 0.0), ("bob", None, at(20), 10, 1.5)],
    [("ann", "/", at(0), 30, 2.5), ("bob", "/b", at(21), 20, 3.5)],
]


def run(frame: DataFrame, mode: str, checkpoint: Path) -> None:
    writer = frame.writeStream.outputMode(mode).format("noop").trigger(availableNow=True)
    writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()


def timed(ops: Any) -> Any:
    return ops.withWatermark("ts", "1 minute")


#: Columns, keys first; how many are keys; rows.
Part = tuple[list[str], int, list[tuple[Any, ...]]]
#: By operator: the query over ``fleet.stateful``'s frame, its output mode, and what is shown of each part of its state.
OPERATORS: dict[str, tuple[Callable[[Any], DataFrame], str, dict[str, Part]]] = {
    "windows": (
        lambda frame: timed(frame).groupBy(F.window("ts", "10 seconds"), "user").agg(F.count("*").alias("n"), F.avg("ms")),
        "update",
        {"": (["window", "user", "n", "avg(ms)"], 2, [
            ({"start": at(0), "end": at(10)}, "ann", 3, 130 / 3),
            ({"start": at(20), "end": at(30)}, "bob", 2, 15.0),
        ])},
    ),
    "sessions": (
        lambda frame: timed(frame).groupBy(F.session_window("ts", "10 seconds").alias("visit"), "user").agg(F.max("ms")),
        "append",
        {"": (["user", "visit", "max(ms)"], 1, [
            ("ann", {"start": at(0), "end": at(15)}, 70),
            ("bob", {"start": at(20), "end": at(31)}, 20),
        ])},
    ),
    "duplicates": (
        lambda frame: frame.select("page", "user", "x").dropDuplicates(["user", "x"]),
        "append",
        {"": (["user", "x"], 2, [
            *(() if SPARK.NORMALISES_DUPLICATES else (("ann", -0.0),)),
            ("ann", 0.0), ("ann", 2.5), ("bob", 1.5), ("bob", 3.5),
        ])},
    ),
    "within the watermark": (
        lambda frame: timed(frame).dropDuplicatesWithinWatermark(["user"]),
        "append",
        {"": (["user", "expires"], 1, [("ann", at(60)), ("bob", at(80))])},
    ),
    "limit": (lambda frame: frame.limit(3), "append", {"": (["count"], 0, [(3,)])}),
    "topN": (
        lambda frame: frame.select("ms", F.struct("user").alias("who"), "page").topN(1, "who", F.desc(F.col("ms") + 1)),
        "update",
        {"": (["who", "ms", "page", "rank"], 1, [({"user": "ann"}, 70, "/a", 1), ({"user": "bob"}, 20, "/b", 1)])},
    ),
    "keepLast": (
        lambda frame: frame.select("user", "page", "ts").keepLast(F.upper("user"), "ts"),
        "update",
        {"": (["upper(user)", "user", "page", "ts"], 1, [("ANN", "ann", "/a", at(5)), ("BOB", "bob", "/b", at(21))])},
    ),
    "function": (
        lambda frame: with_state(timed(frame)),
        "update",
        {"": (["user", "n", "pages", "state.user", "exists", "timeout"], 1, [
            ("ann", 3, ["/", "/a", "/"], 1, True, at(120)),
            ("bob", None, None, None, False, at(120)),
        ])},
    ),
    "processor": (
        lambda frame: frame.groupBy("user").transformWithState(remembering(), "user string", "update", "ProcessingTime"),
        "update",
        {
            "default": (["user", "timer"], 1, [("ann", dt.datetime(2100, 1, 1, tzinfo=dt.UTC))] ),
            "value.last": (["user", "last.user", "at"], 1, [("ann", {"p": "/"}, at(0)), ("bob", {"p": "/b"}, at(21))]),
            "list.all": (["user", "ms", "place"], 1, [("ann", 30, 0), ("ann", 70, 1), ("ann", 30, 2), ("bob", 10, 0), ("bob", 20, 1)]),
            "map.pages": (["user", "page", "n"], 1, [("ann", "/", 2), ("ann", "/a", 1), ("bob", "", 1), ("bob", "/b", 1)]),
        },
    ),
}  # fmt: skip


def with_state(frame: Any) -> DataFrame:
    def remember(key: Any, pdfs: Any, state: GroupState) -> Any:
        before = state.get if state.exists else (0, [], 1)
        new = [page for pdf in pdfs for page in pdf["page"]]
        if key[0] == "ann":
            state.update((before[0] + len(new), [*before[1], *new], 1))
        state.setTimeoutTimestamp(1_704_067_320_000)
        yield pd.DataFrame({"user": [key[0]]})

    grouped = frame.groupBy("user")
    return grouped.applyInPandasWithState(  # type: ignore[no-any-return]
        remember, "user string", "n long, pages array<string>, user int", "update", GroupStateTimeout.EventTimeTimeout
    )


def remembering() -> StatefulProcessor:
    # Made in a function, so that Spark's workers get it by value.
    class Remembering(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.last = handle.getValueState("last", "user struct<p: string>, at timestamp")
            self.all = handle.getListState("all", "ms long")
            self.pages = handle.getMapState("pages", "page string", "n int")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for click in rows:
                self.last.update(({"p": click.page}, click.ts))
                self.all.appendValue((click.ms,))
                page = (click.page or "",)
                self.pages.updateValue(page, ((self.pages.getValue(page) or (0,))[0] + 1,))
            if key[0] == "ann":
                self.handle.registerTimer(4_102_444_800_000)
            return []

    return Remembering()


@pytest.mark.parametrize("operator", short_list(OPERATORS, {"sessions", "topN", "function", "processor"}))
def test_rows_of_an_operator_are_shown_under_the_users_names(
    fleet: Fleet, tmp_path: Path, name: str, operator: str
) -> None:
    query, mode, parts = OPERATORS[operator]
    feed = Feed(tmp_path / "in", CLICKS)
    for rows in BATCHES:
        feed.add(rows)
    run(query(fleet.stateful(feed.stream(), name=name, outputMode=mode, shards=2)), mode, tmp_path / "ck")
    for part, (names, keys, expected) in parts.items():
        view, state = read(fleet, name, part)
        table = view.rows(state, None)
        assert table.column_names == names
        assert view.keys == tuple(names[:keys])
        assert table.schema == view.schema
        assert plain(table, names) == sorted(expected, key=repr)
        assert_found_by_keys(view, state)
        assert_read_by_keys(fleet.state(name, part), table, view.keys)
    metadata = fleet._coordinator.describe_state(name)
    assert metadata is not None
    assert ViewColumns.parts_of(metadata.schema) == (() if "" in parts else tuple(parts))
    if operator == "processor":
        assert_described_as_by_spark(fleet, name)


def assert_described_as_by_spark(fleet: Fleet, name: str) -> None:
    """A processor's variables have names of their own, and Spark's metadata of a state has them all."""
    assert fleet.state(name, "last").get({"user": "bob"}) == fleet.state(name, "value.last").get({"user": "bob"})
    with pytest.raises(InvalidRequestError, match="several rows"):
        fleet.state(name, "all").get({"user": "ann"})
    assert fleet.state(name, "all").multi_get([{"user": "ann"}])["ms"].to_pylist() == [30, 70, 30]
    stores = {row["stateStoreName"]: row for row in fleet.state_metadata(name).to_pylist()}
    assert {store: row["_numColsPrefixKey"] for store, row in stores.items()} == {
        "default": 1, "value.last": 0, "list.all": 1, "map.pages": 1
    }  # fmt: skip
    assert json.loads(stores["default"]["operatorProperties"])["stateVariables"] == [
        {"stateName": "last", "stateVariableType": "ValueState"},
        {"stateName": "all", "stateVariableType": "ListState"},
        {"stateName": "pages", "stateVariableType": "MapState"},
    ]


def test_both_sides_of_a_join_are_shown(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", CLICKS)
    feed.add(BATCHES[0])
    rows = feed.stream().withWatermark("ts", "1 minute").withColumn("at", F.struct("page"))
    clicks = rows.select("user", "at", "ts", "x", "ms").alias("c")
    buys = rows.where("user = 'ann'").select(
        F.col("user").alias("buyer"), "at", "ts", F.col("x").alias("y"), F.col("ms").alias("matched")
    )
    on = F.expr("user = buyer and c.at = b.at and x = y and b.ts between c.ts and c.ts + interval 1 minute and ms < 50")
    run(fleet.stateful(clicks, name=name, shards=2).join(buys.alias("b"), on, "full_outer"), "append", tmp_path / "ck")
    left, state = read(fleet, name, "left")
    assert (left.schema.names, left.keys) == (["user", "at", "x", "ts", "ms", "matched"], ("user", "at", "x"))
    assert plain(left.rows(state, None), left.keys) == [
        ("ann", {"page": "/"}, 0.0, at(0), 30, True),
        ("bob", {"page": None}, 1.5, at(20), 10, False),
    ]
    right, state = read(fleet, name, "right")
    assert (right.schema.names, right.keys) == (
        ["buyer", "at", "y", "ts", "matched", "__matched"],
        ("buyer", "at", "y"),
    )
    assert plain(right.rows(state, None), right.keys) == [
        ("ann", {"page": "/"}, 0.0, at(0), 30, True),
        ("ann", {"page": "/a"}, 0.0, at(5), 70, False),
    ]
    for part, side in (("left", left), ("right", right)):
        assert_found_by_keys(side, state)
        table = read(fleet, name, part)[1]
        assert_read_by_keys(fleet.state(name, part), side.rows(table, None), side.keys)
    with pytest.raises(InvalidRequestError, match="say which one"):
        read(fleet, name)


def test_what_a_semi_join_keeps_of_its_right_side_is_shown(fleet: Fleet, tmp_path: Path) -> None:
    rows = Feed(tmp_path / "in", CLICKS).stream().withWatermark("ts", "1 minute")
    left, right = (rows.selectExpr("user as u", f"ms as {name}", "ts") for name in ("a", "b"))
    right = right.withColumnRenamed("ts", "t").withColumn("c", F.upper("u"))
    plan = build_join(left, right, (left.u == right.u) & F.expr("a < b and ts = t"), "left_semi", "append")
    sides = [ViewColumns.of(plan.schema, side).schema.names for side in ("left", "right")]
    assert sides == [["u", "ts", "a"], ["u", "t", "b"]]


def test_a_result_that_is_renamed_is_another_description_of_the_same_state(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", CLICKS)

    def batch(alias: str, rows: Sequence[tuple[Any, ...]]) -> list[str]:
        feed.add(rows)
        run(
            fleet.stateful(feed.stream(), name=name, shards=2).groupBy("user").agg(F.sum("ms").alias(alias)),
            "update",
            tmp_path / "ck",
        )
        return list(read(fleet, name)[0].schema.names)

    assert batch("total", BATCHES[0]) == ["user", "total"]
    loaded = sum(metrics["bytes_loaded"] for metrics in fleet.metrics().values())
    assert batch("sum", BATCHES[1]) == ["user", "sum"]
    assert batch("sum", BATCHES[1]) == ["user", "sum"]
    assert batch("total", BATCHES[1]) == ["user", "total"]
    # What is in memory is the same state.
    assert sum(metrics["bytes_loaded"] for metrics in fleet.metrics().values()) == loaded
    view, state = read(fleet, name)
    assert plain(view.rows(state, None), view.keys) == [("ann", 190), ("bob", 70)]
    folder = f"{name}/0/0/"
    objects = open_object_store(fleet.uri)
    files = [objects.get(info.path) for info in objects.list(folder) if info.path.endswith(".delta")]
    assert files
    assert not any(b"shown" in data for data in files)

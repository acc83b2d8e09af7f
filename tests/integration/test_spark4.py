"""What only Spark 4 has, beside Spark's own operators: collated strings, VARIANT, and new aggregates and options of aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from spark_jobs.plan.spark_version import SPARK
from statefleet.fleet import Fleet
from tests.code_blocks import blocks_of
from tests.integration.case_systems import compare_case
from tests.integration.operator_cases import RESTART, Case, Operators, Step
from tests.user_pytest import pytest_in

pytestmark = pytest.mark.skipif(not SPARK.PROCESSOR_CLASSES, reason="Spark 3.5 has none of it")

WORDS, PAIRS = {"a": "k string, s string"}, {"a": "k string, s string", "b": "k string, s string"}


def collated(frame: DataFrame) -> DataFrame:
    """Return the rows with a string that is compared without regard to case, by itself and in an array of structs."""
    word = F.expr("s collate UTF8_LCASE")
    return frame.select("k", "s", word.alias("c"), F.array(F.struct(word.alias("w"))).alias("a"))


def with_variant(frame: DataFrame) -> DataFrame:
    return frame.select("k", F.expr("parse_json(concat('{\"s\": \"', s, '\"}'))").alias("v"))


def aggregates(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    kept = [F.first("c"), F.last("a"), F.max_by("c", "s"), F.count("c"), F.collect_list("c")]
    compared = (F.first("c") == F.lit("AA")).alias("is_first")
    return ops(collated(i["a"]), "agg", "update").groupBy("k").agg(*kept, compared)  # type: ignore[no-any-return]


def first_rows(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    return ops(collated(i["a"]), "first").dropDuplicates(["k"])  # type: ignore[no-any-return]


def joined(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    left, right = collated(i["a"]).alias("l"), collated(i["b"]).alias("r")
    # Only Spark can compare the strings, which it does after the join.
    on = F.expr("l.k = r.k and l.c <= r.c")
    return ops(left, "join").join(right, on).select("l.k", "l.c", "r.c", "r.a")  # type: ignore[no-any-return]


def counted_matches(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    matched = ops(i["a"], "join").join(i["b"].withColumnRenamed("s", "other"), "k")
    return ops(matched, "counts", "update").groupBy("k").agg(F.count("*"), F.max("other"))  # type: ignore[no-any-return]


def first_variants(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    rows = ops(with_variant(i["a"]), "variant").dropDuplicates(["k"])
    return rows.select("k", F.expr("variant_get(v, '$.s', 'string')"))  # type: ignore[no-any-return]


def tried(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
    big = F.expr("9223372036854775807 - length(s)")
    return ops(i["a"], "tried", "update").groupBy("k").agg(F.try_sum(big), F.try_avg(F.length("s")))  # type: ignore[no-any-return]


CASES = {
    "aggregates of collated strings": Case(
        WORDS,
        aggregates,
        [Step({"a": [("x", "aa"), ("x", "AA"), ("y", "b")]}, None), RESTART, Step({"a": [("x", "Aa")]}, None)],
        mode="update",
    ),
    "first rows with collated strings": Case(
        WORDS, first_rows, [Step({"a": [("x", "aa"), ("x", "AA"), ("y", "b")]}, None), Step({"a": [("z", "Q")]}, None)]
    ),
    "joined collated strings": Case(
        PAIRS,
        joined,
        [
            Step({"a": [("x", "aa"), ("y", "b")], "b": [("x", "AA"), ("x", "ab")]}, None),
            Step({"b": [("y", "B")]}, None),
        ],
    ),
    "an inner join in update mode": Case(
        PAIRS,
        counted_matches,
        [Step({"a": [("x", "aa")], "b": [("x", "b")]}, None), Step({"b": [("x", "c")]}, None)],
        mode="update",
    ),
    "first rows with VARIANT": Case(WORDS, first_variants, [Step({"a": [("x", "aa"), ("y", "b")]}, None)]),
    "try_sum and try_avg": Case(
        WORDS,
        tried,
        [Step({"a": [("x", "aa"), ("y", "b")]}, None), RESTART, Step({"a": [("x", "b")]}, None)],
        mode="update",
    ),
}


@pytest.mark.parametrize("case_name", CASES)
def test_values_are_sparks_own(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str) -> None:
    compare_case(spark, fleet, tmp_path, name, case_name, CASES[case_name], with_spark=True)


class Silent(*SPARK.PROCESSOR_CLASSES):  # type: ignore[misc]
    """A processor that does nothing."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return []


class Keyed(Silent):
    """A processor whose map has collated keys."""

    def init(self, handle: Any) -> None:
        handle.getMapState("seen", "w string collate UTF8_LCASE", "n int")


COLLATED, UNKNOWN = "bytes differ.*use collate", "not held by the fleet yet"
REFUSED: dict[str, tuple[Callable[[Any, DataFrame], Any], str]] = {
    "a collated key": (lambda op, df: op(df).groupBy("c").count(), COLLATED),
    "a collated key in a struct": (lambda op, df: op(df).groupBy(F.struct("c", "k")).count(), COLLATED),
    "a collated key of sessions": (
        lambda op, df: op(df.withWatermark("t", "1 second")).groupBy(F.session_window("t", "5 seconds"), "c").count(),
        COLLATED,
    ),
    "duplicates by a collated key": (lambda op, df: op(df).dropDuplicates(["c"]), COLLATED),
    "all columns": (lambda op, df: op(df.select("k", "c")).distinct(), COLLATED),
    "topN by a collated key": (lambda op, df: op(df).topN(1, "c", "k"), COLLATED),
    "topN in a collated order": (lambda op, df: op(df).topN(1, "k", "c"), COLLATED),
    "a join by a collated key": (lambda op, df: op(df.alias("l")).join(df.alias("r"), F.expr("l.c = r.c")), COLLATED),
    "an outer join that compares collated strings": (
        lambda op, df: op(df.withWatermark("t", "1 second").alias("l")).join(
            df.withWatermark("t", "1 second").alias("r"), F.expr("l.t = r.t and l.c < r.c"), "left_outer"
        ),
        "cannot evaluate a part of this join's condition",
    ),
    "a function by a collated key": (
        lambda op, df: op(df).groupBy("c").transformWithState(Silent(), "n int", "update", "None"),
        COLLATED,
    ),
    "a map with collated keys": (
        lambda op, df: op(df).groupBy("k").transformWithState(Keyed(), "n int", "update", "None"),
        COLLATED,
    ),
    **{
        f"{text} of collated strings": (lambda op, df, text=text: op(df).groupBy("k").agg(F.expr(text)), COLLATED)
        for text in ("min(c)", "max(c)", "max_by(k, c)", "mode(c)", "approx_count_distinct(c)")
    },
    **{
        text: (lambda op, df, text=text: op(df).groupBy("k").agg(F.expr(text)), f"{UNKNOWN}.*{remedy}.*{function}")
        for text, function, remedy in (
            ("listagg(s, ',')", "listagg", r"array_join\(collect_list"),
            ("string_agg(s)", "string_agg", r"array_join\(collect_list"),
            ("kll_sketch_agg_bigint(n)", "kll_sketch_agg_bigint", "one of these"),
            ("theta_sketch_agg(n)", "theta_sketch_agg", "one of these"),
            ("approx_top_k(s)", "approx_top_k", "one of these"),
            ("max_by(s, n, 2)", "max_by", "one of these"),
        )
    },
    "mode(n, true)": (lambda op, df: op(df).groupBy("k").agg(F.mode("n", True)), "equally frequent"),  # type: ignore[call-arg]
    "ordered mode": (
        lambda op, df: op(df).groupBy("k").agg(F.expr("mode() within group (order by n desc)")),
        "equally frequent",
    ),
    "kept nulls": (
        lambda op, df: op(df).groupBy("k").agg(F.expr("collect_list(n) respect nulls")),
        "does not have RESPECT NULLS",
    ),
    "a VARIANT as a value": (lambda op, df: op(df).groupBy("k").agg(F.first("v")), "state holds.*variant_get"),
    "a VARIANT in rows of topN": (lambda op, df: op(df).topN(1, "k", "n"), "state holds.*variant_get"),
    "a VARIANT in rows of a function": (
        lambda op, df: op(df).groupBy("k").transformWithState(Silent(), "n int", "update", "None"),
        "function with state; .*variant_get",
    ),
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_what_bytes_do_not_show_is_refused_when_the_query_is_built(
    spark: SparkSession, fleet: Fleet, name: str, refusal: str
) -> None:
    build, says = REFUSED[refusal]
    rate = spark.readStream.format("rate").load()
    columns = ["timestamp t", "cast(value % 5 as int) n", "string(value) k", "string(value) s"]
    variant = ["parse_json('1') v"] if "VARIANT" in refusal else []
    frame = rate.selectExpr(*columns, "string(value) collate UTF8_LCASE c", *variant)
    with pytest.raises(InvalidRequestError, match=says):
        build(lambda df: fleet.stateful(df, name=name), frame)


def test_the_processor_of_the_page_passes_pysparks_own_tester(tmp_path: Path) -> None:
    (code,) = (
        block.code
        for block in blocks_of("tests/integration/test_query_tester.py::test_the_page")
        if "TwsTester" in block.code
    )
    (tmp_path / "test_quiet.py").write_text(code)
    done = pytest_in(tmp_path, "-q", timeout_s=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr

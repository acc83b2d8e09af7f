"""Joins of two streams against Spark's on random rows, and what is refused when a query is built."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from statefleet.fleet import Fleet
from tests.integration.case_systems import Inputs, System, on_spark
from tests.integration.join_cases import both
from tests.integration.operator_cases import Case, Operators, seconds
from tests.integration.streams import Feed, Run

KINDS = ("inner", "left_outer", "right_outer", "full_outer", "left_semi")
COLUMNS = {"a": "k double, t timestamp, x int", "b": "k double, u timestamp, y int"}
CONDITION = "a.k = b.k and u between t - interval 5 seconds and t + interval 10 seconds and x <> 3 and y <> 0 and (x < y or x = 7)"


def random_join(how: str) -> Callable[[Operators, Any], DataFrame]:
    def query(ops: Operators, i: Any) -> DataFrame:
        left = i["a"].withWatermark("t", "8 seconds").alias("a")
        right = i["b"].withWatermark("u", "5 seconds").alias("b")
        joined: DataFrame = ops(left, how).join(right, F.expr(CONDITION), how)
        columns = ["a.k", seconds("t"), "x"]
        return joined.select(*columns) if how == "left_semi" else joined.select(*columns, "b.k", seconds("u"), "y")

    return query


def random_rows(dice: random.Random, now: int, count: int) -> list[tuple[Any, ...]]:
    """Rows around `now`: keys of which one is hot and some are null, times of which some are late and some null."""
    keys = [None, 0.0, -0.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]
    ages = [-3, 0, 0, 1, 2, 3, 5, 8, 12, 30]
    return [
        (
            dice.choice(keys),
            None if dice.random() < 0.04 else max(0, now - dice.choice(ages)),
            dice.choice([None, 0, 1, 2, 3, 4, 7]),
        )
        for _ in range(count)
    ]


@pytest.mark.replay
def test_random_rows_are_joined_as_by_spark_with_each_join_type(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    dice = random.Random(20261121)
    inputs = Inputs(spark, tmp_path / "in", COLUMNS)

    def ours(frame: DataFrame, operator: str, mode: str = "append") -> Any:
        return fleet.stateful(frame, name=f"{name}-{operator}", shards=2)

    systems: dict[tuple[str, str], System] = {}
    for how in KINDS:
        case = Case(COLUMNS, random_join(how), [])
        systems[how, "fleet"] = System(case, inputs, ours, tmp_path / f"{how}-fleet")
        systems[how, "Spark"] = System(case, inputs, on_spark, tmp_path / f"{how}-spark")
    try:
        emitted = dict.fromkeys(KINDS, 0)
        for step, now in enumerate((40, 52, 60, 95, 100)):
            if step == 2:
                for system in systems.values():
                    system.restart()
            inputs.add(both(random_rows(dice, now, 30), random_rows(dice, now, 30)))
            emitted_by = {key: system.take() for key, system in systems.items()}
            for how in KINDS:
                assert repr(emitted_by[how, "fleet"]) == repr(emitted_by[how, "Spark"]), f"{how}, step {step}"
                emitted[how] += sum(map(len, emitted_by[how, "fleet"].values()))
                states, expected = (systems[how, who].run.states() for who in ("fleet", "Spark"))
                # Left rows of a semi join that were matched are forgotten at once.
                assert states == expected or how == "left_semi", f"{how}, step {step}"
        assert min(emitted.values()) > 20
    finally:
        for system in systems.values():
            system.run.stop()


@pytest.fixture
def streams(spark: SparkSession, tmp_path: Path) -> dict[str, DataFrame]:
    return Inputs(spark, tmp_path / "in", COLUMNS).streams()


Refused = Callable[[Any, dict[str, DataFrame]], DataFrame]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda left, i: left.join(i["b"], i["a"]["t"] > i["b"]["u"]), "needs an equality"),
        (lambda left, i: left.join(i["b"]), "needs an equality"),
        (lambda left, i: left.join(i["b"], "k", "left_anti"), "left semi joins of two streams; use one"),
        (lambda left, i: left.join(i["b"], "k", "left_outer"), "event time with a watermark among its equal keys"),
        (lambda left, i: left.join(i["b"], "k", "full_outer"), "event time with a watermark among its equal keys"),
    ],
)
def test_a_join_that_cannot_run_is_refused_when_it_is_built(
    fleet: Fleet, streams: dict[str, DataFrame], name: str, build: Refused, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        build(fleet.stateful(streams["a"], name=name), streams)


def test_complete_mode_is_refused(fleet: Fleet, streams: dict[str, DataFrame], name: str) -> None:
    with pytest.raises(InvalidRequestError, match="no complete mode"):
        fleet.stateful(streams["a"], name=name, outputMode="complete").join(streams["b"], "k")


def test_a_condition_that_an_outer_join_cannot_evaluate_is_named(
    fleet: Fleet, streams: dict[str, DataFrame], name: str
) -> None:
    left, right = streams["a"].withWatermark("t", "1 second"), streams["b"].withWatermark("u", "1 second")
    on = (left["k"] == right["k"]) & (left["t"] == right["u"]) & (F.pow(left["x"], right["y"]) > 3)
    with pytest.raises(InvalidRequestError, match="POWER"):
        fleet.stateful(left, name=name).join(right, on, "left_outer")


def test_results_have_sparks_schema_and_are_named_by_the_joined_frames(
    fleet: Fleet, streams: dict[str, DataFrame], name: str
) -> None:
    left = streams["a"].withWatermark("t", "1 second").select("*", F.lit(1).alias("one"), F.struct("x").alias("s"))
    right = streams["b"].withWatermark("u", "1 second").select("*", F.lit(2).alias("two"), F.struct("y").alias("s"))
    for how in KINDS:
        for on in ((left["k"] == right["k"]) & (left["t"] == right["u"]), ["k"]):
            if isinstance(on, list) and how != "inner":
                continue
            ours = fleet.stateful(left, name=name).join(right, on, how)
            assert ours.schema == left.join(right, on, how).schema, how
            assert ours.select(left["x"], left["s"]["x"]).columns == ["x", "s.x"]


def test_a_condition_that_overflows_fails_the_batch_and_says_so(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    """Announced: Spark drops the row as late before it computes the condition."""
    feed = Feed(spark, tmp_path / "in", pa.schema([("k", pa.string()), ("micros", pa.int64())]))
    left = feed.stream().withColumn("t", F.timestamp_micros("micros")).withWatermark("t", "10 seconds")
    right = left.selectExpr("k k2", "t u")
    soon = F.expr("k = k2 and u between t - interval 5 seconds and t + interval 8 seconds")
    run = Run(fleet.stateful(left, name=name, shards=2).join(right, soon, "left_outer"), "append", tmp_path / "ck")
    try:
        feed.add([("a", -(2**63))])
        with pytest.raises(StreamingQueryException, match="overflow"):
            run.wait()
    finally:
        run.stop()

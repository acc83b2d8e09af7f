"""``topN`` on random rows beside a batch over everything; what Spark has itself is in :mod:`tests.integration.test_random_programs`.

Rows are late and out of order, with nulls and hot keys, and the query is restarted at random moments.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.integration.case_systems import Inputs, System
from tests.integration.operator_cases import Case, Operators, seconds

COLUMNS = {"a": "k double, s string, t timestamp, x int"}
#: The newest time of each batch.
TIMES = (40, 52, 60, 95, 100, 180)


def random_rows(dice: random.Random, now: int, count: int) -> list[tuple[Any, ...]]:
    """Rows around `now`: keys of which one is hot and some are null, times of which some are late and some null."""
    keys = [None, 0.0, -0.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 2.0, 3.0]
    ages = [-3, 0, 0, 1, 2, 3, 5, 8, 12, 30]
    return [
        (
            dice.choice(keys),
            dice.choice([None, "p", "p", "q", ""]),
            None if dice.random() < 0.04 else max(0, now - dice.choice(ages)),
            dice.choice([None, 0, 1, 2, 3, 4, 7]),
        )
        for _ in range(count)
    ]


@pytest.mark.replay
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_top_rows_are_those_of_a_batch_over_everything(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, seed: int
) -> None:
    """Spark has no such streaming operator; the newest row of each rank is its batch's."""
    dice = random.Random(seed)
    inputs = Inputs(spark, tmp_path / "in", COLUMNS)
    order = [F.desc_nulls_last("x"), F.asc("t"), F.asc("k")]

    def top(ops: Operators, i: Mapping[str, DataFrame]) -> DataFrame:
        return ops(i["a"], "top", "update").topN(3, "s", order).select("s", "rank", "x", seconds("t"))  # type: ignore[no-any-return]

    def ours(frame: DataFrame, operator: str, operator_mode: str) -> Any:
        return fleet.stateful(frame, name=f"{name}-{operator}", outputMode=operator_mode, shards=2)

    system = System(Case(COLUMNS, top, [], mode="update"), inputs, ours, tmp_path / "ck")
    places: dict[tuple[Any, ...], Row] = {}
    rows: list[tuple[Any, ...]] = []
    try:
        for step, now in enumerate(TIMES):
            if step and dice.random() < 0.4:
                system.restart()
            rows += (new := random_rows(dice, now, 25))
            inputs.add({"a": new})
            places |= {tuple(row)[:2]: row for emitted in system.take().values() for row in emitted}
            table = spark.createDataFrame(rows, "k double, s string, t long, x int")
            ranked = table.withColumn("rank", F.row_number().over(Window.partitionBy("s").orderBy(*order)))
            expected = ranked.where(F.col("rank") <= 3).select("s", "rank", "x", "t").collect()
            assert sorted(map(repr, map(tuple, places.values()))) == sorted(map(repr, map(tuple, expected)))
    finally:
        system.run.stop()

"""The tester of users' queries: what it kills, repeats and reorders on the fleet, and which mistakes of a user it finds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError, SetupError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.processor import StatefulProcessor
from statefleet.fleet import Fleet
from statefleet.testing import QueryTester, ResultsDifferError, local_session
from tests.code_blocks import blocks_of, every_block
from tests.user_pytest import pytest_in

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

CLICKS = {"clicks": "user string, ms bigint"}
BATCHES = [[("ann", 1), ("bob", 2), ("ann", 5)], [("ann", 7)], [{"user": "eve", "ms": 1}, ("bob", 3)]]
NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)


@pytest.fixture
def tester(spark: SparkSession, fleet: Fleet, tmp_path: Path) -> QueryTester:
    return QueryTester(spark, fleet, tmp_path)


def totals(fleet: Any, clicks: DataFrame) -> DataFrame:
    frame: DataFrame = fleet.stateful(clicks, name="totals").groupBy("user").agg(F.sum("ms").alias("ms"))
    return frame


def replace(rows: DataFrame, batch_id: int, folder: Path) -> None:
    rows.write.mode("overwrite").parquet(f"{folder}/changes/batch={batch_id}")


def read(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.read.parquet(f"{folder}/changes")


def incarnations(fleet: Fleet) -> set[str]:
    return {actor["instance_id"] for actor in fleet.status()["store_actors"] if actor["alive"]}


@pytest.mark.replay
def test_a_query_that_is_right_passes_while_its_store_actors_are_killed(tester: QueryTester, fleet: Fleet) -> None:
    before = incarnations(fleet)
    tester.check(totals, CLICKS, BATCHES, outputMode="update", write=replace, read=read)
    assert before - incarnations(fleet), "a store actor was killed in each run"
    assert not [name for name in fleet.states() if name.startswith("test-")]


def test_a_query_that_goes_by_the_order_of_rows_is_found(tester: QueryTester) -> None:
    def newest(fleet: Any, clicks: DataFrame) -> Any:
        return fleet.stateful(clicks, name="newest").groupBy("user").agg(F.last("ms").alias("ms"))

    rows = [[("ann", number) for number in range(20)]]
    with pytest.raises(ResultsDifferError) as caught:
        tester.check(newest, CLICKS, rows, outputMode="update", kills=False, repeats=False, seeds=[0])
    assert caught.value.missing == [("ann", 19)]
    tester.check(newest, CLICKS, rows, outputMode="update", kills=False, reorders=False, seeds=[0])


@pytest.mark.replay
def test_inputs_that_are_joined_and_batches_without_rows(tester: QueryTester) -> None:
    def bought(fleet: Any, clicks: DataFrame, buys: DataFrame) -> Any:
        clicks, buys = clicks.withWatermark("ts", "5 seconds"), buys.withWatermark("at", "5 seconds")
        within = F.expr("user = buyer AND at BETWEEN ts AND ts + INTERVAL 20 SECONDS")
        return fleet.stateful(clicks, name="bought").join(buys, within, "leftOuter").select("user", "ts", "amount")

    def noon(seconds: int) -> dt.datetime:
        return NOON + dt.timedelta(seconds=seconds)

    batches = [
        {"clicks": [("ann", noon(0)), ("bob", noon(1))], "buys": [("ann", noon(5), 3)]},
        {"clicks": [("eve", noon(60))], "buys": [("eve", noon(61), 4)]},
        {"clicks": [("zoe", noon(200))], "buys": [("zoe", noon(200), 1), ("bob", noon(3), 9)]},
    ]
    inputs = {"clicks": "user string, ts timestamp", "buys": "buyer string, at timestamp, amount int"}
    tester.check(bought, inputs, batches, seeds=[2])


@pytest.mark.replay
def test_a_query_that_spark_does_not_have_is_compared_with_the_fleet_itself(tester: QueryTester) -> None:
    class Count(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.n = handle.getValueState("n", "n bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            n = (self.n.get() or (0,))[0] + len(list(rows))
            self.n.update((n,))
            yield (key[0], n)

    def counts(fleet: Any, clicks: DataFrame) -> Any:
        grouped = fleet.stateful(clicks, name="counts").groupBy("user")
        return grouped.transformWithState(Count(), "user string, n bigint", "update", "None")

    tester.check(counts, CLICKS, BATCHES, outputMode="update", oracle="fleet", seeds=[1])


def test_what_cannot_be_tested_is_refused(tester: QueryTester) -> None:
    def none(fleet: Any, clicks: DataFrame) -> None:
        fleet.stateful(clicks, name="none").groupBy("user").count()

    for message, arguments in {
        "both write and read": (totals, CLICKS, BATCHES, "update", replace),
        "at least one batch": (totals, CLICKS, []),
        "at least one input": (totals, {}, BATCHES),
        "no such input": (totals, CLICKS, [{"clocks": []}]),
        "input clicks takes a tuple": (totals, CLICKS, [[("ann",)]]),
        "by the input that they are of": (totals, {**CLICKS, "buys": "a int"}, BATCHES),
        "returns a streaming DataFrame": (none, CLICKS, BATCHES),
    }.items():
        query, inputs, batches, *more = arguments
        options = dict(zip(("outputMode", "write"), more, strict=False))
        with pytest.raises(InvalidRequestError, match=message):
            tester.check(query, inputs, batches, **options)  # type: ignore[arg-type]


def test_an_error_of_the_user_is_passed_on_with_where_it_was(tester: QueryTester) -> None:
    def failing(rows: DataFrame, batch_id: int, folder: Path) -> None:
        raise ValueError("a mistake of the user's")

    with pytest.raises(Exception, match="a mistake of the user's") as caught:
        tester.check(totals, CLICKS, BATCHES, outputMode="update", write=failing, read=read)
    assert not getattr(caught.value, "__notes__", [])

    def only_once(rows: DataFrame, batch_id: int, folder: Path) -> None:
        rows.write.parquet(f"{folder}/changes/batch={batch_id}")

    with pytest.raises(Exception, match="already exists") as caught:
        tester.check(totals, CLICKS, BATCHES, outputMode="update", write=only_once, read=read, seeds=[4])
    assert "with seed 4" in caught.value.__notes__[0]


def test_a_second_session_in_a_process_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="has a Spark session already"), local_session(tmp_path):
        pass


@pytest.mark.replay
@pytest.mark.timeout(600)
def test_the_page(tmp_path: Path) -> None:
    """Run the tests of the page as a user does, with the plugin's own session: the planted mistake is found, and only that."""
    for block in blocks_of("tests/integration/test_query_tester.py::test_the_page"):
        name = block.code.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(block.code)
    done = pytest_in(tmp_path, "-q", "--tb=short", "--statefleet-seed=0", timeout_s=500)
    others = "3 passed" if SPARK.PROCESSOR_CLASSES else "2 passed, 1 skipped"
    assert f"1 failed, {others}" in done.stdout, done.stdout + done.stderr
    (printed,) = (block.code for block in every_block() if block.page == "docs/testing.md" and not block.language)
    output = "".join(line.removeprefix("E  ").lstrip() + "\n" for line in done.stdout.splitlines())
    for line in printed.splitlines():
        assert line.strip() in output, done.stdout

"""Rescales beside Spark: every operator's results are the same while its state gets other shards, at restarts and in between."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError, StateMismatchError
from statefleet.cli import main
from statefleet.fleet import Fleet
from statefleet.map_partitions import map_partitions_with_state_store
from tests.integration.case_systems import ALL_CASES, Inputs, System, configured, on_spark
from tests.integration.operator_cases import RESTART
from tests.integration.streams import Feed, Run, short_list

SHORT_LIST = {
    "F1 running count",
}
#: Numbers of shards, one after the other; online steps take the factor that comes next.
RESTARTS = (3, 5, 1, 4, 6, 2)
FACTORS = (2, 2, -2, 3, -4)


class Rescaler:
    """The states of a query, which get other numbers of shards again and again."""

    def __init__(self, fleet: Fleet, prefix: str) -> None:
        self.fleet, self.prefix = fleet, prefix
        self.shards = 2
        self.names: set[str] = set()
        self.refused: list[tuple[int, str]] = []
        self._asked: dict[str, int] = {}
        self._factors = itertools.cycle(FACTORS)
        self._numbers = itertools.cycle(RESTARTS)

    def operators(self, frame: DataFrame, operator: str, mode: str = "append") -> Any:
        name = f"{self.prefix}-{operator}"
        self.names.add(name)
        return self.fleet.stateful(frame, name=name, outputMode=mode, shards=self.shards)

    def number(self, name: str) -> int:
        return next(int(query["num_shards"]) for query in self.fleet.status()["queries"] if query["name"] == name)

    def for_the_next_start(self) -> None:
        self.shards = next(self._numbers)

    def online(self) -> None:
        """Ask for another number of shards of each state."""
        factor = next(self._factors)
        for name in sorted(self.names):
            present = self.number(name)
            target = (
                present * factor if factor > 0 else max(1, present // -factor) if present % -factor == 0 else present
            )
            try:
                plan = self.fleet.rescale(name, target)
            except InvalidRequestError as error:
                self.refused.append((present, str(error)))
            else:
                # While the end of a run is not reported yet, the next batch may have been given what was asked for last.
                assert plan.num_shards in (present, self._asked.get(name))
                assert (plan.new_shards, len(plan.sources)) == (target, target)
                self._asked[name] = target


@pytest.mark.parametrize("case_name", short_list(ALL_CASES, SHORT_LIST))
def test_case_with_rescales(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, case_name: str) -> None:
    case = ALL_CASES[case_name]
    rescaler, inputs = Rescaler(fleet, name), Inputs(spark, tmp_path / "in", case.inputs)
    with configured(spark, case.conf):
        systems = {"the fleet": System(case, inputs, rescaler.operators, tmp_path / "ck-fleet")}
        if case.spark:
            systems["Spark"] = System(case, inputs, on_spark, tmp_path / "ck-spark")
        try:
            for index, step in enumerate(case.steps):
                if isinstance(step, str):
                    assert step == RESTART
                    for system in systems.values():
                        system.restart()
                    continue
                if index % 2:
                    rescaler.online()
                elif index:
                    # Spark, too: a restart forgets where the watermark of each source stood, and whether a batch follows depends on it.
                    for system in systems.values():
                        system.stop()
                    rescaler.for_the_next_start()
                    for system in systems.values():
                        system.start()
                inputs.add(step.rows)
                results = {who: system.take() for who, system in systems.items()}
                where = (
                    f"{case_name}, step {index}, {[rescaler.number(state) for state in sorted(rescaler.names)]} shards"
                )
                rows = sorted(itertools.chain(*results["the fleet"].values()), key=repr)
                assert step.out is None or rows == sorted(step.out, key=repr), f"{where}: {results}"
                assert len({repr(batches) for batches in results.values()}) == 1, f"{where}: {results}"
        finally:
            for system in systems.values():
                system.run.stop()
    # By a factor of the number that the next batch has already, which is not reported before the batch is over; nor is a run that has
    # just begun known before its first batch.
    expected = ("by a factor", "no run of the state's query goes on")
    strange = [
        (has, why)
        for has, why in rescaler.refused
        if not ((has == 1 and "one shard by nature" in why) or any(pattern in why for pattern in expected))
    ]
    assert not strange


ROWS = pa.schema([("k", pa.string()), ("v", pa.int64())])


def numbers(first: int) -> list[tuple[str, int]]:
    return [(f"k{i % 37}", i) for i in range(first, first + 200)]


def totals(fleet: Fleet, feed: Feed, name: str, shards: int | None) -> DataFrame:
    grouped = fleet.stateful(feed.stream(), name=name, shards=shards).groupBy("k")
    return grouped.agg(F.count("*").alias("n"), F.sum("v").alias("s"))


def seen(rows: list[Any]) -> dict[str, tuple[int, int]]:
    return {row["k"]: (row["n"], row["s"]) for row in rows}


def expected(feed: Feed) -> dict[str, tuple[int, int]]:
    return seen(feed.batch().groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("s")).collect())


def shards_of(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    return next(query["shards"] for query in fleet.status()["queries"] if query["name"] == name)


@pytest.mark.replay
def test_a_state_goes_on_with_any_number_after_restarts_and_online_and_says_so(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = Feed(spark, tmp_path / "in", ROWS)
    emitted: dict[str, tuple[int, int]] = {}
    for round_, shards in enumerate((4, None, 3, 5, 1, None)):
        feed.add(numbers(round_ * 1000))
        run = Run(totals(fleet, feed, name, shards), "update", tmp_path / "ck")
        try:
            emitted |= seen(run.take())
            assert emitted == expected(feed)
            present = len(shards_of(fleet, name))
            assert shards is None or present == shards
            # Online: from one of the next batches on, of which the second is one for sure.
            dry = fleet.rescale(name, 2 * present, dry_run=True)
            assert dry.sources == tuple((shard % present,) for shard in range(2 * present))
            assert main(["rescale", fleet.uri, name, "--shards", str(2 * present)]) == 0
            assert f"{present} to {2 * present} shards" in capsys.readouterr().out
            for more in (1, 2, 3):
                feed.add(numbers(round_ * 1000 + more * 200))
                emitted |= seen(run.take())
                assert emitted == expected(feed)
            statuses = shards_of(fleet, name)
            assert [status["partition_id"] for status in statuses] == list(range(2 * present))
            assert sum(status["state_rows"] for status in statuses) == len(emitted)
            progress = run.query.recentProgress[-1]["stateOperators"][0]
            assert (progress["numShufflePartitions"], progress["numRowsTotal"]) == (2 * present, len(emitted))
            assert fleet.explain_placement(name, 2 * present - 1).location is not None
            with pytest.raises(InvalidRequestError, match="no such shard"):
                fleet.explain_placement(name, 2 * present)
        finally:
            run.stop()


@pytest.mark.replay
def test_new_shards_outlive_the_store_actors_that_made_them_and_a_backlog(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Restarted with a backlog of several batches and other shards; each time every store actor is killed right after the first one."""
    feed = Feed(spark, tmp_path / "in", ROWS)
    emitted: dict[str, tuple[int, int]] = {}
    for round_, shards in enumerate((2, 6, 4, 5)):
        for part in range(3):
            feed.add(numbers(round_ * 1000 + part * 200))

        def lose_all(batch_id: int, first: int = 3 * round_) -> None:
            if batch_id == first:
                for actor in fleet.status()["store_actors"]:
                    if actor["alive"]:
                        os.kill(actor["pid"], signal.SIGKILL)

        run = Run(totals(fleet, feed, name, shards), "update", tmp_path / "ck", on_batch=lose_all, available_now=True)
        try:
            emitted |= seen(run.take())
        finally:
            run.stop()
        assert emitted == expected(feed)
        assert len(shards_of(fleet, name)) == shards
    # No run is active now; Spark reports that with a delay.
    deadline = time.monotonic() + 30
    while main(["rescale", fleet.uri, name, "--shards", "10"]) == 0 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "no run of the state's query goes on" in capsys.readouterr().err


def test_what_cannot_be_routed_by_key_is_refused(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(spark, tmp_path / "in", ROWS)
    feed.add(numbers(0))

    def count(store: Any, batches: Any) -> Any:
        store.put(k="rows", n=(store.get("rows") or {"n": 0})["n"] + sum(batch.num_rows for batch in batches))
        yield from ()

    def mapped(shards: int | None) -> DataFrame:
        return map_partitions_with_state_store(
            feed.stream(), count, "n BIGINT", fleet=fleet, name=name, partition_by=["k"], shards=shards,
            keys=pa.schema([("k", pa.string())]), values=pa.schema([("n", pa.int64())]),
        )  # fmt: skip

    run = Run(mapped(2), "append", tmp_path / "ck")
    try:
        run.wait()
        with pytest.raises(InvalidRequestError, match="function's or a program's own"):
            fleet.rescale(name, 4)
        with pytest.raises(StateMismatchError, match="function's or a program's own"):
            mapped(4)
    finally:
        run.stop()
    with pytest.raises(InvalidRequestError, match="no such state"):
        fleet.rescale(f"{name}-none", 4)

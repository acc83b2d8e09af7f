"""Aggregates of distinct values beside Spark's own batch query over the same rows, as Spark has none on streams."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from spark_jobs.plan.spark_errors import RefusedQueryError
from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run, short_list

ROWS = pa.schema([("k", pa.string()), ("a", pa.int64()), ("s", pa.string()), ("d", pa.float64())])
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
PROGRAMS = {
    "alone": ["count(distinct a) n"],
    "with others": ["count(distinct a) n", "count(*) c", "sum(a) s", "max(s) m", "sum(distinct a) ds", "avg(distinct a) da"],
    "of several sets": ["count(distinct a) n", "count(distinct s) t", "count(distinct d) o", "count(distinct a, s) b"],
    "with conditions": [
        "count(distinct a) filter (where d > 0) n", "count(distinct a) m", "sum(distinct a) filter (where d > 0) s",
        "count(1) filter (where d > 0) c",
    ],
    "of expressions": ["count(distinct a % 3, upper(s)) + count(distinct a % 3) n", "max(distinct a) m", "size(collect_set(s)) z"],
    "written in several ways": [
        "count(distinct a) n", "count(distinct A) m", "count(distinct a + length(s)) o", "count(distinct length(s) + a) p",
        "sum(distinct a) filter (where d > 0) q", "sum(distinct A) filter (where 0 < D) r",
    ],
    "of a constant": ["count(distinct 1) n", "sum(a) s"],
}  # fmt: skip


def drawn(dice: random.Random, count: int) -> list[tuple[Any, ...]]:
    keys, texts, numbers = [*"abc", None], ["x", "X", "", None], [0.0, -0.0, float("nan"), 1.5, None]
    return [
        (dice.choice(keys), dice.choice([*range(8), None]), dice.choice(texts), dice.choice(numbers))
        for _ in range(count)
    ]


def aggregates(texts: Sequence[str]) -> list[Column]:
    return [F.expr(text.rpartition(" ")[0]).alias(text.rpartition(" ")[2]) for text in texts]


def newest(rows: Sequence[Row], keys: int = 1) -> dict[str, str]:
    """Return the newest of each group, as text: NaN is equal to itself."""
    return {repr(tuple(row)[:keys]): repr(tuple(row)) for row in rows}


@pytest.mark.parametrize("program", short_list(PROGRAMS, ["with others", "written in several ways"]))
def test_results_are_those_of_a_batch(program: str, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed, dice = Feed(tmp_path / "in", ROWS), random.Random(program)
    columns = aggregates(PROGRAMS[program])
    emitted: dict[str, str] = {}
    # Each run has a store actor killed: values that were seen are those of its checkpoint.
    for _ in range(2):
        with Run(fleet.stateful(feed.stream(), name=name).groupBy("k").agg(*columns), "update", tmp_path / "ck") as run:
            for _ in range(2):
                feed.add(drawn(dice, 30))
                emitted |= newest(run.take())
                assert emitted == newest(feed.batch().groupBy("k").agg(*columns).collect())
                os.kill(
                    next(actor["pid"] for actor in fleet.status()["store_actors"] if actor["alive"]), signal.SIGKILL
                )


@pytest.mark.replay
@pytest.mark.parametrize("grouping", ["global", "rollup", "complete"])
def test_any_grouping_and_mode(grouping: str, fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed, dice = Feed(tmp_path / "in", ROWS), random.Random(grouping)
    columns = aggregates(PROGRAMS["with others"])

    def grouped(rows: Any) -> DataFrame:
        result: DataFrame = (rows.rollup("k", "s") if grouping == "rollup" else rows.groupBy()).agg(*columns)
        return result.orderBy("n") if grouping == "complete" else result

    mode, keys = ("complete" if grouping == "complete" else "update"), 2 if grouping == "rollup" else 0
    emitted: dict[str, str] = {}
    with Run(grouped(fleet.stateful(feed.stream(), name=name, shards=2)), mode, tmp_path / "ck") as run:
        for count in (0, 25, 40):
            feed.add(drawn(dice, count))
            emitted |= newest(run.take(), keys)
            assert emitted == newest(grouped(feed.batch()).collect(), keys) or count == 0


def test_windows_are_emitted_once_they_are_closed_and_their_values_are_forgotten(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(
        tmp_path / "in", pa.schema([("at", pa.timestamp("us", tz="UTC")), ("k", pa.string()), ("a", pa.int64())])
    )
    dice = random.Random(4)
    columns = aggregates(["count(distinct a) n", "count(*) c"])

    def windows(rows: Any) -> DataFrame:
        result: DataFrame = rows.groupBy(F.window("at", "1 minute", "30 seconds"), "k").agg(*columns)
        return result.selectExpr("window.start", "k", "n", "c")

    rows = fleet.stateful(feed.stream().withWatermark("at", "20 seconds"), name=name, shards=2)
    with Run(windows(rows), "append", tmp_path / "ck") as run:
        emitted = []
        for batch in range(6):
            times = [NOON + timedelta(minutes=batch, seconds=dice.randrange(40)) for _ in range(30)]
            feed.add([(at, dice.choice("ab"), dice.randrange(5)) for at in times])
            emitted += run.take()
        feed.add([(NOON + timedelta(hours=1), "z", 1)])
        emitted += run.take()
        expected = [row for row in windows(feed.batch()).collect() if row["k"] != "z"]
        assert sorted(map(repr, emitted)) == sorted(map(repr, expected))
        # The last row is in two windows.
        assert [operator["numRowsTotal"] for operator in run.query.recentProgress[-1]["stateOperators"]] == [2, 2]


def test_both_states_are_rescaled_while_other_aggregates_come_and_values_go(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed, dice = Feed(tmp_path / "in", ROWS), random.Random(9)
    stateful, checkpoint = fleet.stateful(feed.stream(), name=name, shards=2), tmp_path / "ck"

    def counted(*texts: str) -> DataFrame:
        return stateful.groupBy("k").agg(*aggregates(texts))

    emitted: dict[str, Row] = {}
    with Run(counted("count(distinct a) n"), "update", checkpoint) as run:
        for shards in (4, 2, None, None):
            feed.add(drawn(dice, 30))
            emitted |= {repr(row["k"]): row for row in run.take()}
            for state in (name, f"{name}-distinct-a") if shards is not None else ():
                fleet.rescale(state, shards)
    # The source is read twice from here on.
    with Run(counted("count(distinct a) n", "count(*) c"), "update", checkpoint) as run:
        feed.add(more := drawn(dice, 40))
        emitted |= {repr(row["k"]): row for row in run.take()}
    distinct = feed.batch().groupBy("k").agg(*aggregates(["count(distinct a) n"])).collect()
    assert {key: row["n"] for key, row in emitted.items()} == {repr(row["k"]): row["n"] for row in distinct}
    counts = Counter(repr(row[0]) for row in more)
    assert {key: row["c"] for key, row in emitted.items() if "c" in row} == counts
    # And once.
    with Run(counted("count(*) c"), "update", checkpoint) as run:
        feed.add([("a", 1, "x", 0.0)])
        assert [tuple(row) for row in run.take()] == [("a", counts[repr("a")] + 1)]
    with Run(counted("count(*) c", "count(distinct s) t"), "update", checkpoint) as run:
        feed.add([("a", 1, "x", 0.0)])
        with pytest.raises(StreamingQueryException, match="refusing to count from nothing"):
            run.take()


def test_sessions_are_refused(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(
        tmp_path / "in", pa.schema([("at", pa.timestamp("us", tz="UTC")), ("k", pa.string()), ("a", pa.int64())])
    )
    rows = fleet.stateful(feed.stream().withWatermark("at", "20 seconds"), name=name)
    with pytest.raises(RefusedQueryError, match=r"not held for session windows.*collect_set"):
        rows.groupBy(F.session_window("at", "5 seconds"), "k").agg(F.countDistinct("a"))

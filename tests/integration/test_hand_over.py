"""Tasks that hand rows over to the store actor of their node, without Python workers."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from coordinator.service.calls import NAMESPACE
from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run, stopping

ROWS = pa.schema([("k", pa.string()), ("v", pa.int64())])


def plan_of(run: Run) -> str:
    """Return the plan of a query's newest batch."""
    return str(run.query._jsq.explainInternal(False))


def progress_of(run: Run) -> Mapping[str, Any]:
    """Return the progress of the operator in a query's newest batch."""
    assert run.query.lastProgress is not None
    operator: Mapping[str, Any] = run.query.lastProgress["stateOperators"][0]
    return operator


def test_rows_are_aggregated_before_the_shuffle_while_groups_repeat(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    frame = fleet.stateful(feed.stream(), name=name, shards=3).groupBy("k").agg(F.count("v"), F.sum("v"), F.min("v"))
    with Run(frame, "update", tmp_path / "ck") as run:
        # Of the first batch nothing is known, and a few hot keys would be the worst.
        feed.add([(str(number), number) for number in range(30)])
        assert len(run.take()) == 30
        assert "HashAggregate" in plan_of(run)
        feed.add([("7", 1), ("7", None), ("7", -1), ("7", 3)])
        assert [tuple(row) for row in run.take()] == [("7", 4, 10, -1)]
        assert "HashAggregate" not in plan_of(run)
        feed.add([("7", 1), ("8", 2)])
        assert sorted(tuple(row) for row in run.take()) == [("7", 5, 11, -1), ("8", 2, 10, 2)]
        assert "HashAggregate" in plan_of(run)
        assert progress_of(run)["customMetrics"]["rowsRead"] == 2
        assert min(progress_of(run)["memoryUsedBytes"], progress_of(run)["customMetrics"]["deltaBytes"]) > 0


#: By what Spark's own plan has for it, aggregates of rows that are combined before the shuffle where groups repeat; None for others.
#: With what comes of the last batch below.
COMBINED = {
    "sorted, as texts do not stay in their place": (
        "SortAggregate",
        ["max(k)", "min(k)", "first(v)"],
        [("b", "b", "b", 2), ("c", "c", "c", None)],
    ),
    "registers": (
        "HashAggregate",
        ["approx_count_distinct(v)", "approx_count_distinct(k, 0.2)", "sum(v)"],
        [("b", 3, 1, 11), ("c", 0, 1, None)],
    ),
    "values of any number": (
        None,
        ["max(k)", "collect_list(v)", "approx_count_distinct(v)"],
        [("b", "b", [2, 4, 5], 3), ("c", "c", [], 0)],
    ),
}


@pytest.mark.parametrize("case", COMBINED)
def test_what_spark_cannot_combine_is_shuffled_as_rows(fleet: Fleet, tmp_path: Path, name: str, case: str) -> None:
    combined, aggregates, expected = COMBINED[case]
    feed = Feed(tmp_path / "in", ROWS)
    frame = fleet.stateful(feed.stream(), name=name, shards=3).groupBy("k").agg(*map(F.expr, aggregates))
    with Run(frame, "update", tmp_path / "ck") as run:
        # Of the first batch nothing is known; groups repeat in the second one, and in the fourth.
        batches = [
            [("a", 1), ("b", 2)],
            [("a", n % 90) for n in range(300)],
            [("a", 3)],
            [("b", 4), ("c", None), ("b", 5)],
        ]
        is_repeated = [True, False, True, False]
        for batch, repeats in zip(batches, is_repeated, strict=True):
            feed.add(batch)
            emitted = run.take()
            plan = plan_of(run)
            assert "HandOver" in plan
            assert ("Aggregate" in plan) == (combined is not None and repeats)
            assert not repeats or combined is None or combined in plan
    assert sorted(emitted) == expected


def test_rows_that_are_only_counted_are_counted_after_a_batch_of_one(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    with Run(fleet.stateful(feed.stream(), name=name, shards=2).groupBy().count(), "update", tmp_path / "ck") as run:
        # No group repeats in a batch of one row, and rows that only have to be counted have no columns to be sent.
        for rows, total in ((1, 1), (5, 6), (1, 7), (1, 8), (3, 11)):
            feed.add([("a", 1)] * rows)
            assert [tuple(row) for row in run.take()] == [(total,)]
            assert progress_of(run)["customMetrics"]["rowsRead"] == rows


def test_a_store_actor_that_has_served_a_query_has_nothing_of_spark(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    with Run(fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").count(), "update", tmp_path / "ck") as run:
        feed.add([("a", 1)])
        run.take()
        for actor in fleet.status()["store_actors"]:
            handle = ray.get_actor(actor["actor_name"], namespace=NAMESPACE)
            loaded = ray.get(handle.__ray_call__.remote(lambda _: {name.partition(".")[0] for name in sys.modules}))
            assert "store_actors" in loaded
            assert not {"pyspark", "py4j", "spark_jobs"} & loaded


def test_a_large_batch_counts_as_a_whole_where_its_sink_reads_a_row(fleet: Fleet, tmp_path: Path, name: str) -> None:
    # A task sends the rows of its last shards when the results of the first ones were used; here nobody uses them.
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.int64()), ("s", pa.string())]))
    grouped = fleet.stateful(feed.stream(), name=name, shards=6).groupBy("k")
    read: dict[int, list[Row]] = {}

    def act(batch: DataFrame, batch_id: int) -> None:
        read[batch_id] = batch.take(1) if batch_id == 1 else batch.select("k", "n").collect()

    writer = grouped.agg(F.count("*").alias("n"), F.max("s")).writeStream.outputMode("update").foreachBatch(act)
    with stopping(writer.option("checkpointLocation", str(tmp_path / "ck")).start()) as query:
        for text in ("", "x" * 1200, "y"):
            feed.add([(key, text) for key in range(24_000)][: None if text else 10])
            query.processAllAvailable()
        assert [len(rows) for rows in read.values()] == [10, 1, 24_000]
        assert all(row["n"] == (3 if row["k"] < 10 else 2) for row in read[2])


#: Bytes of a text that just fits into a block that a task sends, with the block's length, the row's size, and its flags and words.
FITS = (1 << 18) - (4 + 4) - 8 - 4 * 8  # in whole words
REPEATED = "repeat(char(97 + k % 26), n)"
#: Ways of the rows of a text, and texts around the bound of each.
WAYS = {
    "as Spark has them": (REPEATED, "s", [0, FITS, FITS + 1, 3 * FITS]),
    "in Arrow": (f"array({REPEATED})", "s[0]", [1, (16 << 20) - 100, 16 << 20]),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_around_a_bound_arrive_in_any_order(fleet: Fleet, tmp_path: Path, name: str, way: str) -> None:
    made, text, sizes = WAYS[way]
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.int64()), ("n", pa.int64())]))
    rows = feed.stream().selectExpr("k", f"{made} s")
    kept = (
        fleet.stateful(rows, name=name, shards=1)
        .dropDuplicates(["k"])
        .selectExpr("k", f"length({text})", f"md5({text})")
    )
    with Run(kept, "append", tmp_path / "ck") as run:
        keys = itertools.count()
        # A batch of all orders that begin with the same size.
        for _, orders in itertools.groupby(itertools.permutations(sizes), key=lambda order: order[0]):
            batch = [(next(keys), size) for order in orders for size in order]
            feed.add(batch)
            assert sorted(run.take()) == [
                (key, size, hashlib.md5(chr(97 + key % 26).encode() * size).hexdigest()) for key, size in batch
            ]
            assert progress_of(run)["customMetrics"]["rowsRead"] == len(batch)


@pytest.mark.replay
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_random_sizes_are_those_of_spark(fleet: Fleet, tmp_path: Path, name: str, seed: int) -> None:
    choose = random.Random(seed)
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.int64()), ("n", pa.int64())]))
    rows = feed.stream().selectExpr("k", f"{REPEATED} s")
    stateful = fleet.stateful(rows, name=name, shards=choose.randint(1, 4))
    of_fleet, of_spark = (
        Run(frame.dropDuplicates(["k"]).select("k", F.length("s"), F.md5("s")), "append", tmp_path / side)
        for side, frame in (("ck", stateful), ("spark", rows))
    )
    try:
        for _ in range(4):
            sizes, left = [], 200 << 20
            while left > 0:
                sizes.append(int(math.exp(choose.uniform(0, math.log(100 << 20)))))
                left -= sizes[-1]
            feed.add([(choose.randrange(1000), size) for size in sizes])
            assert sorted(of_fleet.take()) == sorted(of_spark.take())
    finally:
        of_fleet.stop()
        of_spark.stop()

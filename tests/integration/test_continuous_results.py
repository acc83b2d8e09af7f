"""What is told of a continuous query: Spark's progress of each epoch, and the order of its results."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from spark_jobs.plan.result_order import with_result_order
from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.rate_epochs import KEYS, await_epochs, committed, rate, rows_read, started, view
from tests.integration.streams import Feed, Run, lose_store_actors, stopping


def ends_at(offset: Any) -> dict[str, int]:
    """Return the last number of each partition of a rate source, by what a progress has of it."""
    read = json.loads(offset) if isinstance(offset, str) else offset
    return {partition: int(at["value"]) for partition, at in read.items()}


def test_spark_reports_each_epoch(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    rows = fleet.stateful(rate(spark).withWatermark("at", "1 second"), name=name)
    with stopping(started(rows.groupBy(F.window("at", "2 seconds"), "k").count(), folder)) as query:
        until(lambda: query.exception() or len(query.recentProgress) > 8)
        # PySpark 4 has objects.
        texts = [report.json if hasattr(report, "json") else json.dumps(report) for report in query.recentProgress]
    reports = [json.loads(text) for text in texts]
    numbers = [report["batchId"] for report in reports]
    assert numbers == list(range(numbers[0], numbers[0] + len(reports)))
    sources = [report["sources"][0] for report in reports]
    for before, after in pairwise(sources):
        assert after["startOffset"] == before["endOffset"]
    # Each row that was read is counted in one report.
    read = rows_read(folder, numbers)
    assert [source["numInputRows"] for source in sources[1:]] == [after - before for before, after in pairwise(read)]
    operators = [report["stateOperators"][0] for report in reports]
    assert {operator["operatorName"] for operator in operators} == {"stateStoreSave"}
    assert operators[-1]["numRowsTotal"] >= KEYS
    assert max(operator["customMetrics"]["pieces"] for operator in operators) > 0
    assert max(operator["customMetrics"]["longestWaitMs"] for operator in operators) < 60_000
    watermarks = [report["eventTime"]["watermark"] for report in reports]
    assert watermarks == sorted(watermarks)
    assert watermarks[-1] > "1970-01-01T00:00:59.000Z"
    for report in reports:
        took = report["durationMs"]
        assert took["addBatch"] + took["commitBatch"] == took["triggerExecution"]


def orders_of(rows: list[Row], column: str) -> dict[int, list[tuple[Any, int]]]:
    """Return what rows say of each key, in the order of the results: orders, and counts."""
    by_key: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    for row in rows:
        by_key[row["k"]].append((tuple(row[column]), row["n"]))
    return {key: sorted(results) for key, results in by_key.items()}


@pytest.mark.replay
def test_the_greater_order_of_a_key_is_the_newer_result(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    counts = fleet.stateful(rate(spark, 1), name=name).groupBy("k").agg(F.count("*").alias("n"))
    folder = tmp_path / "checkpoint"
    with stopping(started(with_result_order(counts), folder, "memory", name)) as query:
        for _ in range(2):
            await_epochs(query, folder, 3)
            lose_store_actors(fleet)
        await_epochs(query, folder, 3)
    rows = spark.table(view(name)).where(f"result_order.epoch <= {committed(folder)}").collect()
    for results in orders_of(rows, "result_order").values():
        assert [n for _, n in results] == sorted({n for _, n in results}), "a count grows with each result"
    orders = [row["result_order"] for row in rows]
    assert len({order["run"] for order in orders}) == 3
    by_epoch = sorted({(order["epoch"], order["run"]) for order in orders})
    assert [run for _, run in by_epoch] == sorted(run for _, run in by_epoch)


def test_each_epoch_numbers_its_results_from_one(spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str) -> None:
    counts = fleet.stateful(rate(spark, 1), name=name).groupBy("k").agg(F.count("*").alias("n"))
    folder = tmp_path / "checkpoint"
    with stopping(started(with_result_order(counts), folder, "memory", name)) as query:
        await_epochs(query, folder, 3)
        # What a task keeps from one epoch for the next begins anew with each.
        assert "EpochProject" in query._jsq.explainInternal(False)
    numbers = defaultdict(list)
    for row in spark.table(view(name)).where(f"result_order.epoch <= {committed(folder)}").collect():
        numbers[row["result_order"]["epoch"]].append(row["result_order"]["number"])
    assert len(numbers) > 2
    for of_epoch in numbers.values():
        assert sorted(of_epoch) == list(range(1, len(of_epoch) + 1))


def test_batches_have_orders_too(fleet: Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "rows", pa.schema([("k", pa.int64())]))
    counts = fleet.stateful(feed.stream(), name=name).groupBy("k").agg(F.count("*").alias("n"))
    rows: list[Row] = []
    # A run each: the second one goes on.
    for batches in ([(1, 1, 2), (2,)], [(1,)]):
        with Run(with_result_order(counts, "order"), "update", tmp_path / "checkpoint") as run:
            for batch in batches:
                feed.add([(key,) for key in batch])
                rows += run.take()
    results = [(row["order"]["epoch"], row["k"], row["n"]) for row in rows]
    assert sorted(results) == [(0, 1, 2), (0, 2, 1), (1, 2, 2), (2, 1, 3)]
    runs = [row["order"]["run"] for row in rows]
    assert runs[0] == runs[1] == runs[2] < runs[3]

"""Queries whose states and checkpoints are in ``tests/data``, as each version of Spark wrote them.

``python -m tests.integration.version_states`` writes those of the installed version.
"""

from __future__ import annotations

import datetime as dt
import shutil
import tempfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.fleet import Fleet, connect
from spark_jobs.session.spark_session import start_session, stop_session
from spark_jobs.transform.processor import StatefulProcessor
from tests.integration.streams import Feed, Run

__all__ = ["BATCHES", "DATA", "FIRST_BATCHES", "QUERIES", "continued", "folder_of"]

DATA = Path(__file__).parents[1] / "data"
ROWS = pa.schema([("k", pa.string()), ("t", pa.timestamp("us", "UTC")), ("x", pa.int32()), ("d", pa.decimal128(10, 2))])
_NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
#: Batches of a query, the last of which is read from a state that the others wrote.
BATCHES = [
    [("a", 0, 1), ("b", 1, 2), ("a", 3, 1), (None, 4, 5), ("c", 5, None)],
    [("a", 6, 9), ("b", 12, 4), ("d", 14, -3), ("c", 8, 7)],
    [("a", 7, 2), ("b", 13, 4), ("d", 9, 8), ("e", 50, 1), (None, 11, 6)],
]
FIRST_BATCHES = len(BATCHES) - 1


def _aggregated(fleet: Fleet, name: str, rows: DataFrame) -> DataFrame:
    marked = fleet.stateful(rows.withWatermark("t", "10 seconds"), name=name, shards=2)
    return marked.groupBy(F.window("t", "10 seconds"), "k").agg(
        F.count("*").alias("n"), F.sum("x"), F.avg("x"), F.sum("d"), F.avg("d"), F.stddev("x"), F.min("t"), F.max_by("x", "t"),
        F.approx_count_distinct("x"), F.percentile("x", 0.5), F.sort_array(F.collect_list("x")), F.collect_set("k"), F.first("x"),
        F.hex(F.hll_sketch_agg("x")), F.bool_or(F.col("x") > 3),
    )  # fmt: skip


def _dropped(fleet: Fleet, name: str, rows: DataFrame) -> DataFrame:
    return fleet.stateful(rows.withWatermark("t", "10 seconds"), name=name, shards=2).dropDuplicatesWithinWatermark(
        ["k"]
    )


def _joined(fleet: Fleet, name: str, rows: DataFrame) -> DataFrame:
    left = rows.withWatermark("t", "10 seconds").alias("l")
    right = rows.withWatermark("t", "10 seconds").alias("r")
    condition = F.expr("l.k = r.k and l.t between r.t - interval 5 seconds and r.t + interval 5 seconds and l.x <> r.x")
    return (
        fleet.stateful(left, name=name, shards=2).join(right, condition, "leftOuter").select("l.k", "l.t", "l.x", "r.x")
    )


def _grouped_function(fleet: Fleet, name: str, rows: DataFrame) -> DataFrame:
    def count(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        n, last = state.getOption or (0, None)
        for frame in frames:
            n, last = n + len(frame), str(frame.d.max())
        state.update((n, last))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "last": [last]})

    grouped = fleet.stateful(rows, name=name, shards=2).groupBy("k")
    return grouped.applyInPandasWithState(
        count, "k string, n long, last string", "n long, last string", "update", "NoTimeout"
    )


def _transformed(fleet: Fleet, name: str, rows: DataFrame) -> DataFrame:
    class Sums(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.sum = handle.getValueState("sum", "s decimal(20,2)")
            self.times = handle.getListState("times", "t timestamp")
            self.by_x = handle.getMapState("by_x", "x int", "n bigint")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            total = (self.sum.get() or (0,))[0]
            for row in rows:
                total += row.d
                self.times.appendValue((row.t,))
                seen = self.by_x.getValue((row.x or 0,)) if self.by_x.containsKey((row.x or 0,)) else (0,)
                self.by_x.updateValue((row.x or 0,), (seen[0] + 1,))
            self.sum.update((total,))
            by_x = sorted((x[0], n[0]) for x, n in self.by_x.iterator())
            yield key[0], total, str([time[0].timestamp() for time in self.times.get()]), str(by_x)

    grouped = fleet.stateful(rows, name=name, shards=2).groupBy("k")
    output = "k string, total decimal(20,2), times string, by_x string"
    return grouped.transformWithState(Sums(), outputStructType=output, outputMode="Update", timeMode="None")


#: By name, the query and its output mode.
QUERIES: dict[str, tuple[Callable[[Fleet, str, DataFrame], DataFrame], str]] = {
    "aggregated": (_aggregated, "update"),
    "dropped": (_dropped, "append"),
    "joined": (_joined, "append"),
    "grouped-function": (_grouped_function, "update"),
    "transformed": (_transformed, "update"),
}


def folder_of(version: str) -> Path:
    """Return the folder with the states and the checkpoints that a version of Spark wrote, such as ``3.5``."""
    return DATA / f"spark-{version}"


def continued(
    spark: SparkSession, fleet: Fleet, query: str, name: str, folder: Path, checkpoint: Path, batches: list[list[Any]]
) -> list[tuple[Any, ...]]:
    """Return the rows, sorted by their text, that a query emits for the last of the batches."""
    feed = Feed(spark, folder, ROWS)
    build, mode = QUERIES[query]
    run = Run(build(fleet, name, feed.stream()), mode, checkpoint)
    try:
        for batch in batches:
            run.take()
            feed.add([(k, _NOON + dt.timedelta(seconds=second), x, Decimal(f"{second}.25")) for k, second, x in batch])
        return sorted(map(tuple, run.take()), key=repr)
    finally:
        run.stop()


def main() -> None:
    """Write the folder of the installed version."""
    target = folder_of(pyspark.__version__.rsplit(".", 1)[0])
    shutil.rmtree(target, ignore_errors=True)
    spark = start_session("version-states", executor_cores=2, configs={"spark.sql.shuffle.partitions": "2"})
    fleet = connect((target / "fleet").as_uri())
    for query in QUERIES:
        with tempfile.TemporaryDirectory() as folder:
            continued(spark, fleet, query, query, Path(folder), target / "checkpoints" / query, BATCHES[:FIRST_BATCHES])
    fleet.shutdown()
    stop_session()


if __name__ == "__main__":
    main()

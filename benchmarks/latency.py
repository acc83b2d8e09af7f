"""The latency of small batches: p50 and p99 from the arrival of rows to their results in the sink, with each state store.

``./run bench --only latency``

A query of counts and sums triggers as fast as it can. It gets some rows at a time, as a file, and the next ones once Spark has written
down that the batch is done. Rows arrive when their file appears in the folder of the source; their results have arrived when Spark is
done with the batch's sink. Rows that came during a batch would wait for its end besides, on every side alike.

One query runs at a time, the sides take turns in rounds, and a query goes on where it was stopped in the round before.
"""

from __future__ import annotations

import statistics
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.harness import (
    AT_ONCE,
    FLEET,
    PLAIN,
    POLLING,
    SPARK_STORES,
    Variant,
    in_turn,
    own_operators,
    use_side,
    write_rows,
)
from benchmarks.nexmark.query import FleetOperators
from benchmarks.workloads import Counts
from statefleet.fleet import Fleet, connect

SIDES = (FLEET, *SPARK_STORES, PLAIN)
#: Rows at a time, and the keys that they are drawn from.
ROWS, KEYS = 100, 10_000
SHARDS = 4
#: Rounds of all sides; measured batches of each side in a round, and batches before them.
ROUNDS, BATCHES, WARMUP = 2, 25, 4


def measure(spark: SparkSession, root: Path) -> dict[str, Any]:
    """Measure all sides, with files in a folder of its own; return the seconds of each: p50, p99 and all of them."""
    latencies: dict[str, list[float]] = {side: [] for side in SIDES}
    root.mkdir(parents=True)
    fleet = connect(f"file://{root}/fleet")
    try:
        for number in range(ROUNDS):
            for side in in_turn(SIDES, number):
                seconds = _round(spark, fleet, side, number, root)
                latencies[side] += seconds
                print(f"  round {number}: {side:<10} p50 {statistics.median(seconds) * 1000:.0f} ms", flush=True)
    finally:
        fleet.shutdown()
    return {
        side: {
            "p50_s": float(np.percentile(seconds, 50)),
            "p99_s": float(np.percentile(seconds, 99)),
            "batch_s": seconds,
        }
        for side, seconds in latencies.items()
    }


def _round(spark: SparkSession, fleet: Fleet, side: str, number: int, root: Path) -> list[float]:
    """Run a side's batches of a round; return the seconds of those that are measured."""
    workload = Counts(ROWS, KEYS)
    source = spark.readStream.schema(workload.columns).parquet(str(Variant.input_folder(root, side)))
    use_side(spark, side, SHARDS)
    spark.conf.set(POLLING, AT_ONCE)
    if side == PLAIN:
        frame = workload.plain(source, SHARDS)
    else:
        ops = FleetOperators(fleet, side, SHARDS) if side.startswith(FLEET) else own_operators
        frame = workload.query(ops, source, side)
    variant = Variant.start(side, root, frame, workload.mode)
    seconds = []
    try:
        for batch in range(WARMUP + BATCHES):
            # Spark lists the folder in every trigger; it may ask for the last file again when a query is restarted.
            for read in sorted(variant.folder.iterdir())[:-1]:
                read.unlink()
            file = root / f"{number:03d}-{batch:05d}.parquet"
            write_rows(file, workload.batch(number * 1_000_000 + batch), row_groups=1)
            arrived = time.time()
            variant.run(file)
            seconds.append(_sunk(variant.progress) - arrived)
            file.unlink()
    finally:
        variant.query.stop()
    return seconds[WARMUP:]


def _sunk(progress: dict[str, Any]) -> float:
    """Return when the sink of a batch was done: what follows in its trigger is Spark's commit log."""
    began = datetime.fromisoformat(progress["timestamp"]).timestamp()
    milliseconds = progress["durationMs"]
    return began + float(milliseconds["triggerExecution"] - milliseconds.get("commitOffsets", 0)) / 1000

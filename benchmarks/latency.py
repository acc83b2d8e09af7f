"""The latency of small batches: p50 and p99 from the arrival of rows to their results in the sink, with each state store.

``python -m benchmarks.latency --json result.json``

A query of counts and sums triggers as fast as it can. It gets some rows at a time, as a file, and the next ones once Spark has written
down that the batch is done. Rows arrive when their file appears in the folder of the source; their results have arrived when Spark is
done with the batch's sink. Rows that came during a batch would wait for its end besides, on every side alike.

One query runs at a time, the sides take turns in rounds, and a query goes on where it was stopped in the round before.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
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
    add_options,
    fairness,
    in_turn,
    own_operators,
    report_json,
    session,
    use_side,
    write_rows,
)
from benchmarks.nexmark.query import FleetOperators
from benchmarks.workloads import Counts
from statefleet.fleet import Fleet, connect

SIDES = (FLEET, *SPARK_STORES, PLAIN)


@dataclass(frozen=True)
class Trickle:
    """How rows come.

    Attributes
    ----------
    rows, keys
        Rows at a time, and the keys that they are drawn from.
    rounds, batches, warmup
        Rounds of all sides; measured batches of each side in a round, and batches before them.
    """

    sides: Sequence[str] = SIDES
    rows: int = 100
    keys: int = 10_000
    shards: int = 4
    rounds: int = 3
    batches: int = 50
    warmup: int = 5


def measure(spark: SparkSession, trickle: Trickle, root: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all sides; return the seconds of each: p50, p99 and all of them.

    Parameters
    ----------
    root
        A folder of its own.
    report
        Takes a line of text after each side of a round.
    """
    latencies: dict[str, list[float]] = {side: [] for side in trickle.sides}
    root.mkdir(parents=True)
    fleet = connect(f"file://{root}/fleet")
    try:
        for number in range(trickle.rounds):
            for side in in_turn(trickle.sides, number):
                seconds = _round(spark, fleet, trickle, side, number, root)
                latencies[side] += seconds
                report(f"  round {number}: {side:<10} p50 {statistics.median(seconds) * 1000:.0f} ms")
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


def _round(spark: SparkSession, fleet: Fleet, trickle: Trickle, side: str, number: int, root: Path) -> list[float]:
    """Run a side's batches of a round; return the seconds of those that are measured."""
    workload = Counts(trickle.rows, trickle.keys)
    source = spark.readStream.schema(workload.columns).parquet(str(Variant.input_folder(root, side)))
    use_side(spark, side, trickle.shards)
    spark.conf.set(POLLING, AT_ONCE)
    if side == PLAIN:
        frame = workload.plain(source, trickle.shards)
    else:
        ops = FleetOperators(fleet, side, trickle.shards) if side.startswith(FLEET) else own_operators
        frame = workload.query(ops, source, side)
    variant = Variant.start(side, root, frame, workload.mode)
    seconds = []
    try:
        for batch in range(trickle.warmup + trickle.batches):
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
    return seconds[trickle.warmup :]


def _sunk(progress: dict[str, Any]) -> float:
    """Return when the sink of a batch was done: what follows in its trigger is Spark's commit log."""
    began = datetime.fromisoformat(progress["timestamp"]).timestamp()
    milliseconds = progress["durationMs"]
    return began + float(milliseconds["triggerExecution"] - milliseconds.get("commitOffsets", 0)) / 1000


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=(__doc__ or "").split("\n")[0])
    default = Trickle()
    parser.add_argument("--rows", type=int, default=default.rows, help="rows at a time (%(default)s)")
    parser.add_argument("--keys", type=int, default=default.keys, help="distinct keys (%(default)s)")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="rounds of all sides (%(default)s)")
    parser.add_argument("--batches", type=int, default=default.batches, help="measured in a round (%(default)s)")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="batches before them (%(default)s)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    add_options(parser, executor_memory="2g")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit code."""
    options = _parse(argv)
    trickle = Trickle(**{item.name: getattr(options, item.name) for item in fields(Trickle)})
    with session("statefleet-latency", options) as (spark, root):
        results = measure(spark, trickle, root / "latency", functools.partial(print, flush=True))
    print(f"\n{fairness()}\n\n{trickle.rows} rows at a time; milliseconds from arrival to sink")
    for side, row in results.items():
        print(f"  {side:<10} p50 {row['p50_s'] * 1000:6.0f}  p99 {row['p99_s'] * 1000:6.0f}")
    report_json(options, rows=trickle.rows, keys=trickle.keys, shards=trickle.shards, fairness=fairness(), **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

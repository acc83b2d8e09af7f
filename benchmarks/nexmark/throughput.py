"""Events a second of Nexmark's stateful queries on the fleet, and on Spark's own state stores where plain Spark can run them.

``./run bench --only nexmark``; with ``--large`` all queries

All variants of a query live in one Spark session, read the same files and run one after another, in an order that rotates from round
to round, so slow drifts of the machine hit all alike. What counts is the median time of a micro-batch after the first ones; an event
is one of any of the three streams. Event time is a part of the workload (:class:`Runs`).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.harness import (
    FLEET,
    SPARK_STORES,
    in_turn,
    own_operators,
    summary,
    use_side,
)
from benchmarks.nexmark.files import read_stream, write_events
from benchmarks.nexmark.generator import Nexmark
from benchmarks.nexmark.query import FleetOperators, Operators, Query
from statefleet.fleet import Fleet


def _run(
    spark: SparkSession, query: Query, ops: Operators, variant: str, shards: int, events: Path, checkpoint: Path
) -> list[float]:
    """Run a query over all events; return the seconds of its micro-batches, as Spark measured them."""
    use_side(spark, variant, shards)
    writer = query.build(ops, read_stream(spark, events)).writeStream.outputMode(query.mode).format("noop")
    running = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    running.awaitTermination()
    by_batch = {progress["batchId"]: progress for progress in running.recentProgress if progress["numInputRows"] > 0}
    return [by_batch[batch]["durationMs"]["triggerExecution"] / 1000 for batch in sorted(by_batch)]


@dataclass(frozen=True)
class Runs:
    """How queries are run.

    Attributes
    ----------
    events, batch_events, rate
        Events of each run and of each of its micro-batches; events a second of event time.
    rounds
        Runs of each query on each variant.
    warmup
        First batches of a run that do not count: they compile and connect.
    """

    shards: int = 4
    events: int = 1_000_000
    batch_events: int = 100_000
    rate: int = 10_000
    rounds: int = 1
    warmup: int = 2

    def write(self, folder: Path) -> None:
        """Write the events."""
        write_events(folder, Nexmark(rate=self.rate), self.events, self.batch_events)


def measure(spark: SparkSession, fleet: Fleet, query: Query, runs: Runs, root: Path) -> dict[str, dict[str, Any]]:
    """Run a query on all variants that can run it; return the figures of each. `root` has the events (:meth:`Runs.write`)."""
    names = (FLEET, *SPARK_STORES) if query.plain_spark else (FLEET,)
    batch_s: dict[str, list[float]] = {name: [] for name in names}
    for number in range(runs.rounds):
        for name in in_turn(names, number):
            label = f"{query.name}-{name}-{number}"
            ops = FleetOperators(fleet, label, runs.shards) if name.startswith(FLEET) else own_operators
            seconds = _run(spark, query, ops, name, runs.shards, root / "events", root / label)
            # The last batch may have fewer events.
            batch_s[name] += seconds[runs.warmup : runs.events // runs.batch_events]
            print(f"  {label}: {' '.join(f'{batch_s:.2f}' for batch_s in seconds)} s", flush=True)
            shutil.rmtree(root / label, ignore_errors=True)
    results = {name: summary(seconds) for name, seconds in batch_s.items()}
    return {name: {**row, "events_per_s": runs.batch_events / row["median_s"]} for name, row in results.items()}

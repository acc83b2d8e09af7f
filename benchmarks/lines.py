"""The lines of ``python -m benchmarks``: which comparisons and measurements there are, how large, and what is expected of them.

A line gives rows: for each of its sides seconds (with quartiles), and the ratios of sides. A row is made of plain values, as it is in
``results.json``.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.harness import (
    AT_ONCE,
    FLEET,
    PLAIN,
    SHUFFLED,
    Operators,
    Target,
    in_turn,
    quartiles,
    ratios_of,
    summary,
    use_side,
    write_rows,
)
from benchmarks.nexmark.files import read_stream, write_events
from benchmarks.nexmark.generator import Nexmark
from benchmarks.nexmark.queries import QUERIES, Query
from benchmarks.operators import Plan, compare
from benchmarks.shared import SPARK_STORES
from benchmarks.workloads import Counts, Deduplicate, Join, Session, TextCounts, Top, Window, Workload
from statefleet.fleet import Fleet, connect

Row = dict[str, Any]

HDFS, ROCKSDB = SPARK_STORES
_OVER_STORES = Target(HDFS, FLEET), Target(ROCKSDB, FLEET)
_EVERY = (Target(FLEET, PLAIN), *_OVER_STORES)
_OVER_SHUFFLED = Target(FLEET, SHUFFLED, 0.7, is_least=False)


@dataclass(frozen=True)
class Line(ABC):
    """A line of the benchmark."""

    name: str
    title: str
    targets: Sequence[Target] = _EVERY

    @abstractmethod
    def run(self, spark: SparkSession, root: Path) -> list[Row]:
        """Measure; return the rows. `root` is a folder of its own."""

    def row(self, title: str, detail: str, sides: Mapping[str, Mapping[str, Any]]) -> Row:
        row: Row = {"line": self.name, "title": title, "detail": detail, "sides": dict(sides)}
        row["ratios"] = ratios_of(sides, self.targets)
        return row


@dataclass(frozen=True)
class OperatorLine(Line):
    """An operator at a steady state: all sides in turn, batch by batch."""

    workload: Callable[[], Workload] = field(kw_only=True)
    plan: Plan = field(kw_only=True)

    def run(self, spark: SparkSession, root: Path) -> list[Row]:
        workload = self.workload()
        sides = compare(spark, workload, self.plan, root)
        detail = (
            f"{workload.rows:,} rows, {workload.state:,} {workload.state_unit}, {self.plan.shards} shards; "
            f"{self.plan.batches} batches"
        )
        row = self.row(self.title, detail, sides)
        if PLAIN in sides:
            above = [a - b for a, b in zip(sides[FLEET]["batch_s"], sides[PLAIN]["batch_s"], strict=True)]
            row["above_plain_s"] = {"median": statistics.median(above), "quartiles": quartiles(above)}
        return [row]


@dataclass(frozen=True)
class NexmarkLine(Line):
    """Nexmark's stateful queries that plain Spark can run: a row for each.

    Sides of a query read the same files, one side after another. Event time, of 10,000 events a second, is a part of the workload.
    """

    targets: Sequence[Target] = _OVER_STORES
    shards: int = 4
    #: ``events``, ``batch_events``: Events, of any of the three streams, of each run and of each of its micro-batches.
    events: int = 500_000
    batch_events: int = 100_000
    #: Runs of each query on each side.
    rounds: int = 3
    #: First batches of a run that do not count: they compile and connect.
    warmup: int = 2

    def run(self, spark: SparkSession, root: Path) -> list[Row]:
        rows = []
        write_events(root / "events", Nexmark(), self.events, self.batch_events)
        fleet = connect(f"file://{root}/fleet")
        try:
            for query in QUERIES.values():
                sides = self._measured(spark, fleet, query, root)
                batches = len(sides[FLEET]["batch_s"])
                detail = f"{self.batch_events:,} events, {self.shards} shards; {batches} batches"
                rows.append(self.row(f"{self.title}: {query.name}", detail, sides))
        finally:
            fleet.shutdown()
        return rows

    def _measured(self, spark: SparkSession, fleet: Fleet, query: Query, root: Path) -> dict[str, dict[str, Any]]:
        sides = (FLEET, *SPARK_STORES)
        batch_s: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(self.rounds):
            for side in in_turn(sides, number):
                label = f"{query.name}-{side}-{number}"
                use_side(spark, side, self.shards)
                frame = query.build(Operators(fleet, side, self.shards, label), read_stream(spark, root / "events"))
                writer = frame.writeStream.outputMode(query.mode).format("noop").trigger(availableNow=True)
                running = writer.option("checkpointLocation", str(root / label)).start()
                running.awaitTermination()
                batches = {row["batchId"]: row for row in running.recentProgress if row["numInputRows"] > 0}
                seconds = [batches[batch]["durationMs"]["triggerExecution"] / 1000 for batch in sorted(batches)]
                # The last batch may have fewer events.
                batch_s[side] += seconds[self.warmup : self.events // self.batch_events]
                print(f"  {label}: {' '.join(f'{second:.2f}' for second in seconds)} s", flush=True)
                shutil.rmtree(root / label, ignore_errors=True)
        results = {side: summary(seconds) for side, seconds in batch_s.items()}
        return {side: {**row, "events_per_s": self.batch_events / row["median_s"]} for side, row in results.items()}


@dataclass(frozen=True)
class LatencyLine(Line):
    """From the arrival of a few rows to their results in the sink: a row for p50, and one for p99.

    A query of counts and sums triggers as fast as it can. It gets some rows at a time, as a file, and the next ones once Spark has
    written down that the batch is done. Rows arrive when their file appears in the folder of the source; their results have arrived
    when Spark is done with the batch's sink. Rows that came during a batch would wait for its end besides, on every side alike.

    One query runs at a time, the sides take turns in rounds, and a query goes on where it was stopped in the round before.
    """

    #: ``rows``, ``keys``: Rows at a time, and the keys that they are drawn from.
    rows: int = 100
    keys: int = 10_000
    shards: int = 4
    #: ``rounds``, ``batches``, ``warmup``: Rounds of all sides; measured batches of each side in a round, and batches before
    #: them.
    rounds: int = 2
    batches: int = 25
    warmup: int = 4

    def run(self, spark: SparkSession, root: Path) -> list[Row]:
        latencies: dict[str, list[float]] = {side: [] for side in (FLEET, SHUFFLED, *SPARK_STORES, PLAIN)}
        root.mkdir(parents=True)
        fleet = connect(f"file://{root}/fleet")
        try:
            for number in range(self.rounds):
                for side in in_turn(list(latencies), number):
                    seconds = self._round(spark, fleet, side, number, root)
                    latencies[side] += seconds
                    print(f"  round {number}: {side:<10} p50 {statistics.median(seconds) * 1000:.0f} ms", flush=True)
        finally:
            fleet.shutdown()
        detail = f"{self.rows} rows, {self.shards} shards; {self.rounds * self.batches} batches"
        middle = {
            side: {"median_s": float(np.percentile(seconds, 50)), "quartiles_s": quartiles(seconds)}
            for side, seconds in latencies.items()
        }
        worst = {side: {"median_s": float(np.percentile(seconds, 99))} for side, seconds in latencies.items()}
        return [self.row(f"{self.title}, p50", detail, middle), self.row(f"{self.title}, p99", detail, worst)]

    def _round(self, spark: SparkSession, fleet: Fleet, side: str, number: int, root: Path) -> list[float]:
        """Run a side's batches of a round; return the seconds of those that are measured."""
        workload = Counts(self.rows, self.keys)
        variant = workload.start(spark, fleet, side, self.shards, root, AT_ONCE)
        seconds = []
        try:
            for batch in range(self.warmup + self.batches):
                # Spark lists the folder in every trigger; it may ask for the last file again when a query is restarted.
                for read in sorted(variant.folder.iterdir())[:-1]:
                    read.unlink()
                file = root / f"{number:03d}-{batch:05d}.parquet"
                write_rows(file, workload.batch(number * 1_000_000 + batch), row_groups=1)
                arrived = time.time()
                variant.run(file)
                began = datetime.fromisoformat(variant.progress["timestamp"]).timestamp()
                took_ms = variant.progress["durationMs"]
                # What follows the sink in a trigger is Spark's commit log.
                sunk = began + float(took_ms["triggerExecution"] - took_ms.get("commitOffsets", 0)) / 1000
                seconds.append(sunk - arrived)
                file.unlink()
        finally:
            variant.query.stop()
        return seconds[self.warmup :]


@dataclass(frozen=True)
class ProgramLine(Line):
    """A benchmark that is a program of its own, and needs no session."""

    @abstractmethod
    def run(self, spark: SparkSession | None, root: Path) -> list[Row]:
        """Measure; see :meth:`Line.run`."""

    @staticmethod
    def figures(module: str, root: Path, *arguments: str) -> dict[str, Any]:
        """Run a program of this package; return the JSON that it writes."""
        root.mkdir(parents=True)
        file = root / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        measured: dict[str, Any] = json.loads(file.read_text())
        return measured


@dataclass(frozen=True)
class EngineLine(ProgramLine):
    """The engine alone, on one core."""

    #: Nanoseconds of an operation on integer keys over those of an upsert in a hash table that does nothing else.
    targets: Sequence[Target] = (Target("upsert", "table"), Target("get", "table"))
    keys: int = 2_000_000
    times: int = 7

    def run(self, spark: SparkSession | None, root: Path) -> list[Row]:
        engine = self.figures("engine", root, "--keys", str(self.keys), "--times", str(self.times))
        figures = {kind: engine[kind] for kind in ("int64 keys", "UUID text keys")}
        figures["int64 keys"] |= {
            "fold_ns": engine["count and sum, int64 keys"]["fold_ns"],
            **engine["a hash table alone, int64 keys"],
        }
        # Ratios of nanoseconds are ratios of seconds.
        sides = {
            name.removesuffix("_ns"): {"median_s": value / 1e9}
            for name, value in engine["int64 keys"].items()
            if name.endswith("_ns")
        }
        row = self.row(self.title, f"{engine['keys']:,} keys, {engine['rows']:,} rows a batch, one core", sides)
        return [{**row, "figures": figures}]


@dataclass(frozen=True)
class RealTimeLine(ProgramLine):
    """Count by key with Kafka in front and behind: from an event to its result, in a continuous query and in micro-batches."""

    #: Ratios of medians.
    targets: Sequence[Target] = (Target(ROCKSDB, FLEET, 10.0),)
    events: int = 1000
    keys: int = 100_000
    seconds: int = 20

    def run(self, spark: SparkSession | None, root: Path) -> list[Row]:
        case = ("--workloads", "count", "--rates", str(self.events), "--keys", str(self.keys), "--runs", "1")
        times = ("--warm-up", str(self.seconds), "--seconds", str(self.seconds))
        measured = self.figures("realtime", root, "--sides", "continuous,rocksdb", *case, *times)["rows"]
        names = {"continuous": FLEET, "rocksdb": ROCKSDB}
        sides = {names[row["side"]]: {"median_s": row["latency_ms"]["p50"] / 1000} for row in measured}
        row = self.row(self.title, f"{self.events:,} events a second, {self.keys:,} keys, Kafka to Kafka", sides)
        return [{**row, "latencies": measured}]


def _in_full(
    workload: Callable[[], Workload],
    sides: Sequence[str],
    name: str,
    title: str,
    targets: Sequence[Target] = _EVERY,
    **plan: Any,
) -> Line:
    steady = {"warmup": 1, "batches": 5, **plan}
    return OperatorLine(name, title, targets, workload=workload, plan=Plan(sides, **steady))


#: The promise, for batches of a million rows.
_LARGE = Target(HDFS, FLEET, 5.0), Target(ROCKSDB, FLEET, 8.0), Target(FLEET, PLAIN, 2.0, is_least=False)
#: Where keys repeat, Spark adds up before its store.
_FEW_KEYS = Target(HDFS, FLEET, 1.0), Target(ROCKSDB, FLEET), Target(FLEET, PLAIN, 2.0, is_least=False)
_SMALL = {"warmup": 3, "batches": 9}
_WITH_HDFS, _WITH_STORES = (FLEET, HDFS, PLAIN), (FLEET, HDFS, ROCKSDB, PLAIN)
#: About ten minutes on a quiet machine with two cores.
FULL: Sequence[Line] = (
    EngineLine("engine", "the engine alone"),
    RealTimeLine("realtime", "event to result"),
    _in_full(lambda: Counts(1_000_000, 5_000_000), _WITH_HDFS, "counts", "count and sum", _LARGE),
    _in_full(lambda: Counts(1_000_000, 100_000), _WITH_STORES, "hot", "count and sum, few keys", _FEW_KEYS),
    _in_full(lambda: Counts(200_000, 1_000_000), _WITH_STORES, "medium", "count and sum, smaller batches"),
    _in_full(lambda: TextCounts(500_000, 2_000_000), _WITH_HDFS, "text", "count and sum, UUID text keys"),
    _in_full(lambda: Counts(1_000, 100_000), (FLEET, SHUFFLED, PLAIN), "small", "small batches", (*_EVERY, _OVER_SHUFFLED), **_SMALL),
    _in_full(lambda: Counts(1_000, 100_000), (FLEET, PLAIN), "shards", "small batches", shards=32, **_SMALL),
    _in_full(lambda: Window(200_000, 600_000), _WITH_HDFS, "window", "windows"),
    _in_full(lambda: Session(200_000, 600_000), _WITH_HDFS, "session", "session windows"),
    _in_full(lambda: Deduplicate(200_000, 600_000), _WITH_HDFS, "dedup", "dropDuplicates"),
    _in_full(lambda: Join(200_000, 600_000), _WITH_HDFS, "join", "stream-stream join"),
    _in_full(lambda: Top(200_000, 600_000), _WITH_HDFS, "top", "topN"),
    LatencyLine("latency", "latency", (*_EVERY, _OVER_SHUFFLED)),
    NexmarkLine("nexmark", "Nexmark", events=80_000, batch_events=20_000, rounds=2, warmup=1),
)  # fmt: skip


def _quickly(workload: Callable[[], Workload], name: str, title: str, targets: Sequence[Target], **plan: Any) -> Line:
    """Return a line of the quick run; its targets have margins that noise does not reach."""
    sides = [FLEET, *dict.fromkeys(side for target in targets for side in (target.over, target.under) if side != FLEET)]
    steady = {"warmup": 2, "batches": 5, **plan}
    return OperatorLine(name, title, targets, workload=workload, plan=Plan(sides, **steady))


#: About two minutes on a quiet machine with two cores. Ratios stay within these margins also where the load is ten times its cores.
QUICK: Sequence[Line] = (
    EngineLine(
        "engine",
        "the engine alone",
        (Target("upsert", "table", 8.0, is_least=False), Target("get", "table", 6.0, is_least=False)),
        keys=500_000,
        times=3,
    ),
    _quickly(
        lambda: Counts(100_000, 300_000), "counts", "count and sum",
        (Target(FLEET, PLAIN, 4.0, is_least=False), Target(HDFS, FLEET, 0.8)),
    ),
    _quickly(
        lambda: Counts(1_000, 50_000), "small", "small batches",
        (Target(FLEET, PLAIN, 4.0, is_least=False),), batches=7,
    ),
    _quickly(lambda: Join(50_000, 150_000), "join", "stream-stream join", (Target(HDFS, FLEET, 0.8),)),
)  # fmt: skip

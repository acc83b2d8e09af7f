"""The lines of ``python -m benchmarks``: which comparisons and measurements there are, how large, and what is expected of them.

A line gives rows: for each of its sides seconds (with quartiles), and the ratios of sides. A row is made of plain values, as it is in
``results.json``.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks import latency
from benchmarks.harness import FLEET, PLAIN, SPARK_STORES, Target, quartiles, ratios_of
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.throughput import Runs, measure
from benchmarks.operators import Plan, compare
from benchmarks.workloads import WORKLOADS, Counts, Deduplicate, Join, Session, TextCounts, Top, Window, Workload
from statefleet.fleet import connect

Row = dict[str, Any]

HDFS, ROCKSDB = SPARK_STORES
_OVER_STORES = Target(HDFS, FLEET), Target(ROCKSDB, FLEET)
_EVERY = (Target(FLEET, PLAIN), *_OVER_STORES)


@dataclass(frozen=True)
class Line(ABC):
    """A line of the benchmark."""

    name: str
    title: str
    targets: Sequence[Target] = _EVERY

    @abstractmethod
    def run(self, spark: SparkSession, root: Path) -> list[Row]:
        """Measure; return the rows. `root` is a folder of its own."""

    def beside(self, side: str) -> Line:
        """Return the line with a further store of Spark's, if it does not have all."""
        return self

    def row(self, title: str, detail: str, sides: Mapping[str, Mapping[str, Any]]) -> Row:
        """Return a row of the line."""
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
        if PLAIN in sides and "batch_s" in sides[FLEET]:
            above = [a - b for a, b in zip(sides[FLEET]["batch_s"], sides[PLAIN]["batch_s"], strict=True)]
            row["above_plain_s"] = {"median": statistics.median(above), "quartiles": quartiles(above)}
        return [row]

    def beside(self, side: str) -> Line:
        sides = [FLEET, side, *(other for other in self.plan.sides if other not in (FLEET, side))]
        return replace(self, plan=replace(self.plan, sides=sides))


@dataclass(frozen=True)
class NexmarkLine(Line):
    """Nexmark's stateful queries, or those that plain Spark can run: a row for each."""

    targets: Sequence[Target] = _OVER_STORES
    runs: Runs = field(kw_only=True)
    has_all: bool = False

    def run(self, spark: SparkSession, root: Path) -> list[Row]:
        queries = [query for query in QUERIES.values() if self.has_all or query.plain_spark]
        runs, rows = self.runs, []
        runs.write(root / "events")
        fleet = connect(f"file://{root}/fleet")
        try:
            for query in queries:
                sides = measure(spark, fleet, query, runs, root)
                batches = len(sides[FLEET]["batch_s"])
                detail = f"{runs.batch_events:,} events, {runs.shards} shards; {batches} batches"
                rows.append(self.row(f"{self.title}: {query.name}", detail, sides))
        finally:
            fleet.shutdown()
        return rows


@dataclass(frozen=True)
class LatencyLine(Line):
    """From the arrival of a few rows to their results in the sink: a row for p50, and one for p99."""

    def run(self, spark: SparkSession, root: Path) -> list[Row]:
        measured = latency.measure(spark, root)
        detail = f"{latency.ROWS} rows, {latency.SHARDS} shards; {latency.ROUNDS * latency.BATCHES} batches"
        middle = {
            side: {"median_s": row["p50_s"], "quartiles_s": quartiles(row["batch_s"])} for side, row in measured.items()
        }
        worst = {side: {"median_s": row["p99_s"]} for side, row in measured.items()}
        return [self.row(f"{self.title}, p50", detail, middle), self.row(f"{self.title}, p99", detail, worst)]


@dataclass(frozen=True)
class EngineLine(Line):
    """The engine alone, on one core, in a process of its own; it needs no session."""

    #: Nanoseconds of an operation on integer keys over those of an upsert in a hash table that does nothing else.
    targets: Sequence[Target] = (Target("upsert", "table"), Target("get", "table"))
    keys: int = 2_000_000
    times: int = 7

    def run(self, spark: SparkSession | None, root: Path) -> list[Row]:
        root.mkdir(parents=True)
        file = root / "engine.json"
        sizes = ("--keys", str(self.keys), "--times", str(self.times))
        command = [sys.executable, "-m", "benchmarks.engine", *sizes, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        engine = json.loads(file.read_text())
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


#: Where keys repeat, Spark adds up before its store.
_FEW_KEYS = Target(HDFS, FLEET, 1.0), Target(ROCKSDB, FLEET), Target(FLEET, PLAIN, 2.0, is_least=False)
_SMALL = {"warmup": 3, "batches": 9}
_WITH_HDFS, _WITH_STORES = (FLEET, HDFS, PLAIN), (FLEET, HDFS, ROCKSDB, PLAIN)
#: About ten minutes on a quiet machine with two cores.
FULL: Sequence[Line] = (
    EngineLine("engine", "the engine alone"),
    _in_full(lambda: Counts(1_000_000, 5_000_000), _WITH_HDFS, "counts", "count and sum", Counts.targets),
    _in_full(lambda: Counts(1_000_000, 100_000), _WITH_STORES, "hot", "count and sum, few keys", _FEW_KEYS),
    _in_full(lambda: Counts(200_000, 1_000_000), _WITH_STORES, "medium", "count and sum, smaller batches"),
    _in_full(lambda: TextCounts(500_000, 2_000_000), _WITH_HDFS, "text", "count and sum, UUID text keys"),
    _in_full(lambda: Counts(1_000, 100_000), (FLEET, PLAIN), "small", "small batches", **_SMALL),
    _in_full(lambda: Counts(1_000, 100_000), (FLEET, PLAIN), "shards", "small batches", shards=32, **_SMALL),
    _in_full(lambda: Window(200_000, 600_000), _WITH_HDFS, "window", "windows"),
    _in_full(lambda: Session(200_000, 600_000), _WITH_HDFS, "session", "session windows"),
    _in_full(lambda: Deduplicate(200_000, 600_000), _WITH_HDFS, "dedup", "dropDuplicates"),
    _in_full(lambda: Join(200_000, 600_000), _WITH_HDFS, "join", "stream-stream join"),
    _in_full(lambda: Top(200_000, 600_000), _WITH_HDFS, "top", "topN"),
    LatencyLine("latency", "latency"),
    NexmarkLine("nexmark", "Nexmark", runs=Runs(events=80_000, batch_events=20_000, rounds=2, warmup=1)),
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


def large(rows: int, state: int, active_keys: int) -> list[Line]:
    """Return the lines of the large run: every operator that the installed Spark has, and all Nexmark queries."""
    lines: list[Line] = []
    for kind in WORKLOADS.values():
        if kind.missing:
            continue
        sizes = kind.rows_a_key * active_keys or rows, state
        # RocksDB, which takes minutes, only where Spark's operator needs it.
        sides = (*kind.forms, *kind.stores[:1], PLAIN)
        workload = functools.partial(kind, *sizes)
        lines.append(OperatorLine(kind.name, kind.name, kind.comparisons(*sizes), workload=workload, plan=Plan(sides)))
    return [*lines, NexmarkLine("nexmark", "Nexmark", runs=Runs(events=500_000, rounds=3), has_all=True)]

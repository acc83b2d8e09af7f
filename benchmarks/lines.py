"""The lines of ``python -m benchmarks``: which comparisons and measurements there are, how large, and what is expected of them.

A line gives rows: for each of its sides seconds (with quartiles), and the ratios of sides. A row is made of plain values, as it is in
``results.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.harness import FLEET, PLAIN, SPARK_STORES, Target, quartiles, ratios_of
from benchmarks.latency import Trickle
from benchmarks.latency import measure as measure_latency
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.throughput import Runs
from benchmarks.nexmark.throughput import measure as measure_query
from benchmarks.operators import Plan, compare, steps_of
from benchmarks.workloads import Counts, Deduplicate, Join, Session, TextCounts, Top, Window, Workload
from statefleet.fleet import connect

Row = dict[str, Any]
#: Takes the share of a line that is done.
Step = Callable[[float], None]

HDFS, ROCKSDB = SPARK_STORES
_OVER_STORES = Target(HDFS, FLEET), Target(ROCKSDB, FLEET)
_EVERY = (Target(FLEET, PLAIN), *_OVER_STORES)


@dataclass(frozen=True)
class Line(ABC):
    """A line of the benchmark.

    Attributes
    ----------
    name, title
        Name for ``--only``, and title for readers.
    expected_s
        About how long it takes on two cores, for the progress bar.
    targets
        The ratios that it reports, with their margins.
    """

    name: str
    title: str
    expected_s: float
    targets: Sequence[Target] = _EVERY

    @abstractmethod
    def run(self, spark: SparkSession, root: Path, step: Step) -> list[Row]:
        """Measure; return the rows. `root` is a folder of its own."""

    def beside(self, side: str) -> Line:
        """Return the line with a further store of Spark's, if it is one with sides."""
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

    def run(self, spark: SparkSession, root: Path, step: Step) -> list[Row]:
        workload, done = self.workload(), 0
        steps = steps_of(workload, self.plan)

        def report(text: str) -> None:
            nonlocal done
            done += 1
            step(done / steps)

        sides = compare(spark, workload, self.plan, root, report)
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
    """Nexmark's stateful queries that plain Spark can run: a row for each, and the best of Spark's stores."""

    targets: Sequence[Target] = _OVER_STORES
    runs: Runs = field(kw_only=True)

    def run(self, spark: SparkSession, root: Path, step: Step) -> list[Row]:
        queries = [query for query in QUERIES.values() if query.plain_spark]
        runs, done, rows = self.runs, 0, []
        total = len(queries) * len(runs.variants) * runs.rounds

        def report(text: str) -> None:
            nonlocal done
            done += 1
            step(done / total)

        runs.write(root / "events")
        fleet = connect(f"file://{root}/fleet")
        try:
            for query in queries:
                sides = measure_query(spark, fleet, query, runs, root, report)
                batches = len(sides[FLEET]["batch_s"])
                detail = f"{runs.batch_events:,} events, {runs.shards} shards; {batches} batches"
                rows.append(self.row(f"{self.title}: {query.name}", detail, sides))
        finally:
            fleet.shutdown()
        return rows

    def beside(self, side: str) -> Line:
        return replace(
            self,
            runs=replace(self.runs, variants=list(dict.fromkeys((*self.runs.variants, side)))),
        )


@dataclass(frozen=True)
class LatencyLine(Line):
    """From the arrival of a few rows to their results in the sink: a row for p50, and one for p99."""

    trickle: Trickle = field(kw_only=True)

    def run(self, spark: SparkSession, root: Path, step: Step) -> list[Row]:
        trickle, done = self.trickle, 0

        def report(text: str) -> None:
            nonlocal done
            done += 1
            step(done / (trickle.rounds * len(trickle.sides)))

        measured = measure_latency(spark, trickle, root, report)
        detail = f"{trickle.rows} rows, {trickle.shards} shards; {trickle.rounds * trickle.batches} batches"
        middle = {
            side: {"median_s": row["p50_s"], "quartiles_s": quartiles(row["batch_s"])} for side, row in measured.items()
        }
        worst = {side: {"median_s": row["p99_s"]} for side, row in measured.items()}
        return [self.row(f"{self.title}, p50", detail, middle), self.row(f"{self.title}, p99", detail, worst)]

    def beside(self, side: str) -> Line:
        return replace(
            self,
            trickle=replace(self.trickle, sides=list(dict.fromkeys((*self.trickle.sides, side)))),
        )


@dataclass(frozen=True)
class EngineLine(Line):
    """The engine alone, on one core, in a process of its own; it needs no session."""

    #: Nanoseconds of an operation on integer keys over those of an upsert in a hash table that does nothing else.
    targets: Sequence[Target] = (Target("upsert", "table"), Target("get", "table"))
    keys: int = 2_000_000
    times: int = 7

    def run(self, spark: SparkSession | None, root: Path, step: Step) -> list[Row]:
        root.mkdir(parents=True)
        engine = _measured("engine", root, "--keys", str(self.keys), "--times", str(self.times))
        step(0.6)
        loading = _measured("loading", root, "--rows", str(self.keys // 2), "--deltas", "3", "--times", "3")
        step(1.0)
        figures = {kind: engine[kind] for kind in ("int64 keys", "UUID text keys")}
        figures["int64 keys"] |= {
            "fold_ns": engine["count and sum, int64 keys"]["fold_ns"],
            **engine["a hash table alone, int64 keys"],
            "loaded_rows_per_s": loading["load_rows_per_s"],
        }
        # Ratios of nanoseconds are ratios of seconds.
        sides = {
            name.removesuffix("_ns"): {"median_s": value / 1e9}
            for name, value in engine["int64 keys"].items()
            if name.endswith("_ns")
        }
        row = self.row(self.title, f"{engine['keys']:,} keys, {engine['rows']:,} rows a batch, one core", sides)
        return [{**row, "figures": figures}]


def _measured(measurement: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a measurement without Spark on one core, and return its figures."""
    file = folder / f"{measurement}.json"
    command = [sys.executable, "-m", f"benchmarks.{measurement}", *arguments, "--json", str(file)]
    core = {min(os.sched_getaffinity(0))}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, core))
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def _in_full(
    workload: Callable[[], Workload],
    sides: Sequence[str],
    name: str,
    title: str,
    expected_s: float,
    targets: Sequence[Target] = _EVERY,
    **plan: Any,
) -> Line:
    """Return a line of the full run."""
    steady = {"warmup": 1, "batches": 5, **plan}
    return OperatorLine(name, title, expected_s, targets, workload=workload, plan=Plan(sides, **steady))


#: Where keys repeat, Spark adds up before its store.
_FEW_KEYS = Target(HDFS, FLEET, 1.0), Target(ROCKSDB, FLEET), Target(FLEET, PLAIN, 2.0, is_least=False)
_SMALL = {"warmup": 3, "batches": 9}
_WITH_HDFS, _WITH_STORES = (FLEET, HDFS, PLAIN), (FLEET, HDFS, ROCKSDB, PLAIN)
#: About ten minutes on a quiet machine with two cores.
FULL: Sequence[Line] = (
    EngineLine("engine", "the engine alone", 25),
    _in_full(lambda: Counts(1_000_000, 5_000_000), _WITH_HDFS, "counts", "count and sum", 110, Counts.targets),
    _in_full(lambda: Counts(1_000_000, 100_000), _WITH_STORES, "hot", "count and sum, few keys", 50, _FEW_KEYS),
    _in_full(lambda: Counts(200_000, 1_000_000), _WITH_STORES, "medium", "count and sum, smaller batches", 70),
    _in_full(lambda: TextCounts(500_000, 2_000_000), _WITH_HDFS, "text", "count and sum, UUID text keys", 60),
    _in_full(lambda: Counts(1_000, 100_000), (FLEET, PLAIN), "small", "small batches", 12, **_SMALL),
    _in_full(lambda: Counts(1_000, 100_000), (FLEET, PLAIN), "shards", "small batches", 25, shards=32, **_SMALL),
    _in_full(lambda: Window(200_000, 600_000), _WITH_HDFS, "window", "windows", 25),
    _in_full(lambda: Session(200_000, 600_000), _WITH_HDFS, "session", "session windows", 35),
    _in_full(lambda: Deduplicate(200_000, 600_000), _WITH_HDFS, "dedup", "dropDuplicates", 20),
    _in_full(lambda: Join(200_000, 600_000), _WITH_HDFS, "join", "stream-stream join", 35),
    _in_full(lambda: Top(200_000, 600_000), _WITH_HDFS, "top", "topN", 25),
    LatencyLine("latency", "latency", 50, trickle=Trickle(rounds=2, batches=25, warmup=4)),
    NexmarkLine(
        "nexmark",
        "Nexmark",
        130,
        runs=Runs(events=80_000, batch_events=20_000, rounds=2, warmup=1),
    ),
)  # fmt: skip


def _quickly(workload: Callable[[], Workload], name: str, title: str, targets: Sequence[Target], **plan: Any) -> Line:
    """Return a line of the quick run; its targets have margins that noise does not reach."""
    sides = [FLEET, *dict.fromkeys(side for target in targets for side in (target.over, target.under) if side != FLEET)]
    steady = {"warmup": 2, "batches": 5, **plan}
    return OperatorLine(name, title, 15, targets, workload=workload, plan=Plan(sides, **steady))


#: About two minutes on a quiet machine with two cores. Ratios stay within these margins also where the load is ten times its cores.
QUICK: Sequence[Line] = (
    EngineLine(
        "engine",
        "the engine alone",
        15,
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

"""A stateful operator in a steady state, on the fleet and on Spark's own stores, side by side in one run.

Their input is in :mod:`benchmarks.workloads`; how the sides take turns, in :mod:`benchmarks.harness`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from benchmarks.harness import in_turn, summary, write_rows
from benchmarks.workloads import Workload
from statefleet.fleet import Fleet, connect

#: The purpose of a batch: to build up state, to warm up, or to be measured.
_FILL, _WARM_UP, _BATCH = "fill", "warm-up", "batch"

#: Results of the sides of a comparison, by their name.
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    sides: Sequence[str]
    shards: int = 4
    warmup: int = 2
    batches: int = 5


class _Comparison:
    """A workload on all sides of a plan."""

    def __init__(self, spark: SparkSession, fleet: Fleet, workload: Workload, plan: Plan, root: Path) -> None:
        self._workload, self._plan = workload, plan
        self._files = root / "files"
        self._files.mkdir(parents=True)
        self._variants = [workload.start(spark, fleet, side, plan.shards, root) for side in plan.sides]

    def run(self) -> Results:
        warmup, batches = self._plan.warmup, self._plan.batches
        try:
            for number, rows in enumerate(self._workload.filling()):
                self._batch(_FILL, number, rows)
            for number in range(warmup + batches):
                self._batch(_WARM_UP if number < warmup else _BATCH, number, self._workload.batch(number))
            return {
                variant.name: {**summary(variant.batch_s), "fill_s": variant.fill_s, "rows_out": variant.rows_out}
                for variant in self._variants
            }
        finally:
            for variant in self._variants:
                variant.query.stop()

    def _batch(self, phase: str, number: int, rows: pa.Table) -> None:
        file = write_rows(self._files / f"{phase}-{number:04d}.parquet", rows)
        seconds = []
        for variant in in_turn(self._variants, number):
            took_s = variant.run(file)
            seconds.append(f"{variant.name} {took_s:.2f} s")
            if phase == _BATCH:
                variant.batch_s.append(took_s)
                variant.rows_out.append(int(variant.progress["sink"]["numOutputRows"]))
            else:
                variant.fill_s.append(took_s)
        print(f"  {phase} {number}, {rows.num_rows:,} rows: {'  '.join(seconds)}", flush=True)


def compare(spark: SparkSession, workload: Workload, plan: Plan, root: Path) -> Results:
    """Run a workload on all sides of a plan, and return their figures; `root` is a folder of its own, which is deleted.

    The fleet is of this workload alone, so that memory has nothing of another.
    """
    fleet = connect(f"file://{root}/fleet")
    try:
        return _Comparison(spark, fleet, workload, plan, root).run()
    finally:
        fleet.shutdown()
        shutil.rmtree(root, ignore_errors=True)

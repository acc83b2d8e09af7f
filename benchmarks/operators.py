"""A stateful operator in a steady state, on the fleet and on Spark's own stores, side by side in one run.

``./run bench`` measures some of them in ten minutes, ``./run bench --large`` all of them. Their input is in
:mod:`benchmarks.workloads`; how the sides take turns, in :mod:`benchmarks.harness`. A variant whose batch takes too long is stopped,
and its ratios are lower bounds.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from benchmarks.harness import DidNotFinish, Variant, in_turn, summary, write_rows
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
    limit_s: float = 600.0


class _Comparison:
    """A workload on all sides of a plan."""

    def __init__(self, spark: SparkSession, fleet: Fleet, workload: Workload, plan: Plan, root: Path) -> None:
        self._fleet, self._workload, self._plan = fleet, workload, plan
        self._files = root / "files"
        self._files.mkdir(parents=True)
        self._variants = [workload.start(spark, fleet, side, plan.shards, root) for side in plan.sides]

    def run(self) -> Results:
        """Run all batches, and return the figures of each variant."""
        warmup, batches = self._plan.warmup, self._plan.batches
        try:
            for number, rows in enumerate(self._workload.filling()):
                self._batch(_FILL, number, rows)
            for number in range(warmup + batches):
                self._batch(_WARM_UP if number < warmup else _BATCH, number, self._workload.batch(number))
            return {variant.name: self._figures(variant) for variant in self._variants}
        finally:
            for variant in self._variants:
                variant.query.stop()

    def _batch(self, phase: str, number: int, rows: pa.Table) -> None:
        """Give all variants the same rows."""
        file = write_rows(self._files / f"{phase}-{number:04d}.parquet", rows)
        for variant in in_turn(self._variants, number):
            if not variant.failure:
                self._try(variant, file, phase)
        seconds = [
            f"{variant.name} {(variant.batch_s if phase == _BATCH else variant.fill_s)[-1]:.2f} s"
            for variant in self._variants
            if not variant.failure
        ]
        print(f"  {phase} {number}, {rows.num_rows:,} rows: {'  '.join(seconds)}", flush=True)

    def _try(self, variant: Variant, file: Path, phase: str) -> None:
        """Run a batch of one variant; if it fails, the others go on without it."""
        # A batch that fills the state may be twice as large.
        limit_s = self._plan.limit_s * (2 if phase == _FILL else 1)
        try:
            took_s = variant.run(file, limit_s)
            if phase == _BATCH:
                variant.batch_s.append(took_s)
                variant.rows_out.append(int(variant.progress["sink"]["numOutputRows"]))
            else:
                variant.fill_s.append(took_s)
        except DidNotFinish as error:
            variant.failure = str(error)
            # A batch of the steady size bounds the ratio.
            variant.limit_s = None if phase == _FILL else limit_s
        except StreamingQueryException as error:
            variant.failure = f"failed: {str(error).strip()[:2000]}"
        if variant.failure:
            print(f"  {variant.name}: {variant.failure}", flush=True)

    def _figures(self, variant: Variant) -> dict[str, Any]:
        figures: dict[str, Any] = {"fill_s": variant.fill_s, "state_rows": self._state_rows(variant)}
        if variant.failure:
            bound = {} if variant.limit_s is None else {"limit_s": variant.limit_s}
            return {**figures, "failure": variant.failure, **bound}
        return {**figures, **summary(variant.batch_s), "rows_out": variant.rows_out}

    def _state_rows(self, variant: Variant) -> int | None:
        if variant.states:
            queries = self._fleet.status()["queries"]
            return sum(int(query["state_rows"]) for query in queries if query["name"] in variant.states)
        operators = variant.progress.get("stateOperators", [])
        return sum(int(operator["numRowsTotal"]) for operator in operators) if operators else None


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

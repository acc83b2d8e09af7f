"""Median steady micro-batch time of every kind of stateful operator, on the fleet and on Spark's own stores, side by side in one run.

``python -m benchmarks.operators --json result.json``, or ``--only dedup,join`` and so on. ``python -m benchmarks`` has a part of it
for all to see, in ten minutes. Their input is in :mod:`benchmarks.workloads`; how the sides take turns, in :mod:`benchmarks.harness`.

A variant whose batch takes longer than ``--limit`` is stopped, and its ratios are lower bounds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from benchmarks.harness import (
    FLEET,
    PLAIN,
    SMALL_SPLITS,
    SPARK_STORES,
    DidNotFinish,
    Variant,
    add_options,
    fairness,
    in_turn,
    own_operators,
    print_ratios,
    ratios_of,
    report_json,
    session,
    some_of,
    summary,
    use_side,
    write_rows,
)
from benchmarks.nexmark.query import FleetOperators
from benchmarks.workloads import WORKLOADS, Workload
from statefleet.fleet import Fleet, connect

#: The purpose of a batch: to build up state, to warm up, or to be measured.
_FILL, _WARM_UP, _BATCH = "fill", "warm-up", "batch"

#: Results of the sides of a comparison, by their name.
Results = dict[str, dict[str, Any]]


# -- one operator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How a workload is compared.

    Attributes
    ----------
    sides
        Names of the sides: forms of the workload on the fleet, Spark's stores, :data:`PLAIN`.
    shards
        Shards, and shuffle partitions of Spark's own.
    warmup, batches
        Batches of each side before the measured ones, and measured ones.
    limit_s
        Seconds that a batch may take.
    """

    sides: Sequence[str]
    shards: int = 4
    warmup: int = 2
    batches: int = 5
    limit_s: float = 600.0


class _Comparison:
    """A workload on all sides of a plan.

    Parameters
    ----------
    root
        A folder of its own.
    report
        Takes a line of text after each batch of all sides.
    """

    def __init__(
        self,
        spark: SparkSession,
        fleet: Fleet,
        workload: Workload,
        plan: Plan,
        root: Path,
        report: Callable[[str], None],
    ) -> None:
        self._spark, self._fleet, self._workload, self._plan, self._root = spark, fleet, workload, plan, root
        self._report = report
        self._files = root / "files"
        self._files.mkdir(parents=True)
        #: Names of the states of each variant on the fleet.
        self._states: dict[str, list[str]] = {}
        self._variants = [self._start(name) for name in plan.sides]

    def _start(self, name: str) -> Variant:
        workload = self._workload
        source = self._spark.readStream.schema(workload.columns).option("maxFilesPerTrigger", 1)
        frame = source.parquet(str(Variant.input_folder(self._root, name)))
        use_side(self._spark, name, self._plan.shards)
        if name == PLAIN:
            result = workload.plain(frame, self._plan.shards)
        elif name.startswith(FLEET):
            ops = FleetOperators(self._fleet, name, self._plan.shards)
            result = workload.query(ops, frame, name)
            self._states[name] = ops.states
        else:
            result = workload.query(own_operators, frame, name)
        return Variant.start(name, self._root, result, workload.mode)

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
        self._report(f"  {phase} {number}, {rows.num_rows:,} rows: {'  '.join(seconds)}")

    def _try(self, variant: Variant, file: Path, phase: str) -> None:
        """Run a batch of one variant; if it fails, the others go on without it."""
        # A batch that fills the state may be twice as large.
        limit_s = self._plan.limit_s * (2 if phase == _FILL else 1)
        try:
            if phase == _BATCH:
                variant.measure(file, limit_s)
            else:
                variant.fill_s.append(variant.run(file, limit_s))
        except DidNotFinish as error:
            variant.failure = str(error)
            # A batch of the steady size bounds the ratio.
            variant.limit_s = None if phase == _FILL else limit_s
        except StreamingQueryException as error:
            variant.failure = f"failed: {str(error).strip()[:2000]}"
        if variant.failure:
            self._report(f"  {variant.name}: {variant.failure}")

    def _figures(self, variant: Variant) -> dict[str, Any]:
        figures: dict[str, Any] = {"fill_s": variant.fill_s, "state_rows": self._state_rows(variant)}
        if variant.failure:
            bound = {} if variant.limit_s is None else {"limit_s": variant.limit_s}
            return {**figures, "failure": variant.failure, **bound}
        return {**figures, **summary(variant.batch_s), "rows_out": variant.rows_out}

    def _state_rows(self, variant: Variant) -> int | None:
        """Return the rows in the state at the end."""
        if variant.name in self._states:
            queries, states = self._fleet.status()["queries"], self._states[variant.name]
            return sum(int(query["state_rows"]) for query in queries if query["name"] in states)
        operators = variant.progress.get("stateOperators", [])
        return sum(int(operator["numRowsTotal"]) for operator in operators) if operators else None


@contextmanager
def _fleet_of(root: Path) -> Iterator[Fleet]:
    """Connect to a fleet for one operator only, so that memory has nothing of the operator before."""
    fleet = connect(f"file://{root}/fleet")
    try:
        yield fleet
    finally:
        fleet.shutdown()


def _workload(name: str, options: argparse.Namespace) -> Workload:
    kind = WORKLOADS[name]
    return kind(kind.rows_a_key * options.active_keys or options.rows, options.state)


def _say(text: str) -> None:
    print(text, flush=True)


def compare(
    spark: SparkSession,
    workload: Workload,
    plan: Plan,
    root: Path,
    report: Callable[[str], None] = _say,
) -> Results:
    """Run a workload on all sides of a plan, and return their figures; `root` is a folder of its own, which is deleted.

    Parameters
    ----------
    report
        Takes a line of text after each batch of all sides (:func:`steps_of`).
    """
    try:
        with _fleet_of(root) as fleet:
            return _Comparison(spark, fleet, workload, plan, root, report).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def steps_of(workload: Workload, plan: Plan) -> int:
    """Return the number of batches of a comparison, each of all sides."""
    return workload.filling_batches + plan.warmup + plan.batches


# -- the report -------------------------------------------------------------------------------------------------------


def _report(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    print(
        f"\n{fairness()} Spark's stores close state by the watermark of the batch before, so they hold a batch more.\n"
    )
    print(
        f"{'operator':<16} {'variant':<17} {'median':>8} {'(min .. max) s a batch':<24} {'state rows':>11} {'rows out':>10}"
    )
    for operator, variants in results.items():
        for name, row in variants.items():
            if "failure" in row:
                print(f"{operator:<16} {name:<17} {row['failure'].splitlines()[0][:90]}")
                continue
            span = f"({row['min_s']:.2f} .. {row['max_s']:.2f})"
            state_rows = "" if row["state_rows"] is None else f"{row['state_rows']:,}"
            emitted = f"{sum(row['rows_out']) // len(row['rows_out']):,}"
            print(f"{operator:<16} {name:<17} {row['median_s']:8.3f} {span:<24} {state_rows:>11} {emitted:>10}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only",
        type=some_of("operator", WORKLOADS),
        default=[name for name, workload in WORKLOADS.items() if not workload.missing],
        help=f"some of {','.join(WORKLOADS)} (default: all that the installed Spark has)",
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows a batch (%(default)s)")
    parser.add_argument("--state", type=int, default=3_000_000, help="rows in the state, about (%(default)s)")
    parser.add_argument("--active-keys", type=int, default=20_000, help="keys a batch of profiles (%(default)s)")
    parser.add_argument("--batches", type=int, default=5, help="measured batches of each variant (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="batches before them that do not count (%(default)s)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a batch may take (%(default)s)")
    parser.add_argument(
        "--stores",
        type=some_of("store", SPARK_STORES),
        default=list(SPARK_STORES),
        help=f"Spark's stores to compare with: some of {','.join(SPARK_STORES)} (default: all; the last is by far the slowest)",
    )
    add_options(parser, executor_memory="6g")
    options = parser.parse_args(argv)
    if min(options.rows, options.state, options.active_keys, options.batches) < 1:
        parser.error("rows, state, active keys and batches are at least 1")
    for name in options.only:
        if WORKLOADS[name].missing:
            parser.error(f"{name}: {WORKLOADS[name].missing}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons; returns 1 if one of the fleet's own variants failed, 0 even if a target is missed."""
    options = _parse(argv)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    workloads = [_workload(name, options) for name in options.only]
    with session("statefleet-operators", options, SMALL_SPLITS) as (spark, root):
        for workload in workloads:
            print(f"{workload.name}: {workload.rows:,} rows a batch, {options.shards} partitions", flush=True)
            stores = [store for store in options.stores if store in workload.stores]
            sides = (*workload.forms, *stores, PLAIN)
            plan = Plan(sides, options.shards, options.warmup, options.batches, options.limit)
            results[workload.name] = compare(spark, workload, plan, root / workload.name)
    ratios = [
        ratio
        for workload in workloads
        for ratio in ratios_of(results[workload.name], workload.comparisons(), operator=workload.name)
    ]
    _report(results)
    print_ratios(ratios, "operator")
    sizes = {key: getattr(options, key) for key in ("rows", "state", "active_keys", "batches", "shards")}
    report_json(options, **sizes, fairness=fairness(), results=results, ratios=ratios)
    return int(
        any("failure" in row for rows in results.values() for name, row in rows.items() if name.startswith(FLEET))
    )


if __name__ == "__main__":
    sys.exit(main())

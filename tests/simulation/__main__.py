"""``python -m tests.simulation --seed N`` replays a schedule; ``--seeds N [--from M]`` runs many, on every core."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.world import run_seed

_AT_ONCE = 25


def main() -> int:
    """Run what was asked; 1 if a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--seed", type=int, help="run this schedule and print its trace")
    mode.add_argument("--seeds", type=int, help="run this many schedules and print totals")
    parser.add_argument("--from", type=int, default=0, dest="first", help="first of --seeds")
    parser.add_argument("--jobs", type=int, help="processes (default: one a core)")
    parser.add_argument("--harsh", action="store_true", help="with --seed: the worst faults there are")
    parser.add_argument("--rescales", action="store_true", help="with --seed: a state that is rescaled")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed, harsh=arguments.harsh, rescales=arguments.rescales)
    return survey(range(arguments.first, arguments.first + arguments.seeds), arguments.jobs)


def replay(seed: int, *, harsh: bool, rescales: bool) -> int:
    """Run a schedule and print all of it."""
    outcome = run_seed(seed, harsh=harsh, keyed=False if rescales else None, rescales=rescales)
    print(outcome.report())
    if outcome.error is None:
        return 0
    traceback.print_exception(outcome.error)
    return 1


@dataclass(slots=True)
class Totals:
    """Sums over schedules, and the failed ones with their trace."""

    schedules: int = 0
    steps: int = 0
    records: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    #: seed -> trace, error and how to see it again
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, more: Totals) -> None:
        self.schedules += more.schedules
        self.steps += more.steps
        self.records += more.records
        self.faults += more.faults
        self.failed |= more.failed


def run_some(seeds: range) -> Totals:
    # Looking for garbage takes a tenth of the time; after the handful is soon enough.
    gc.disable()
    totals = Totals()
    for seed in seeds:
        outcome = run_seed(seed)
        failed = {} if outcome.error is None else {seed: outcome.report()}
        totals.add(Totals(1, outcome.steps, outcome.records, outcome.faults, failed))
    gc.collect()
    return totals


def survey(seeds: range, jobs: int | None) -> int:
    """Run many schedules, a handful at once; print the first failed one with its trace, the others by their number."""
    started_s, totals = time.perf_counter(), Totals()
    handfuls = [seeds[start : start + _AT_ONCE] for start in range(0, len(seeds), _AT_ONCE)]
    # Not forked: a process with Arrow's threads must not be.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0)), context) as pool:
        for of_handful in pool.map(run_some, handfuls):
            totals.add(of_handful)
            if totals.failed:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    taken_s = time.perf_counter() - started_s
    for report in list(totals.failed.values())[:1]:
        print(report)
    print(f"{totals.schedules} schedules, {totals.steps} steps, {totals.records} records, {taken_s:.1f} s", end=", ")
    print(f"{totals.schedules / taken_s:.1f} schedules/s; failed: {sorted(totals.failed)}")
    for kind, count in sorted(totals.faults.items()):
        print(f"  {kind:32} {count}")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Many schedules at once, and what came of them. A module of its own, as other processes import what they are to run."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.continuous_world import run_continuous
from tests.simulation.world import run_seed

_AT_ONCE = 25
#: For each schedule of a continuous query there are so many of batches.
_BATCHES = 3


@dataclass(slots=True)
class Totals:
    """Sums over schedules, and the failed ones with their trace."""

    schedules: int = 0
    steps: int = 0
    records: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    #: seed, and how to see it again -> trace and error
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, more: Totals) -> None:
        self.schedules += more.schedules
        self.steps += more.steps
        self.records += more.records
        self.faults += more.faults
        self.failed |= more.failed


def run_some(seeds: range, continuous: bool) -> Totals:
    """Run schedules of batches, or of continuous queries."""
    # Looking for garbage takes a tenth of the time; after the handful is soon enough.
    gc.disable()
    totals = Totals()
    for seed in seeds:
        outcome = run_continuous(seed) if continuous else run_seed(seed)
        failed = {} if outcome.error is None else {f"{seed}{outcome.options}": outcome.report()}
        totals.add(Totals(1, outcome.steps, outcome.records, outcome.faults, failed))
    gc.collect()
    return totals


def survey(seeds: range, jobs: int | None, *, continuous: bool) -> int:
    """Run many schedules, a handful at once; print the first failed one with its trace, the others by their number."""
    started_s, totals = time.perf_counter(), Totals()
    handfuls = [(of, True) for of in _handfuls(seeds if continuous else seeds[: len(seeds) // _BATCHES])]
    handfuls += [] if continuous else [(of, False) for of in _handfuls(seeds)]
    # Not forked: a process with Arrow's threads must not be.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0)), context) as pool:
        for of_handful in pool.map(run_some, *zip(*handfuls, strict=True)):
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


def _handfuls(seeds: range) -> list[range]:
    return [seeds[start : start + _AT_ONCE] for start in range(0, len(seeds), _AT_ONCE)]

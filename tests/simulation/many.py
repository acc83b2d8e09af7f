"""Many schedules, on every core."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.world import run_seed

_AT_ONCE = 25


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


def _run_some(seeds: range) -> Totals:
    # Looking for garbage takes a tenth of the time; after the handful is soon enough.
    gc.disable()
    totals = Totals()
    try:
        for seed in seeds:
            outcome = run_seed(seed)
            totals.schedules += 1
            totals.steps += outcome.steps
            totals.records += outcome.records
            totals.faults += outcome.faults
            if outcome.error is not None:
                totals.failed[seed] = outcome.report()
    finally:
        gc.enable()
    gc.collect()
    return totals


def run_many(seeds: range, jobs: int | None = None) -> Iterator[Totals]:
    """Run schedules; yield the totals so far after each handful."""
    handfuls = [seeds[start : start + _AT_ONCE] for start in range(0, len(seeds), _AT_ONCE)]
    totals = Totals()
    processes = min(jobs or len(os.sched_getaffinity(0)), len(handfuls))
    if processes == 1:
        # A process of its own would only import everything once more.
        for handful in handfuls:
            totals.add(_run_some(handful))
            yield totals
        return
    # Not forked: a process with Arrow's threads must not be.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        for of_handful in pool.map(_run_some, handfuls):
            totals.add(of_handful)
            yield totals

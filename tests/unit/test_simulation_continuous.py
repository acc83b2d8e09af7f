"""Continuous queries under simulated schedules, and proof that the simulation finds bugs of theirs."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.continuous_world import run_continuous
from tests.simulation.planted import planted_of
from tests.simulation.planted_epochs import EPOCH_BUGS, EPOCH_HARMLESS, EPOCH_WITH
from tests.simulation.world import kinds_of


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_is_a_schedule_of_a_continuous_query(seed: int) -> None:
    first, repeated = run_continuous(seed), run_continuous(seed)
    assert first.trace == repeated.trace
    assert first.trace != run_continuous(seed + 5).trace


def test_every_epoch_counts_each_row_once_and_its_results_are_emitted_before() -> None:
    faults: Counter[str] = Counter()
    for seed in range(40):
        outcome = run_continuous(seed)
        assert outcome.error is None, outcome.report()
        faults += outcome.faults
    assert kinds_of(faults) >= {
        "emitted_at_seal", "emitted_by_windows", "kill", "late", "message", "pause", "read", "rescale_asked", "storage", "task_lost",
        "tasks_run_again", "zombie"
    }  # fmt: skip
    assert faults["task_lost"] > 100
    of_operators = {"duplicate", "emitted_first", "session_merged", "emitted_by_calls", "timed_out"}
    of_workers = {"called", "called_beside_commit", "connection_lost", "kill.worker", "zombie.worker"}
    assert faults.keys() >= of_operators | of_workers


@pytest.mark.parametrize("bug", EPOCH_BUGS)
def test_a_planted_bug_is_found_and_nothing_without_it(bug: str) -> None:
    schedules, first = EPOCH_BUGS[bug].schedules, EPOCH_BUGS[bug].first
    with planted_of(bug, {**EPOCH_BUGS, **EPOCH_HARMLESS}, EPOCH_WITH):
        seeds = range(first, first + 100)
        seed = next((seed for seed in seeds if run_continuous(seed, **schedules).broke_a_promise), None)
    assert seed is not None
    # The very same schedules without the bug: nothing breaks, and each comes to its end.
    for sound in {first, seed}:
        outcome = run_continuous(sound, **schedules)
        assert outcome.error is None, outcome.report()

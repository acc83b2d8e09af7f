"""The commit protocol under thousands of simulated schedules, and proof that the simulation can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.many import Totals, run_many
from tests.simulation.planted import BUGS, planted
from tests.simulation.scheduler import NoEndError
from tests.simulation.world import Outcome, run_seed


def is_found(outcome: Outcome) -> bool:
    """Whether a planted bug broke an invariant; an endless schedule alone is no proof of it."""
    return not (outcome.error is None or isinstance(outcome.error, NoEndError))


def test_a_seed_is_a_schedule() -> None:
    first, repeated = run_seed(11), run_seed(11)
    assert first.trace == repeated.trace
    assert first.trace != run_seed(12).trace


@pytest.mark.timeout(600)
def test_sixty_schedules_keep_every_batch_exactly_once() -> None:
    totals = Totals()
    for totals in run_many(range(60), jobs=1):
        if totals.failed:
            pytest.fail(next(iter(totals.failed.values())))
    assert totals.schedules == 60
    kinds = {kind.partition(".")[0] for kind in totals.faults}
    assert kinds >= {"kill", "message", "pause", "second_driver", "storage", "zombie"}


def test_every_read_beside_the_batches_is_one_finished_version() -> None:
    faults: Counter[str] = Counter()
    for seed in range(15):
        outcome = run_seed(seed, keyed=False, reads=True, moves=seed % 3 == 1, harsh=seed % 3 == 2)
        assert outcome.error is None, outcome.report()
        faults += outcome.faults
    assert faults["read"] > 100


def test_reads_beside_moves_and_rescales_are_of_the_shards_that_they_began_with() -> None:
    faults: Counter[str] = Counter()
    for seed in range(16):
        outcome = run_seed(seed, keyed=False, reads=True, rescales=True, moves=seed % 3 != 2)
        assert outcome.error is None, outcome.report()
        faults += outcome.faults
    assert faults["read"] > 60
    assert faults["scanned_by_former_shards"] > 3
    assert faults["sink_failed"] > 1
    assert {"moved", "rescaled"} <= faults.keys()


def test_schedules_with_rescales_keep_every_batch_exactly_once() -> None:
    faults: Counter[str] = Counter()
    for seed in range(20):
        outcome = run_seed(seed, keyed=False, rescales=True)
        assert outcome.error is None, outcome.report()
        faults += outcome.faults
    kinds = {kind.partition(".")[0] for kind in faults}
    assert kinds >= {"kill", "message", "pause", "rescale_asked", "rescaled", "second_driver", "storage", "zombie"}
    assert faults["rescaled"] > 60


def test_a_state_that_is_dropped_under_its_query_is_no_part_of_the_next_one_of_its_name() -> None:
    faults: Counter[str] = Counter()
    for seed in range(24):
        outcome = run_seed(seed, drops=True, moves=seed % 4 == 1, harsh=seed % 4 == 3)
        assert outcome.error is None, outcome.report()
        faults += outcome.faults
    assert faults["dropped"] > 15
    assert {"drop_answered", "zombie.coordinator"} <= faults.keys()


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_nothing_without_it(bug: str) -> None:
    schedules, first = BUGS[bug].schedules, BUGS[bug].first
    with planted(bug):
        seed = next((seed for seed in range(first, first + 300) if is_found(run_seed(seed, **schedules))), None)
    assert seed is not None
    # The very same schedules without the bug: nothing breaks, and each comes to its end.
    for sound in {first, seed}:
        outcome = run_seed(sound, **schedules)
        assert outcome.error is None, outcome.report()

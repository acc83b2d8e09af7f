"""The commit protocol under thousands of simulated schedules, and proof that the simulation can fail."""

from __future__ import annotations

import pytest

from tests.simulation.many import Totals, run_many
from tests.simulation.planted import BUGS, KEYED_BUGS, planted
from tests.simulation.scheduler import NoEndError
from tests.simulation.world import Outcome, run_seed

#: Where the search for a planted bug begins, so that it is short as long as little changes.
FIRST_SEED = {
    "the age of a commit is checked before it waits": 33,
    "memory is used without a look at its lineage": 57,
    "files of failed commits are deleted": 102,
    "a snapshot of what was rolled back to is taken for the newest version": 19,
    "keyed stores in memory are used without a look at their lineage": 105,
}


def is_found(outcome: Outcome) -> bool:
    """Whether a harsh schedule broke what must hold; slowness is not the planted bug."""
    return not (outcome.error is None or isinstance(outcome.error, NoEndError))


def test_a_seed_is_a_schedule() -> None:
    first, again = run_seed(11), run_seed(11)
    assert first.trace == again.trace
    assert first.trace != run_seed(12).trace


@pytest.mark.timeout(600)
def test_two_thousand_schedules_keep_every_batch_exactly_once() -> None:
    totals = Totals()
    for totals in run_many(range(2000)):
        if totals.failed:
            pytest.fail(next(iter(totals.failed.values())))
    assert totals.schedules == 2000
    kinds = {kind.partition(".")[0] for kind in totals.faults}
    assert kinds >= {"kill", "message", "pause", "second_driver", "storage", "zombie"}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    first = FIRST_SEED.get(bug, 0)
    with planted(bug):
        assert any(is_found(run_seed(seed, harsh=True, keyed=bug in KEYED_BUGS)) for seed in range(first, first + 300))


def test_the_seeds_that_find_planted_bugs_find_nothing_without_them() -> None:
    assert not [seed for seed in range(20) if is_found(run_seed(seed, harsh=True))]

"""The commit protocol under thousands of simulated schedules, and proof that the simulation can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation.planted import BUGS, DROPPED, READ, READ_RESCALED, RESCALED, planted
from tests.simulation.world import kinds_of, run_seed


def test_a_seed_is_a_schedule() -> None:
    first, repeated = run_seed(11), run_seed(11)
    assert first.trace == repeated.trace
    assert first.trace != run_seed(12).trace


def surveyed(seeds: int, kind_of: Callable[[int], dict[str, bool]]) -> Counter[str]:
    """Run a schedule of each seed, which must keep all that is promised; return the faults of all together."""
    faults: Counter[str] = Counter()
    for seed in range(seeds):
        outcome = run_seed(seed, **kind_of(seed))
        assert outcome.error is None, outcome.report()
        faults += outcome.faults
    return faults


@pytest.mark.timeout(600)
def test_sixty_schedules_keep_every_batch_exactly_once() -> None:
    faults = surveyed(60, lambda seed: {})
    assert kinds_of(faults) >= {"kill", "message", "pause", "second_driver", "storage", "zombie"}


def test_every_read_beside_the_batches_is_one_finished_version() -> None:
    faults = surveyed(15, lambda seed: {**READ, "moves": seed % 3 == 1, "harsh": seed % 3 == 2})
    assert faults["read"] > 100


def test_reads_beside_moves_and_rescales_are_of_the_shards_that_they_began_with() -> None:
    faults = surveyed(16, lambda seed: {**READ_RESCALED, "moves": seed % 3 != 2})
    assert faults["read"] > 60
    assert faults["scanned_by_former_shards"] > 3
    assert faults["sink_failed"] > 1
    assert {"moved", "rescaled"} <= faults.keys()


def test_schedules_with_rescales_keep_every_batch_exactly_once() -> None:
    faults = surveyed(20, lambda seed: RESCALED)
    assert kinds_of(faults) >= {
        "kill", "message", "pause", "rescale_asked", "rescaled", "second_driver", "storage", "zombie"
    }  # fmt: skip
    assert faults["rescaled"] > 60


def test_a_state_that_is_dropped_under_its_query_is_no_part_of_the_next_one_of_its_name() -> None:
    faults = surveyed(24, lambda seed: {**DROPPED, "moves": seed % 4 == 1, "harsh": seed % 4 == 3})
    assert faults["dropped"] > 15
    assert {"drop_answered", "zombie.coordinator"} <= faults.keys()


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_nothing_without_it(bug: str) -> None:
    schedules, first = BUGS[bug].schedules, BUGS[bug].first
    with planted(bug):
        seed = next((seed for seed in range(first, first + 300) if run_seed(seed, **schedules).broke_a_promise), None)
    assert seed is not None
    # The very same schedules without the bug: nothing breaks, and each comes to its end.
    for sound in {first, seed}:
        outcome = run_seed(sound, **schedules)
        assert outcome.error is None, outcome.report()

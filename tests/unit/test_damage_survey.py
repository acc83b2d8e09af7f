"""Every kind of damage to every kind of file: readers get the right rows or an error that says why, and `verify` names the file.

A state with two checkpoints in parts, deltas and snapshots, beside a state of the same name in another fleet. The whole survey is run
by ``./run soak``; here is a sample of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.storage.memory import MemoryObjectStore
from statefleet.reads.fleet import attach
from tests.unit.checkpointed_state import BATCHES, state_files, write_files
from tests.unit.damages import DAMAGES, Survey, named_by_verify, rows_or_error, state_in, taken_from

#: Size of the sample that is tested with every change.
SAMPLE = 80


def counts_at(version: int, letter: str) -> dict[str, int]:
    """Return the expected counts of a version."""
    counts = {letter: version, "x": (version + 1) // 2, "y": version // 2}
    return {value: count for value, count in counts.items() if count}


def read(objects: MemoryObjectStore) -> dict[str, str]:
    """Return what a reader gets of each version."""
    state = state_in(objects, "s")
    return {
        str(version): rows_or_error(lambda version=version: state.at(version).scan().to_arrow().to_pylist())
        for version in range(BATCHES + 1)
    }


@pytest.fixture(scope="module")
def survey() -> Survey:
    damages = {**DAMAGES, "another fleet's": taken_from(state_files("b"))}
    return Survey(state_files("a"), ("s",), read, damages)


def test_every_kind_of_file_is_there(survey: Survey, tmp_path: Path) -> None:
    kinds = {Path(path).parent.name for path in survey.needed()}
    assert kinds == {"s", "manifest", "checkpoints", "parts", "0"}
    assert {Path(path).suffix for path in survey.needed()} == {".json", ".delta", ".snapshot"}
    rows = {str(version): counts_at(version, "a") for version in range(BATCHES + 1)}
    assert survey.expected == {
        version: rows_or_error(lambda of=of: [{"v": value, "n": n} for value, n in of.items()])
        for version, of in rows.items()
    }
    assert named_by_verify(survey.objects, survey.states) == set()
    # A folder of files gives the same answers.
    write_files(survey.objects, tmp_path)
    state = attach(f"file://{tmp_path}", offline=True).state("s", consistency="committed")
    assert rows_or_error(lambda: state.scan().to_arrow().to_pylist()) == survey.expected[str(BATCHES)]


def test_no_sampled_damage_gives_wrong_rows_or_stays_unnamed(survey: Survey) -> None:
    assert survey.sampled(SAMPLE) == {}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_no_damage_gives_wrong_rows_or_stays_unnamed(survey: Survey, seed: int) -> None:
    assert survey.outcomes(survey.cases(), seed) == {}

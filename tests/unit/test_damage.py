"""Every kind of damage to every kind of file: readers get the right rows or an error that says why, and `verify` names the file.

The whole survey is run by ``./run soak``; here is a sample of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CorruptStateError
from coordinator.model.identities import StateStoreId
from tests.stored_shards import stored_rows
from tests.unit import damaged_branches, damaged_keyed_stores
from tests.unit.aggregation_fleet import SCHEMA, AggregationFleet, counts, filled
from tests.unit.damaged_branches import BRANCH, PARENT
from tests.unit.damaged_fleet import FOLLOWING, STATE, RunningSurvey
from tests.unit.damages import DAMAGES, ERROR, Survey, copied, named_by_verify

running_survey = cache(RunningSurvey)
#: By what is damaged: the survey, the number of cases that are tested with every change, and how often `soak` runs each of them.
SURVEYS: dict[str, tuple[Callable[[], Survey], int, int]] = {
    "a rescaled state and its branch": (damaged_branches.survey, 16, 3),
    "keyed stores": (damaged_keyed_stores.survey, 30, 2),
    "a running fleet": (running_survey, 16, 1),
}


@pytest.mark.parametrize("of", SURVEYS)
def test_no_sampled_damage_gives_wrong_rows_or_stays_unnamed(of: str) -> None:
    survey, sample, _ = SURVEYS[of]
    assert survey().outcomes(survey().sample(sample)) == {}


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*DAMAGES, "a file of elsewhere"])
@pytest.mark.parametrize("of", SURVEYS)
def test_no_damage_gives_wrong_rows_or_stays_unnamed(of: str, kind: str) -> None:
    survey, _, times = SURVEYS[of]
    cases = survey().cases([kind] if kind in DAMAGES else sorted(survey().damages.keys() - DAMAGES.keys()))
    for seed in range(times):
        assert survey().outcomes(cases, seed) == {}


# -- what is damaged is there, and is read ------------------------------------------------------------------------------


def folders(paths: list[str]) -> set[str]:
    return {str(Path(path).parent) for path in paths}


def test_every_kind_of_file_of_a_rescaled_state_and_its_branch_is_there() -> None:
    branches = damaged_branches.survey()
    expected = branches.expected
    assert not [name for name, rows in expected.items() if rows.startswith(ERROR) and name[-1] not in "123"]
    assert named_by_verify(branches.objects, branches.states) == set()
    assert expected[f"{PARENT} 4"] == expected[f"{BRANCH} 4"] != expected[f"{PARENT} 6"]
    of_parent = {f"{PARENT}/{folder}" for folder in ("manifest", "checkpoints", "parts", "0/0", "0/4")}
    assert folders(branches.places()) >= of_parent | {
        f"{BRANCH}/{folder}" for folder in ("manifest", "checkpoints", "0/2", "0/4")
    }
    assert {Path(path).suffix for path in branches.places()} == {".json", ".delta", ".snapshot"}
    # The first record of a branch is checked.
    for kind in ("delete", "a backup's"):
        assert branches.outcome(f"{BRANCH}/manifest/{1:020d}.json", kind) == ""


def test_every_kind_of_file_of_two_keyed_stores_is_there() -> None:
    keyed = damaged_keyed_stores.survey()
    partitions = {f"s/0/{partition}{store}" for partition in range(2) for store in ("", "/names")}
    assert folders(keyed.places()) == {"s", "s/manifest", "s/checkpoints", "s/parts", *partitions}
    assert folders([path for path in keyed.places() if path.endswith(".snapshot")]) == partitions
    assert not [name for name, rows in keyed.expected.items() if rows.startswith(ERROR)]
    assert keyed.expected["0 at 5"] != keyed.expected["1 at 5"] != keyed.expected["1 at 4"]
    assert ["'id': 0" in keyed.expected[f"1 at {version}"] for version in (2, 3)] == [True, False]
    assert named_by_verify(keyed.objects, keyed.states) == set()


def test_every_kind_of_file_of_a_running_fleet_is_there_and_is_read_again_after_all_that_follows() -> None:
    running = running_survey()
    assert folders(running.files) == {"s", "s/manifest", "s/checkpoints", "s/parts", "s/0/0", "s/0/1"}
    assert {Path(path).suffix for path in running.files} == {".json", ".delta", ".snapshot"}
    for follow in FOLLOWING:
        expected = running.expected[follow]
        last = max(int(name[-1]) for name in expected if name.startswith(f"{STATE} emits"))
        assert not [name for name, rows in expected.items() if "emits" in name and rows.startswith(ERROR)]
        # The last answers came from storage.
        assert not expected[f"{STATE} {last}"].startswith(ERROR)


# -- what the files themselves say --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "fleet"), [(".delta", filled(4)), (".snapshot", filled(4, (3,))), (".json", filled(4, (2,)))]
)
@given(kind=st.sampled_from(["flip", "cut", "insert", "zero"]), seed=st.integers(0, 1 << 30))
@settings(max_examples=120, deadline=None)
def test_a_change_of_any_byte_is_named_or_changes_no_answer(
    suffix: str, fleet: AggregationFleet, kind: str, seed: int
) -> None:
    """A delta is never read, instead of a snapshot there are the deltas before it, and a record is named."""
    fleet, dice = AggregationFleet(copied(fleet.objects)), random.Random(seed)
    whole = ManifestLog(fleet.objects, "s", "reader").load().to_json()
    path = dice.choice([info.path for info in fleet.objects.list("s") if info.path.endswith(suffix)])
    content = fleet.objects.get(path)
    DAMAGES[kind](fleet.objects, path, dice)
    message = ""
    try:
        is_whole = ManifestLog(fleet.objects, "s", "reader").load().to_json() == whole
        rows = counts(stored_rows(fleet.store, StateStoreId("memory:///s", 0, 0), 4, SCHEMA))
    except CorruptStateError as error:
        message = str(error)
    else:
        # A space of a record that became a line break does not change the record.
        assert is_whole
        assert rows == {"a": 4, "b": 1}
    assert path in message or suffix != ".delta" or fleet.objects.get(path) == content
    assert not message if suffix == ".snapshot" else path in message or not message

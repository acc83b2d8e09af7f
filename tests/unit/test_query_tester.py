"""Faults by a seed, differences of sinks, and the pytest plugin: what the tester of queries does without Spark."""

from __future__ import annotations

import math
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from statefleet import testing
from statefleet.testing.faults import Faults
from statefleet.testing.results import difference, normal
from tests.user_pytest import pytest_in

ROOT = Path(__file__).parents[2]


def test_a_seed_gives_the_same_faults_again() -> None:
    def drawn(seed: int) -> list[object]:
        faults = Faults(seed, 8, kills=True, repeats=True, reorders=True)
        return [(faults.kill(step), faults.repeats(step, 0), faults.ordered(step, range(9))) for step in range(8)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_each_kind_of_fault_is_there_at_least_once(steps: int) -> None:
    for seed in range(20):
        faults = Faults(seed, steps, kills=True, repeats=True, reorders=True)
        assert any(faults.kill(step) for step in range(steps))
        assert any(faults.repeats(step, 0) for step in range(steps))
        assert sorted(faults.ordered(0, range(50))) == list(range(50)) != faults.ordered(0, range(50))


def test_faults_that_are_not_asked_for_are_not_there() -> None:
    faults = Faults(1, 5, kills=False, repeats=False, reorders=False)
    assert not any(faults.kill(step) or faults.repeats(step, batch) for step in range(5) for batch in range(3))
    assert faults.ordered(0, range(50)) == list(range(50))


def test_rows_are_compared_as_often_as_they_are_there() -> None:
    found = difference(normal([("a", 1), ("b", 2), ("b", 2)]), normal([{"k": "b", "n": 2}, ("c", 3)]))
    assert found is not None
    assert (found.missing, found.extra) == ([("a", 1), ("b", 2)], [("c", 3)])
    assert str(found) == "  missing: ('a', 1)\n  missing: ('b', 2)\n  too many: ('c', 3)"


def test_rows_that_are_equal_up_to_rounding_do_not_differ() -> None:
    sums = normal([(0.1 + 0.2, math.nan, [1, {"a": 1, "b": 2}], bytearray(b"x"))])
    assert difference(sums, normal([(0.3, math.nan, (1, {"b": 2, "a": 1}), b"x")])) is None


def test_many_rows_are_counted() -> None:
    assert str(difference([], [(n,) for n in range(8)])).splitlines()[-1] == "  too many: 3 more"


def test_public_names_are_there() -> None:
    assert [getattr(testing, name).__name__ for name in testing.__all__] == testing.__all__
    assert set(testing.__all__) <= set(dir(testing))
    with pytest.raises(AttributeError):
        testing.nothing  # noqa: B018


def test_the_package_has_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert import_module(project["entry-points"]["pytest11"]["statefleet"]).query_tester


def test_a_run_that_does_not_use_the_plugin_imports_nothing_for_it(tmp_path: Path) -> None:
    heavy = ["ray", "pyspark", "pyarrow", "numba", "pandas", "duckdb", "spark_jobs", "store_actors", "coordinator"]
    (tmp_path / "test_user.py").write_text(
        f"import sys\n\ndef test_it():\n    assert 'statefleet.testing.plugin' in sys.modules\n"
        f"    assert not set({heavy}) & set(sys.modules)\n"
    )
    done = pytest_in(tmp_path, "-q")
    assert done.returncode == 0, done.stdout


def test_the_fixtures_are_listed_with_what_they_give(tmp_path: Path) -> None:
    listed = pytest_in(tmp_path, "--fixtures").stdout
    assert "statefleet_session [session scope]" in listed
    assert "query_tester" in listed
    assert "--statefleet-seed" in pytest_in(tmp_path, "--help").stdout

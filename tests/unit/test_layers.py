"""The rooms import in one direction, and each outside library only where it belongs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Each room with those it may import.
ROOMS = {
    "coordinator": set(),
    "store_actors": {"coordinator"},
    "spark_jobs": {"coordinator", "store_actors"},
    "statefleet": {"coordinator", "store_actors", "spark_jobs"},
}
RAY_SHELLS = {"actor.py", "deploy.py"}


def imports(file: Path) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found.add((node.module or "").split(".")[0])
    return found


def modules(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_import_only_to_the_left(room: str) -> None:
    for file in modules(room):
        wrong = imports(file) & (ROOMS.keys() - ROOMS[room] - {room})
        assert not wrong, f"{file} imports {wrong}"


@pytest.mark.parametrize("room", ["coordinator", "store_actors"])
def test_only_shells_know_ray_and_no_rule_knows_spark(room: str) -> None:
    for file in modules(room):
        found = imports(file)
        assert not found & {"pyspark", "raydp", "py4j"}, file
        assert file.name in RAY_SHELLS or "ray" not in found, file


def test_the_check_sees_a_planted_import(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from spark_jobs.fleet import connect\n    import ray\n")
    assert imports(planted) == {"spark_jobs", "ray"}


def test_pure_rules_take_no_time_chance_or_environment() -> None:
    for name in (
        "coordinator/core.py",
        "coordinator/status.py",
        "store_actors/operators/aggregate.py",
        "store_actors/engine/table.py",
    ):
        assert not imports(ROOT / name) & {"time", "random", "uuid", "os", "datetime"}, name

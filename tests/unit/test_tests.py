"""Tests are a library: what several test modules use is in helper modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TEST_MODULE = re.compile(r"(^|\.)test_\w+$")


def imported_tests(source: str) -> set[str]:
    """Return the test modules that Python code imports, by their full names."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # ``from tests.unit import test_x`` names a module, ``from tests.unit.test_x import f`` another way.
            modules |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in modules if _TEST_MODULE.search(name)}


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_no_module_imports_a_test_module(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert not {str(file.relative_to(ROOT)): names for file in files if (names := imported_tests(file.read_text()))}


@pytest.mark.parametrize(
    "line", ["from tests.unit.test_top import at", "from tests.unit import test_top", "import tests.unit.test_top"]
)
def test_the_check_sees_a_planted_import(line: str) -> None:
    assert imported_tests(f"def f():\n    {line}\n") == {"tests.unit.test_top"}
    assert not imported_tests("from tests.unit.top_machine import at")

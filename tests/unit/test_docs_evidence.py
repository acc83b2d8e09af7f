"""Tests, code and errors that the docs name exist, and each error has an entry in the runbook."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from coordinator.model import errors
from tests.code_blocks import PAGES, ROOT

_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`((?: \(`\./run \w+`\))?)")
#: Marks of tests that have a command of their own.
_MARK = re.compile(r"mark\.(soak|replay|machines|image)\b")


def when(file: str, name: str) -> str:
    """Return the command that runs a test, or an empty string for tests that run with every change.

    Raises
    ------
    KeyError
        There is no such test.
    """
    body = ast.parse((ROOT / file).read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    decorators = [ast.unparse(decorator) for decorator in functions[name].decorator_list]
    of_file = [
        ast.unparse(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    marks = {mark for text in (*decorators, *of_file) for mark in _MARK.findall(text.partition("parametrize")[0])}
    return "".join(f" (`./run {mark}`)" for mark in sorted(marks))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_is_named_exists_and_runs_when_the_page_says(page: Path) -> None:
    for file, name, command in _TEST.findall(page.read_text()):
        assert when(file, name) == command, f"{file}::{name}"


def test_guarantees_rest_on_tests() -> None:
    rows = re.findall(
        r"^\| (?!---|failure|mistake)(.+) \|$", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 20
    assert not [row for row in rows if "`tests/" not in row]


def test_every_public_error_has_an_entry_in_the_runbook() -> None:
    entries = set(re.findall(r"^### `(\w+)`$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE))
    public = set(errors.__all__) - {"StateStoreError"}
    assert entries == public | {"UnboundedStateWarning"}


def _names_of_code() -> set[str]:
    """Return the names of classes, functions, module constants and Scala files of the packages."""
    names = {file.name for file in (ROOT / "spark_jobs").rglob("*.scala")}
    for package in ("coordinator", "store_actors", "spark_jobs", "statefleet"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.Assign):
                    names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_the_code_that_the_glossary_names_exists() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    cells = [line.rsplit("|", 2)[1] for line in lines if re.match(r"\| (?!---|term)", line)]
    assert len(cells) > 60
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} - _names_of_code() == set()


def test_the_reading_list_has_the_sizes_of_its_files() -> None:
    """Within a quarter, so that not every change of a file changes the page."""
    rows = re.findall(
        r"^\|[^|]*\| `([\w/]+\.py)` \| (\d+) \|", (ROOT / "docs" / "contributing.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    sizes = {file: len((ROOT / file).read_text().splitlines()) for file, _ in rows}
    assert not [(file, sizes[file]) for file, lines in rows if abs(int(lines) - sizes[file]) > sizes[file] / 4]


def test_the_front_page_has_ninety_lines_at_most() -> None:
    """Lists belong into ``docs/``."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90

"""Tests, code, errors and files that the docs name exist, and each error has an entry in the runbook."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
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


# -- files and folders ----------------------------------------------------------------------------------------------

#: First parts of paths of the repository.
TOPS = {package.parent.name for package in ROOT.glob("*/__init__.py")} | {"deploy", "docs", "examples"}
_SUFFIXES = (".py", ".md", ".toml", ".html", ".yaml", ".yml", ".properties")

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
#: No URI, no variable, no path within a state's folder, nothing absolute; ``{a,b}.py`` is two files.
_PATH = re.compile(r"[\w.-]+(?:/[\w.{},-]+)+/?|[\w.-]+/")
_BRACES = re.compile(r"\{([^{}]*)\}")


def paths(text: str) -> Iterator[str]:
    """Yield the paths of the repository in backticks that have a slash, also those among the arguments of a command."""
    for quoted in _IN_BACKTICKS.findall(_FENCED.sub("", text)):
        for word in quoted.split():
            if _PATH.fullmatch(word) and (word.split("/")[0] in TOPS or word.endswith(_SUFFIXES)):
                yield from _expanded(word)


def _expanded(path: str) -> Iterator[str]:
    braces = _BRACES.search(path)
    if braces is None:
        yield path
        return
    for name in braces[1].split(","):
        yield from _expanded(path[: braces.start()] + name + path[braces.end() :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_path_exists(page: Path) -> None:
    assert not {path for path in paths(page.read_text()) if not _is_there(path)}


def _is_there(path: str) -> bool:
    file = ROOT / path
    return file.is_dir() if path.endswith("/") else file.exists()


def test_the_check_recognises_paths() -> None:
    text = """`a/b.py` `docs/x`, `store_actors/{one,two}.py` and `pytest tests/unit/y.py -s`, `tests/data/`; not `s3://docs/x`,
`/docs/x`, `<state>/manifest/x.json`, `sum/count`, `file:///docs/x.md`, `x`, `s3://bucket/prefix` or
```python
`docs/in code`
```
"""
    assert list(paths(text)) == [
        "a/b.py", "docs/x", "store_actors/one.py", "store_actors/two.py", "tests/unit/y.py", "tests/data/",
    ]  # fmt: skip

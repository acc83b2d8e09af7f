"""Files and folders of this repository that the documentation names are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: First parts of paths of the repository.
TOPS = {
    "benchmarks",
    "coordinator",
    "deploy",
    "docs",
    "docs_site",
    "examples",
    "spark_jobs",
    "statefleet",
    "store_actors",
    "tests",
}
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_named_path_exists(document: Path) -> None:
    assert not {path for path in paths(document.read_text()) if not _is_there(path)}


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

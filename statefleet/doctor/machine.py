"""Checks of this machine: Python, packages, Java, RayDP's jars, shared memory, disks."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata, util
from pathlib import Path

from coordinator.model.errors import SetupError
from coordinator.model.text import size_text
from spark_jobs.session.java import choose_java_home
from statefleet.doctor.findings import Finding, Outcome, emit
from store_actors.spilling.spill_folder import IN_MEMORY, file_system, free_bytes

__all__ = ["disk_room", "java", "packages", "python", "raydp_jars", "shared_memory", "spill_folder"]

#: Of memory, what Ray makes its object store of, in /dev/shm.
_RAY_SHARE = 0.3
#: Of a disk, what is free below which Ray makes no objects there any more, and below which that is near.
_RAY_STOPS_AT, _NEAR = 0.05, 0.1
#: What a file system of state should have left, in bytes.
_LITTLE = 1 << 30


def python() -> Finding:
    """Which Python runs this."""
    told = f"Python {platform.python_version()} ({sys.executable})"
    if platform.python_version_tuple()[:2] == ("3", "11"):
        return Finding("Python", Outcome.OK, told)
    return Finding(
        "Python", Outcome.WRONG, told, "Statefleet runs on Python 3.11, on every node of the cluster; install that"
    )


def packages(required: Callable[[], list[str] | None] = lambda: metadata.requires("statefleet")) -> Finding:
    """Whether the packages that Statefleet needs are there, in versions that it was tested with."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(one) for one in required() or []]
    except metadata.PackageNotFoundError:
        return Finding(
            "packages",
            Outcome.WARNING,
            "Statefleet itself is not installed here, so it is not known which packages it needs",
            "pip install it, on every node of the cluster",
        )
    shown, wrong = [], []
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{one.name} is missing")
            continue
        shown.append(f"{one.name} {version}")
        if not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} is {version} and should be {one.specifier}")
    if wrong:
        return Finding(
            "packages", Outcome.WRONG, "; ".join(wrong), "pip install the versions of Statefleet's requirements.lock"
        )
    return Finding("packages", Outcome.OK, ", ".join(shown))


#: Java 17.0.x from which on nothing is said: of the beginning of 2025. The one that comes with the package is of 2023.
_PATCHED_JAVA = 14


def java(environ: Mapping[str, str] = os.environ) -> Finding:
    """Which Java runs Spark."""
    try:
        home = choose_java_home(environ)
    except SetupError as error:
        return Finding("Java", Outcome.WRONG, "no Java 17 for Spark and RayDP", str(error))
    release = home / "release"
    version = re.search(r'JAVA_VERSION="([^"]+)"', release.read_text()) if release.is_file() else None
    text = f"Java {version[1] if version else 17} ({home})"
    patch = re.fullmatch(r"17\.0\.(\d+).*", version[1]) if version else None
    if patch is not None and int(patch[1]) < _PATCHED_JAVA:
        return Finding(
            "Java",
            Outcome.WARNING,
            f"{text}, which lacks the security fixes since",
            "apt-get install openjdk-17-jre-headless, and set JAVA_HOME to it, where Spark reads what strangers wrote",
        )
    return Finding("Java", Outcome.OK, text)


def raydp_jars(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether RayDP has jars for the Spark that is installed."""
    spark, raydp = _folder("pyspark"), _folder("raydp")
    if spark is None or raydp is None:
        missing = "PySpark" if spark is None else "RayDP"
        yield Finding("RayDP and Spark", Outcome.WRONG, f"{missing} is not installed", "pip install raydp and pyspark")
        return
    yield jars_fit(spark / "jars", raydp / "jars", metadata.version("pyspark"), metadata.version("raydp"))
    home = environ.get("SPARK_HOME")
    if home is not None and _spark_of(Path(home) / "jars") != metadata.version("pyspark"):
        yield Finding(
            "SPARK_HOME",
            Outcome.WRONG,
            f"it leads to Spark {_spark_of(Path(home) / 'jars') or 'without jars'} ({home}), and PySpark is "
            f"{metadata.version('pyspark')}",
            "unset SPARK_HOME, so that PySpark's own jars are used",
        )


def jars_fit(spark: Path, raydp: Path, spark_version: str, raydp_version: str) -> Finding:
    """Whether jars of RayDP are whole and for a version of Spark."""
    check = "RayDP and Spark"
    found = _spark_of(spark)
    if found != spark_version:
        return Finding(
            check,
            Outcome.WRONG,
            f"PySpark is {spark_version}, and its jars are of Spark {found or 'none'}",
            f"pip install --force-reinstall pyspark=={spark_version}",
        )
    names = {file.name for file in raydp.glob("*.jar")}
    line = "".join(spark_version.split(".")[:2])
    shim = next((name for name in sorted(names) if re.match(rf"raydp-shims-spark{line}\d+-", name)), None)
    others = sorted(name for name in names if name.startswith("raydp") and not name.endswith(f"-{raydp_version}.jar"))
    if f"raydp-{raydp_version}.jar" not in names or shim is None or others:
        what = (
            f"not all of RayDP {raydp_version}: {', '.join(others)}"
            if others
            else f"without one for Spark {spark_version}"
        )
        return Finding(
            check,
            Outcome.WRONG,
            f"RayDP's jars in {raydp} are {what}",
            f"pip install --force-reinstall raydp=={raydp_version}, which has jars for Spark 3.2 to 3.5",
        )
    return Finding(check, Outcome.OK, f"RayDP {raydp_version} ({shim}) with Spark {spark_version}")


def _spark_of(jars: Path) -> str | None:
    """Version of Spark by the names of its jars."""
    cores = (re.fullmatch(r"spark-core_[\d.]+-(.+)\.jar", file.name) for file in sorted(jars.glob("spark-core_*.jar")))
    return next((found[1] for found in cores if found), None)


def _folder(package: str) -> Path | None:
    spec = util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def shared_memory(folder: str = "/dev/shm", memory: int | None = None) -> Finding:
    """Whether there is room for Ray's object store, through which rows and copies of shards go."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return Finding(
            "shared memory", Outcome.WARNING, f"{folder} cannot be looked at: {error}", "mount a tmpfs there"
        )
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    all_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory
    told = f"{folder} has {size_text(size)}, {size_text(free)} of it free"
    if size >= _RAY_SHARE * all_memory:
        return Finding("shared memory", Outcome.OK, told)
    return Finding(
        "shared memory",
        Outcome.WARNING,
        f"{told}; Ray makes its object store of up to {_RAY_SHARE:.0%} of the memory ({size_text(all_memory)}), and puts it on "
        "disk where that does not fit, which is slow",
        f"make it larger (docker run --shm-size={size_text(_RAY_SHARE * all_memory).replace(' ', '').lower()}), or start Ray "
        "with a smaller --object-store-memory",
    )


def spill_folder(environ: Mapping[str, str] = os.environ) -> Finding:
    """Where Ray has its sessions, and store actors with a memory limit what does not fit."""
    folder = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp")
    found = disk_room("spill folder", folder / "ray" if (folder / "ray").is_dir() else folder)
    if found.outcome is Outcome.OK and file_system(str(folder)) in IN_MEMORY:
        return Finding(
            "spill folder",
            Outcome.WARNING,
            f"{found.found}, and it lies in memory",
            "with memory_limit, name a folder on a disk: spill_dir of statefleet.connect",
        )
    return found


def disk_room(check: str, folder: Path) -> Finding:
    """Whether a disk has room."""
    try:
        room = os.statvfs(folder)
        free = free_bytes(str(folder))
    except OSError as error:
        return Finding(
            check, Outcome.WRONG, f"{folder} cannot be looked at: {error}", "make the folder, or mount its disk"
        )
    part = free / max(1, room.f_blocks * room.f_frsize)
    told = f"{folder} has {size_text(free)} ({part:.0%}) free"
    if part >= _NEAR and free >= _LITTLE:
        return Finding(check, Outcome.OK, told)
    outcome = Outcome.WRONG if part < _RAY_STOPS_AT and free < 10 * _LITTLE else Outcome.WARNING
    return Finding(
        check, outcome, told, f"make room: with less than {_RAY_STOPS_AT:.0%} Ray puts no objects there any more"
    )


def findings() -> Iterator[Finding]:
    """All of them, one after the other."""
    yield python()
    yield packages()
    yield java()
    yield from raydp_jars()
    yield shared_memory()
    yield spill_folder()


if __name__ == "__main__":
    emit(findings())

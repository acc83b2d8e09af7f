"""Checks of this machine: Python, packages, Java, RayDP's jars, shared memory, disks."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata, util
from pathlib import Path

from humanize import naturalsize

from coordinator.model.errors import SetupError
from spark_jobs.jvm.spark_lines import line_of
from spark_jobs.session.java import choose_java_home
from statefleet.doctor.findings import Finding, Outcome, emit, ok, warning, wrong
from store_actors.spilling.spill_folder import IN_MEMORY, file_system, free_bytes

#: Versions of Python that run each of Statefleet's extras.
_PYTHONS = {"spark35": ("3.11",), "spark4": ("3.12", "3.13"), "spark43": ("3.12", "3.13")}
#: Share of the memory that Ray uses for its object store, in /dev/shm.
_RAY_SHARE = 0.3
#: Free share of a disk below which Ray creates no objects there any more, and below which that is near.
_RAY_STOPS_AT, _NEAR = 0.05, 0.1
#: Free space that a file system of state should have, in bytes.
_LITTLE = 1 << 30


def python() -> Finding:
    """Return whether this Python is supported."""
    return python_fits(platform.python_version(), _spark_extra())


def python_fits(version: str, extra: str) -> Finding:
    """Return whether Python of a version is supported with the version of Spark of an extra."""
    text = f"Python {version} ({sys.executable})"
    if version.rpartition(".")[0] in _PYTHONS[extra]:
        return ok("Python", text)
    return wrong(
        "Python",
        text,
        "Statefleet runs on Python 3.11 with Spark 3.5, and on Python 3.12 or 3.13 with Spark 4.2 and 4.3; install one of these on "
        "every node of the cluster",
    )


def _spark_extra() -> str:
    """Return the extra of Statefleet that has the installed version of Spark; Spark 3.5's if there is no Spark."""
    try:
        return line_of(metadata.version("pyspark"))
    except metadata.PackageNotFoundError:
        return "spark35"


def _install_again() -> str:
    extra = _spark_extra()
    lock = {"spark35": "requirements.lock", "spark4": "requirements-spark4.lock"}.get(extra)
    # There is no RayDP, and no lock of its own, for the other one.
    more = f", and raydp for start_session, or the versions of its {lock}" if lock else ""
    return f"pip install Statefleet with its extra {extra} again{more}, on every node of the cluster"


def packages(required: Callable[[], list[str] | None] = lambda: metadata.requires("statefleet")) -> Finding:
    """Return whether the packages that Statefleet needs are installed, in versions that it was tested with."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in required() or []]
    except metadata.PackageNotFoundError:
        return warning(
            "packages",
            "Statefleet itself is not installed here, so it is not known which packages it needs",
            "pip install it, on every node of the cluster",
        )
    installed, problems = [], []
    for requirement in requirements:
        extras = ("", _spark_extra(), "raydp")
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": name}) for name in extras):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            # A check of its own tells of it.
            if requirement.name != "raydp":
                problems.append(f"{requirement.name} is missing")
            continue
        installed.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} is {version} and should be {requirement.specifier}")
    if problems:
        return wrong("packages", "; ".join(problems), _install_again())
    return ok("packages", ", ".join(installed))


#: Java 17.0.x from which on there is no warning: of the beginning of 2025. The one that comes with the package is of 2023.
_PATCHED_JAVA = 14


def java(environ: Mapping[str, str] = os.environ) -> Finding:
    """Return whether a patched Java 17 runs Spark."""
    try:
        home = choose_java_home(environ)
    except SetupError as error:
        return wrong("Java", "no Java 17 for Spark and RayDP", str(error))
    release = home / "release"
    version = re.search(r'JAVA_VERSION="([^"]+)"', release.read_text()) if release.is_file() else None
    text = f"Java {version[1] if version else 17} ({home})"
    patch = re.fullmatch(r"17\.0\.(\d+).*", version[1]) if version else None
    if patch is not None and int(patch[1]) < _PATCHED_JAVA:
        return warning(
            "Java",
            f"{text}, which lacks the security fixes since",
            "apt-get install openjdk-17-jre-headless, and set JAVA_HOME to it, where Spark reads what strangers wrote",
        )
    return ok("Java", text)


def raydp_jars(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield whether RayDP has jars for the installed Spark."""
    spark, raydp = _folder("pyspark"), _folder("raydp")
    if spark is None:
        yield wrong("RayDP and Spark", "PySpark is not installed", _install_again())
        return
    if raydp is None:
        yield warning(
            "RayDP and Spark",
            "RayDP is not installed, without which start_session and what runs by it (the quickstart, jobs) are not there",
            "make sessions by SparkSession.builder, or pip install Statefleet with its extra raydp; there is none for Spark 4.3",
        )
    else:
        yield jars_fit(spark / "jars", raydp / "jars", metadata.version("pyspark"), metadata.version("raydp"))
    home = environ.get("SPARK_HOME")
    if home is not None and _spark_of(Path(home) / "jars") != metadata.version("pyspark"):
        yield wrong(
            "SPARK_HOME",
            f"it leads to Spark {_spark_of(Path(home) / 'jars') or 'without jars'} ({home}), and PySpark is "
            f"{metadata.version('pyspark')}",
            "unset SPARK_HOME, so that PySpark's own jars are used",
        )


def jars_fit(spark: Path, raydp: Path, spark_version: str, raydp_version: str) -> Finding:
    """Return whether the jars of RayDP are complete, and for the version of Spark."""
    check = "RayDP and Spark"
    jars_version = _spark_of(spark)
    if jars_version != spark_version:
        return wrong(
            check,
            f"PySpark is {spark_version}, and its jars are of Spark {jars_version or 'none'}",
            f"pip install --force-reinstall pyspark=={spark_version}",
        )
    names = {file.name for file in raydp.glob("*.jar")}
    line = "".join(spark_version.split(".")[:2])
    shim = next((name for name in sorted(names) if re.match(rf"raydp-shims-spark{line}\d+-", name)), None)
    built = _build_version(raydp_version)
    unexpected = sorted(name for name in names if name.startswith("raydp") and not name.endswith(f"-{built}.jar"))
    if f"raydp-{built}.jar" not in names or shim is None or unexpected:
        problem, remedy = f"without one for Spark {spark_version}", _install_again()
        if unexpected or not names:
            problem = f"not all of RayDP {raydp_version}: {', '.join(unexpected) or 'there is none'}"
            remedy = f"pip install --force-reinstall raydp=={raydp_version}"
        return wrong(check, f"RayDP's jars in {raydp} are {problem}", remedy)
    return ok(check, f"RayDP {raydp_version} ({shim}) with Spark {spark_version}")


def _build_version(raydp_version: str) -> str:
    """Return the version in the names of RayDP's jars, which is that of the wheel, except before a release."""
    from packaging.version import Version

    version = Version(raydp_version)
    return f"{version.base_version}-SNAPSHOT" if version.is_prerelease else raydp_version


def _spark_of(jars: Path) -> str | None:
    cores = (re.fullmatch(r"spark-core_[\d.]+-(.+)\.jar", file.name) for file in sorted(jars.glob("spark-core_*.jar")))
    return next((match[1] for match in cores if match), None)


def _folder(package: str) -> Path | None:
    spec = util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def shared_memory(folder: str = "/dev/shm", memory: int | None = None) -> Finding:
    """Return whether there is space for Ray's object store, through which rows and copies of shards go."""
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        return warning("shared memory", f"{folder} cannot be looked at: {error}", "mount a tmpfs there")
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    all_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory
    text = f"{folder} has {naturalsize(size)}, {naturalsize(free)} of it free"
    if size >= _RAY_SHARE * all_memory:
        return ok("shared memory", text)
    return warning(
        "shared memory",
        f"{text}; Ray makes its object store of up to {_RAY_SHARE:.0%} of the memory ({naturalsize(all_memory)}), and puts it on "
        "disk where that does not fit, which is slow",
        f"make it larger (docker run --shm-size={naturalsize(_RAY_SHARE * all_memory).replace(' ', '').lower()}), or start Ray "
        "with a smaller --object-store-memory",
    )


def spill_folder(environ: Mapping[str, str] = os.environ) -> Finding:
    """Return whether the folder of Ray's sessions, and of state beyond a memory limit, has space and is on a disk."""
    folder = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp")
    finding = disk_room("spill folder", folder / "ray" if (folder / "ray").is_dir() else folder)
    if finding.outcome is Outcome.OK and file_system(str(folder)) in IN_MEMORY:
        return warning(
            "spill folder",
            f"{finding.found}, and it lies in memory",
            "with memory_limit, name a folder on a disk: spill_dir of statefleet.connect",
        )
    return finding


def disk_room(check: str, folder: Path) -> Finding:
    """Return whether a disk has free space."""
    try:
        stats = os.statvfs(folder)
        free = free_bytes(str(folder))
    except OSError as error:
        return wrong(check, f"{folder} cannot be looked at: {error}", "make the folder, or mount its disk")
    share = free / max(1, stats.f_blocks * stats.f_frsize)
    text = f"{folder} has {naturalsize(free)} ({share:.0%}) free"
    if share >= _NEAR and free >= _LITTLE:
        return ok(check, text)
    outcome = Outcome.WRONG if share < _RAY_STOPS_AT and free < 10 * _LITTLE else Outcome.WARNING
    return Finding(
        check, outcome, text, f"make room: with less than {_RAY_STOPS_AT:.0%} Ray puts no objects there any more"
    )


def findings() -> Iterator[Finding]:
    """Yield the findings of all checks."""
    yield python()
    yield packages()
    yield java()
    yield from raydp_jars()
    yield shared_memory()
    yield spill_folder()


if __name__ == "__main__":
    emit(findings())

"""The doctor's checks: what each finds wrong, and that none can hang."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from coordinator.service import deploy
from coordinator.storage.local import LocalObjectStore
from coordinator.storage.memory import MemoryObjectStore
from statefleet.commands.doctor import report
from statefleet.commands.output import WIDTH
from statefleet.doctor import cluster, machine, storage
from statefleet.doctor.findings import Finding, Outcome, run_apart

OK, WARNING, WRONG = Outcome


def test_this_machine_is_well() -> None:
    assert machine.python().outcome is OK
    assert machine.java().found.startswith("Java 17")
    assert [one.outcome for one in machine.raydp_jars({})] == [OK]


@pytest.mark.parametrize(
    ("required", "told"),
    [
        (["numpy<1", "pyarrow>=26"], "numpy is"),
        (["no-such-package==1.0"], "no-such-package is missing"),
        (["numpy>=2", 'no-such-package; sys_platform == "win32"'], ""),
    ],
)
def test_packages_are_compared_with_what_is_required(required: list[str], told: str) -> None:
    found = machine.packages(lambda: required)
    assert (found.outcome is WRONG) == bool(told)
    assert told in found.found


def test_a_package_that_is_only_a_folder_is_told_so() -> None:
    def missing() -> list[str]:
        raise metadata.PackageNotFoundError

    assert machine.packages(missing).outcome is WARNING


@pytest.mark.parametrize(("version", "outcome"), [("17.0.9", "warning"), ("17.0.15", "ok"), ("17.0.14+7", "ok")])
def test_an_old_java_17_is_told_with_what_to_install(tmp_path: Path, version: str, outcome: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch()
    (tmp_path / "release").write_text(f'JAVA_VERSION="{version}"\n')
    found = machine.java({"JAVA_HOME": str(tmp_path)})
    assert (found.outcome, version in found.found) == (outcome, True)
    assert ("apt-get install openjdk-17" in found.advice) == (outcome == "warning")


def test_another_java_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch()
    (tmp_path / "release").write_text('JAVA_VERSION="11.0.2"\n')
    found = machine.java({"JAVA_HOME": str(tmp_path)})
    assert found.outcome is WRONG
    assert "JAVA_HOME holds Java 11" in found.advice


@pytest.mark.parametrize(
    ("spark", "raydp", "told"),
    [
        (["spark-core_2.12-3.5.7.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.5.jar"], ""),
        (["spark-core_2.12-3.4.1.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.5.jar"], "its jars are of Spark 3.4.1"),
        ([], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.5.jar"], "its jars are of Spark none"),
        (["spark-core_2.12-3.5.7.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark340-1.6.5.jar"], "without one for Spark 3.5.7"),
        (["spark-core_2.12-3.5.7.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.1.jar"], "raydp-shims-spark350-1.6.1.jar"),
        (["spark-core_2.12-3.5.7.jar"], [], "without one for Spark 3.5.7"),
    ],
)  # fmt: skip
def test_jars_of_raydp_and_spark_have_to_fit(tmp_path: Path, spark: list[str], raydp: list[str], told: str) -> None:
    for folder, names in (("spark", spark), ("raydp", raydp)):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    found = machine.jars_fit(tmp_path / "spark", tmp_path / "raydp", "3.5.7", "1.6.5")
    assert (found.outcome is OK) == (not told)
    assert told in found.found


def test_another_spark_home_is_wrong(tmp_path: Path) -> None:
    _, found = machine.raydp_jars({"SPARK_HOME": str(tmp_path)})
    assert (found.check, found.outcome) == ("SPARK_HOME", WRONG)


def test_shared_memory_has_to_hold_rays_objects(tmp_path: Path) -> None:
    assert machine.shared_memory(str(tmp_path), memory=1).outcome is OK
    little = machine.shared_memory(str(tmp_path), memory=1 << 60)
    assert little.outcome is WARNING
    assert "--shm-size" in little.advice
    assert machine.shared_memory(str(tmp_path / "nothing")).outcome is WARNING


def test_a_folder_that_is_not_there_has_no_room(tmp_path: Path) -> None:
    assert "free" in machine.disk_room("disk", tmp_path).found
    assert machine.disk_room("disk", tmp_path / "nothing").outcome is WRONG


# -- object stores ------------------------------------------------------------------------------------------------


class Forgetful(MemoryObjectStore):
    """Ignores If-None-Match."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True


def test_a_store_is_proven_and_left_as_it_was(tmp_path: Path) -> None:
    found = list(storage.check_store(LocalObjectStore(tmp_path)))
    assert [one.outcome for one in found] == [OK, OK]
    assert "put-if-absent refuses a second writer" in found[0].found
    assert not [one for one in tmp_path.rglob("*") if one.is_file()]
    (broken,) = storage.check_store(Forgetful())
    assert broken.outcome is WRONG
    assert "put-if-absent" in broken.advice


def test_a_folder_that_nobody_has_asked_for_is_not_left_behind(tmp_path: Path) -> None:
    found = list(storage.findings(f"file://{tmp_path}/a/b"))
    assert [one.check for one in found] == ["object store", "clock", "disk of the store"]
    assert list(tmp_path.iterdir()) == []
    (refused,) = storage.findings("ftp://x/y")
    assert refused.outcome is WRONG
    assert "schemes" in refused.advice


@pytest.mark.parametrize(("off_s", "outcome"), [(0, OK), (20, OK), (-90, WARNING), (90, WARNING), (7200, WRONG)])
def test_clocks_are_compared(tmp_path: Path, off_s: float, outcome: Outcome) -> None:
    found = storage.clock(LocalObjectStore(tmp_path), lambda: time.time() + off_s)
    assert found.outcome is outcome
    if outcome is not OK:
        told = int(found.found.partition("differ by ")[2].split()[0])
        assert abs(told - abs(off_s)) <= 2


# -- the cluster --------------------------------------------------------------------------------------------------


def test_ports_of_other_programs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(cluster, "_GCS_PORT", taken)
        monkeypatch.setattr(cluster, "_DASHBOARD_PORT", taken)
        assert [one.outcome for one in cluster.ports()] == [WARNING, WARNING]
        monkeypatch.setattr(cluster.services, "find_gcs_addresses", lambda: {f"127.0.0.1:{taken}"})
        assert [one.outcome for one in cluster.ports()] == [OK, WARNING]
    assert [one.found for one in cluster.ports()][1] == "free"


def test_nodes_are_compared_with_this_machine() -> None:
    here = {"python": "3.11.7", "ray": "2.60.0", "raydp": "1.6.5"}
    assert cluster.compared("node a", "abc", here, dict(here)).outcome is OK
    other = cluster.compared("node a", "abc", here, {**here, "raydp": "not installed"})
    assert other.outcome is WRONG
    assert "raydp not installed (here 1.6.5)" in other.found


def test_a_cluster_of_another_version_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    monkeypatch.setattr(deploy, "_knock", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        *_, found = cluster.findings(f"127.0.0.1:{server.getsockname()[1]}", "")
    assert (found.check, found.outcome) == ("Ray cluster", WRONG)
    assert "cause=`Version mismatch: The cluster was started with: Ray: 2.9.0`" in found.advice


def test_without_a_cluster_there_is_a_word_of_how_to_start_one() -> None:
    *_, found = cluster.findings("127.0.0.1:1", "")
    assert (found.check, found.outcome) == ("Ray cluster", WRONG)


# -- how they are run ---------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes modules that checks can be run of."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")

    def make(text: str) -> str:
        name = f"check_{len(list(tmp_path.iterdir()))}"
        head = "from statefleet.doctor.findings import Finding, Outcome, emit\nimport subprocess, sys, time\n"
        (tmp_path / f"{name}.py").write_text(head + text)
        return name

    return make


def test_a_check_that_hangs_is_ended_and_what_it_found_counts(program: Callable[[str], str]) -> None:
    finding = "emit([Finding('first', Outcome.OK, 'is well')])\n"
    # It hangs with a child that has its outputs, as a driver of Ray has.
    hangs = program(f"{finding}subprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n")
    fails = program(f"print('noise')\n{finding}raise SystemExit('no luck')\n")
    # It has ended well, and what it started has its outputs yet.
    leaves = program(f"{finding}subprocess.Popen(['sleep', '600'])\n")
    begun = time.monotonic()
    found = list(run_apart([("slow", hangs, []), ("broken", fails, []), ("left", leaves, [])], 8))
    assert time.monotonic() - begun < 25
    assert [(one.check, one.outcome) for one in found] == [
        ("first", OK), ("slow", WRONG), ("first", OK), ("broken", WRONG), ("first", OK),
    ]  # fmt: skip
    assert "within 8 s" in found[1].found
    assert "no luck" in found[3].found


def test_the_report_says_what_to_do() -> None:
    found = [Finding("Java", OK, "Java 17"), Finding("disk", WRONG, "is full " * 30, "make room")]
    lines = report(found).splitlines()
    assert lines[0] == "ok     Java: Java 17"
    assert max(map(len, lines)) <= WIDTH
    assert "what to do: make room" in lines[-3]
    assert lines[-1] == "1 ok, 0 warning, 1 wrong"

"""The doctor's checks: each finds what is wrong, and none can hang."""

from __future__ import annotations

import socket
import sys
import time
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from coordinator.service import deploy
from coordinator.storage.local import LocalObjectStore
from statefleet.commands.output import WIDTH
from statefleet.commands.upkeep import report
from statefleet.doctor import cluster, machine, storage
from statefleet.doctor.findings import Finding, Outcome, run_apart
from tests.code_blocks import ROOT
from tests.memory_store import MemoryObjectStore

OK, WARNING, WRONG = Outcome


def test_jars_before_a_release_have_another_version_than_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "spark-core_2.13-4.2.1.jar").touch()
    for name in ("raydp-1.7.0-SNAPSHOT.jar", "raydp-shims-spark420-1.7.0-SNAPSHOT.jar"):
        (tmp_path / name).touch()
    assert machine.jars_fit(tmp_path, tmp_path, "4.2.1", "1.7.0b20260911.dev0").outcome is OK


@pytest.mark.parametrize(
    ("extra", "fitting"), [("spark35", ["3.11.7"]), ("spark4", ["3.12.1", "3.13.0"])], ids=["Spark 3.5", "Spark 4"]
)
def test_a_version_of_spark_has_pythons_of_its_own(extra: str, fitting: list[str]) -> None:
    versions = ["3.10.13", "3.11.7", "3.12.1", "3.13.0", "3.14.0"]
    assert [version for version in versions if machine.python_fits(version, extra).outcome is OK] == fitting


def test_the_package_is_for_the_pythons_that_the_doctor_accepts() -> None:
    versions = ["3.10", "3.11", "3.12", "3.13", "3.14"]
    required = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    accepted = {python for pythons in machine._PYTHONS.values() for python in pythons}
    assert {version for version in versions if version in required} == accepted


def test_this_machine_is_well() -> None:
    assert machine.python().outcome is OK
    assert machine.java().found.startswith("Java 17")
    assert [finding.outcome for finding in machine.raydp_jars({})] == [OK]


@pytest.mark.parametrize(
    ("required", "expected"),
    [
        (["numpy<1", "pyarrow>=26"], "numpy is"),
        (["no-such-package==1.0"], "no-such-package is missing"),
        (["numpy>=2", 'no-such-package; sys_platform == "win32"'], ""),
    ],
)
def test_packages_are_compared_with_what_is_required(required: list[str], expected: str) -> None:
    finding = machine.packages(lambda: required)
    assert (finding.outcome is WRONG) == bool(expected)
    assert expected in finding.found


def test_a_package_that_is_only_a_folder_is_reported() -> None:
    def missing() -> list[str]:
        raise metadata.PackageNotFoundError

    assert machine.packages(missing).outcome is WARNING


@pytest.mark.parametrize(
    ("version", "outcome", "advice"),
    [
        ("17.0.9", WARNING, "apt-get install openjdk-17"),
        ("17.0.15", OK, ""),
        ("17.0.14+7", OK, ""),
        ("11.0.2", WRONG, "JAVA_HOME holds Java 11"),
    ],
)
def test_an_old_java_17_is_reported_with_what_to_install_and_another_java_is_wrong(
    tmp_path: Path, version: str, outcome: Outcome, advice: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch()
    (tmp_path / "release").write_text(f'JAVA_VERSION="{version}"\n')
    finding = machine.java({"JAVA_HOME": str(tmp_path)})
    assert finding.outcome is outcome
    assert advice in finding.advice
    if outcome is not WRONG:
        assert version in finding.found
        assert ("apt-get install openjdk-17" in finding.advice) == (outcome is WARNING)


@pytest.mark.parametrize(
    ("spark", "raydp", "expected"),
    [
        (["spark-core_2.12-3.5.7.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.5.jar"], ""),
        (["spark-core_2.12-3.4.1.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.5.jar"], "its jars are of Spark 3.4.1"),
        ([], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.5.jar"], "its jars are of Spark none"),
        (["spark-core_2.12-3.5.7.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark340-1.6.5.jar"], "without one for Spark 3.5.7"),
        (["spark-core_2.12-3.5.7.jar"], ["raydp-1.6.5.jar", "raydp-shims-spark350-1.6.1.jar"], "raydp-shims-spark350-1.6.1.jar"),
        (["spark-core_2.12-3.5.7.jar"], [], "there is none"),
    ],
)  # fmt: skip
def test_jars_of_raydp_and_spark_have_to_fit(tmp_path: Path, spark: list[str], raydp: list[str], expected: str) -> None:
    for folder, names in (("spark", spark), ("raydp", raydp)):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    finding = machine.jars_fit(tmp_path / "spark", tmp_path / "raydp", "3.5.7", "1.6.5")
    assert (finding.outcome is OK) == (not expected)
    assert expected in finding.found
    # The same version once more would not have the jar.
    assert ("its extra spark" in finding.advice) == ("without one" in expected)


def test_another_spark_home_is_wrong(tmp_path: Path) -> None:
    _, finding = machine.raydp_jars({"SPARK_HOME": str(tmp_path)})
    assert (finding.check, finding.outcome) == ("SPARK_HOME", WRONG)


def test_shared_memory_has_to_hold_rays_objects(tmp_path: Path) -> None:
    assert machine.shared_memory(str(tmp_path), memory=1).outcome is OK
    little = machine.shared_memory(str(tmp_path), memory=1 << 60)
    assert little.outcome is WARNING
    assert "--shm-size" in little.advice
    assert machine.shared_memory(str(tmp_path / "nothing")).outcome is WARNING


def test_a_folder_that_does_not_exist_has_no_disk_space(tmp_path: Path) -> None:
    assert "free" in machine.disk_room("disk", tmp_path).found
    assert machine.disk_room("disk", tmp_path / "nothing").outcome is WRONG


# -- object stores ------------------------------------------------------------------------------------------------


class Forgetful(MemoryObjectStore):
    """A store that ignores If-None-Match."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True


def test_a_store_is_proven_and_left_as_it_was(tmp_path: Path) -> None:
    findings = list(storage.check_store(LocalObjectStore(tmp_path)))
    assert [finding.outcome for finding in findings] == [OK, OK]
    assert "put-if-absent refuses a second writer" in findings[0].found
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    (broken,) = storage.check_store(Forgetful())
    assert broken.outcome is WRONG
    assert "put-if-absent" in broken.advice


def test_a_folder_that_a_check_created_is_not_left_behind(tmp_path: Path) -> None:
    findings = list(storage.findings(f"file://{tmp_path}/a/b"))
    assert [finding.check for finding in findings] == ["object store", "clock", "disk of the store"]
    assert list(tmp_path.iterdir()) == []
    (invalid,) = storage.findings("ftp://x/y")
    assert invalid.outcome is WRONG
    assert "schemes" in invalid.advice


@pytest.mark.parametrize(("off_s", "outcome"), [(0, OK), (20, OK), (-90, WARNING), (90, WARNING), (7200, WRONG)])
def test_clocks_are_compared(tmp_path: Path, off_s: float, outcome: Outcome) -> None:
    finding = storage.clock(LocalObjectStore(tmp_path), lambda: time.time() + off_s)
    assert finding.outcome is outcome
    if outcome is not OK:
        difference_s = int(finding.found.partition("differ by ")[2].split()[0])
        assert abs(difference_s - abs(off_s)) <= 2


# -- the cluster --------------------------------------------------------------------------------------------------


def test_ports_of_other_programs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert [finding.outcome for finding in cluster.ports(port, port)] == [WARNING, WARNING]
        monkeypatch.setattr(cluster.services, "find_gcs_addresses", lambda: {f"127.0.0.1:{port}"})
        assert [finding.outcome for finding in cluster.ports(port, port)] == [OK, WARNING]
    assert [finding.found for finding in cluster.ports(port, port)][1] == "free"


def test_nodes_are_compared_with_this_machine() -> None:
    versions = {"python": "3.11.7", "ray": "2.60.0", "raydp": "1.6.5"}
    assert cluster.compared("node a", "abc", versions, dict(versions)).outcome is OK
    finding = cluster.compared("node a", "abc", versions, {**versions, "raydp": "not installed"})
    assert finding.outcome is WRONG
    assert "raydp not installed (here 1.6.5)" in finding.found


def test_a_cluster_of_another_version_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    monkeypatch.setattr(deploy, "_check_answers", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        *_, finding = cluster.findings(f"127.0.0.1:{server.getsockname()[1]}", "")
    assert (finding.check, finding.outcome) == ("Ray cluster", WRONG)
    assert "cause=`Version mismatch: The cluster was started with: Ray: 2.9.0`" in finding.advice


def test_without_a_cluster_the_advice_is_how_to_start_one() -> None:
    *_, finding = cluster.findings("127.0.0.1:1", "")
    assert (finding.check, finding.outcome) == ("Ray cluster", WRONG)


# -- how they are run ---------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that writes a module whose checks can be run."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")

    def make(text: str) -> str:
        name = f"check_{len(list(tmp_path.iterdir()))}"
        head = "from statefleet.doctor.findings import Finding, Outcome, emit\nimport subprocess, sys, time\n"
        (tmp_path / f"{name}.py").write_text(head + text)
        return name

    return make


def test_a_check_that_hangs_is_ended_and_what_it_found_counts(program: Callable[[str], str]) -> None:
    finding = "emit([Finding('first', Outcome.OK, 'is well')])\n"
    # It hangs with a child process that keeps its outputs open, as a driver of Ray does.
    hangs = program(f"{finding}subprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n")
    fails = program(f"print('noise')\n{finding}raise SystemExit('no luck')\n")
    # It ends well, but its child process still has its outputs open.
    leaves = program(f"{finding}subprocess.Popen(['sleep', '600'])\n")
    started = time.monotonic()
    findings = list(run_apart([("slow", hangs, []), ("broken", fails, []), ("left", leaves, [])], 8))
    assert time.monotonic() - started < 25
    assert [(result.check, result.outcome) for result in findings] == [
        ("first", OK), ("slow", WRONG), ("first", OK), ("broken", WRONG), ("first", OK),
    ]  # fmt: skip
    assert "within 8 s" in findings[1].found
    assert "no luck" in findings[3].found


def test_the_report_says_what_to_do() -> None:
    findings = [Finding("Java", OK, "Java 17"), Finding("disk", WRONG, "is full " * 30, "make room")]
    lines = report(findings).splitlines()
    assert lines[0] == "ok     Java: Java 17"
    assert max(map(len, lines)) <= WIDTH
    assert "what to do: make room" in lines[-3]
    assert lines[-1] == "1 ok, 0 warning, 1 wrong"

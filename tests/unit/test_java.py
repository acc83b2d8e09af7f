"""The choice of a Java home, and the reasons why others are refused."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from coordinator.model.errors import SetupError
from spark_jobs.session.java import choose_java_home, java_version, main, parse_version
from spark_jobs.session.spark_session import child_environment, spark_environment


def home(folder: Path, version: str | None, *, release: bool = True) -> Path:
    """Make a folder that looks like a Java home: bin/java that prints its version, and a release file."""
    (folder / "bin").mkdir(parents=True)
    binary = folder / "bin" / "java"
    binary.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    if release:
        (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return folder


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('JAVA_VERSION="17.0.9"', 17),
        ('openjdk version "17" 2021-09-14', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25.0.2" 2026-01-20', 25),
        ("no java at all", None),
    ],
)
def test_versions_are_read_in_every_form(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_java_17_in_java_home_is_preferred(tmp_path: Path) -> None:
    java = home(tmp_path / "own", "17.0.15")
    assert choose_java_home({"JAVA_HOME": str(java), "PATH": ""}) == java


@pytest.mark.parametrize("version", ["11.0.2", "21.0.1", "1.8.0_1"])
def test_another_version_in_java_home_is_refused_with_the_reason(tmp_path: Path, version: str) -> None:
    java = home(tmp_path / "own", version)
    with pytest.raises(SetupError, match=r"JAVA_HOME holds Java \d+.*Java 17 only.*unset JAVA_HOME"):
        choose_java_home({"JAVA_HOME": str(java)})


def test_an_empty_java_home_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="holds no Java"):
        choose_java_home({"JAVA_HOME": str(tmp_path)})


def test_java_on_the_path_is_taken_if_it_is_a_17(tmp_path: Path) -> None:
    java = home(tmp_path / "seventeen", "17.0.1", release=False)
    assert java_version(java) == 17
    assert choose_java_home({"PATH": str(java / "bin")}) == java


def test_without_a_17_the_runtime_that_comes_with_the_package_is_taken(tmp_path: Path) -> None:
    java_21 = home(tmp_path / "other", "21.0.1")
    chosen = choose_java_home({"PATH": str(java_21 / "bin")})
    assert os.access(chosen / "bin" / "java", os.X_OK)
    assert java_version(chosen) == 17


def test_ray_and_raydp_find_the_chosen_java_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, java_21 = home(tmp_path / "own", "17.0.15"), home(tmp_path / "other", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    monkeypatch.setenv("PATH", os.pathsep.join([str(java_21 / "bin"), "/usr/bin"]))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = dict(os.environ)
    with spark_environment(), spark_environment():
        assert shutil.which("java") == str(chosen / "bin" / "java")
        assert os.environ["PATH"].split(os.pathsep).count(str(chosen / "bin")) == 1
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
        assert Path(os.environ["PYTHONPATH"], "spark_jobs").is_dir()
        os.environ["SET_MEANWHILE"] = "1"
    # Programs that are started afterwards get nothing of it; variables that were set meanwhile stay.
    assert os.environ == {**before, "SET_MEANWHILE": "1"}
    monkeypatch.delenv("SET_MEANWHILE")


def test_the_environment_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(ZeroDivisionError), child_environment(PATH="/opt", SET_WITHIN="1"):
        raise ZeroDivisionError
    assert os.environ["PATH"] == "/usr/bin"
    assert "SET_WITHIN" not in os.environ


def test_the_chosen_java_is_printed_for_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path / "own", "17.0.15")))
    assert main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'own'}\n"
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path / "eleven", "11.0.2")))
    assert main() == 1
    assert "Java 11" in capsys.readouterr().err

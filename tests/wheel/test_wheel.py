"""The wheel as a user has it: built, installed into an empty environment outside the clone, and run from an empty folder.

Run by ``./run wheel``; it downloads what pip's cache lacks. The versions are those of the environment that the tests run in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

from spark_jobs.jvm.build import jar_file

ROOT = Path(__file__).parents[2]
PACKAGES = ("statefleet", "coordinator", "store_actors", "spark_jobs")

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]


def call(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program without this environment's paths; check its exit code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    ran = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


def project_files() -> list[str]:
    """Return the files of the project, as paths from its root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def jars() -> list[str]:
    """Return the compiled classes for each version of Spark, as paths from the project's root."""
    return [str(jar_file(line).relative_to(ROOT)) for line in ("spark35", "spark4")]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy: a build in the clone would take along what an earlier one left in ``build/``."""
    copy = tmp_path_factory.mktemp("copy")
    for name in [*project_files(), *jars()]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    folder = tmp_path_factory.mktemp("dist")
    arguments = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy)
    call(sys.executable, *arguments, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def binaries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an empty environment into which the wheel and what it needs were installed."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", folder, cwd=folder)
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "".join(
            f"{package.name}=={package.version}\n"
            for package in metadata.distributions()
            if package.name not in ("statefleet", "pip", "setuptools")
        )
    )
    spark = "spark35" if metadata.version("pyspark").startswith("3.") else "spark4"
    command = ("-m", "pip", "install", "--quiet", "--constraint", constraints, f"{wheel}[{spark},raydp]")
    call(folder / "bin" / "python", *command, cwd=folder)
    return folder / "bin"


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    expected = {name for name in project_files() if name.partition("/")[0] in PACKAGES} | set(jars())
    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed


def test_the_requirements_fit_each_other(binaries: Path, tmp_path: Path) -> None:
    call(binaries / "python", "-m", "pip", "check", cwd=tmp_path)
    installed = call(binaries / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path).stdout
    assert not re.findall(r"^(?:duckdb|polars|jupyterlab|pytest)==", installed, re.MULTILINE), "of an extra"


def test_the_main_job_runs_in_an_empty_folder_and_goes_on_there(binaries: Path, tmp_path: Path) -> None:
    job = (binaries / "statefleet", "quickstart", "--batches", "2", "--rows", "2000")
    first = call(*job, cwd=tmp_path)
    assert "starting; " in first.stdout
    assert "4,000 events in " in first.stdout
    second = call(*job, cwd=tmp_path)
    assert "resuming after " in second.stdout
    assert "this run read 4,000 rows" in second.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["statefleet-data"]


def test_types_are_known_to_a_checker(binaries: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import statefleet as sf\n\nfleet: int = sf.connect('file:///tmp/x')\n")
    arguments = ("-m", "mypy", "--follow-imports=silent", "--python-executable", binaries / "python", program)
    checked = call(sys.executable, *arguments, cwd=tmp_path, code=1)
    assert 'has type "Fleet"' in checked.stdout
    assert "Found 1 error" in checked.stdout


def test_what_needs_an_extra_says_so(binaries: Path, tmp_path: Path) -> None:
    command = (binaries / "statefleet", "sql", tmp_path.as_uri(), "SELECT 1", "--offline")
    ran = call(*command, cwd=tmp_path, code=1)
    assert ran.stderr.startswith("error: DuckDB is not installed here; pip install 'duckdb")


def test_a_module_of_the_users_with_our_name_is_reported(binaries: Path, tmp_path: Path) -> None:
    (tmp_path / "coordinator.py").write_text("print('the decoy runs')\n")
    ran = call(binaries / "python", "-c", "import statefleet", cwd=tmp_path, code=1)
    assert f"ImportError: import coordinator leads to {tmp_path / 'coordinator.py'}" in ran.stderr
    assert ran.stdout == ""


def test_the_command_knows_its_version_and_its_machine(wheel: Path, binaries: Path, tmp_path: Path) -> None:
    version = wheel.name.split("-")[1]
    assert call(binaries / "statefleet", "--version", cwd=tmp_path).stdout.startswith(f"statefleet {version}, ")
    program = "import statefleet; print(statefleet.__version__)"
    assert call(binaries / "python", "-c", program, cwd=tmp_path).stdout == f"{version}\n"

"""Modules of a user's that have the names of Statefleet's packages are reported before anything of them is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from statefleet.import_names import PACKAGES, check_import_names

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, paths: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter in a folder, which is the first entry of ``sys.path``; then come `paths`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def decoy(folder: Path, name: str, *, is_package: bool) -> Path:
    """Write a module that prints when it is imported; return its file."""
    folder.mkdir(exist_ok=True)
    if is_package:
        (folder / name).mkdir()
    file = folder / name / "__init__.py" if is_package else folder / f"{name}.py"
    file.write_text("print('the decoy runs')\n")
    return file


def check_refusal(ran: subprocess.CompletedProcess[str], name: str, file: Path) -> None:
    """Check that a program ended with the error that names the decoy."""
    assert ran.returncode == 1
    last = ran.stderr.strip().rpartition("\n")[2]
    assert last.startswith(f"ImportError: import {name} leads to {file}, and not to Statefleet's package {ROOT / name}")
    assert f"rename the first, or start the program where {file.parents[file.stem == '__init__']} is not" in last


@pytest.mark.parametrize("is_package", [True, False])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_module_before_ours_is_refused_and_not_run(tmp_path: Path, name: str, is_package: bool) -> None:
    file = decoy(tmp_path, name, is_package=is_package)
    ran = run(tmp_path, "-c", "import statefleet")
    check_refusal(ran, name, file)
    assert ran.stdout == ""


@pytest.mark.parametrize("name", PACKAGES)
def test_a_module_that_was_imported_before_statefleet_is_refused(tmp_path: Path, name: str) -> None:
    file = decoy(tmp_path, name, is_package=True)
    check_refusal(run(tmp_path, "-c", f"import {name}\nimport statefleet"), name, file)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_module_after_ours_disturbs_nothing(tmp_path: Path, name: str) -> None:
    """The program that wants the other one sees in Python's own error whose module it met."""
    decoy(tmp_path / "later", name, is_package=True)
    program = f"import statefleet, {name}\nprint(statefleet.Maintenance.__module__)\nfrom {name} import Theirs"
    ran = run(tmp_path, "-c", program, paths=(ROOT, tmp_path / "later"))
    assert ran.stdout == "coordinator.model.maintenance\n"
    assert ran.stderr.strip().endswith(f"cannot import name 'Theirs' from '{name}' ({ROOT / name / '__init__.py'})")


def test_a_folder_without_a_module_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    assert run(tmp_path, "-c", "import statefleet").returncode == 0


@pytest.mark.parametrize(
    "program",
    [
        "import store_actors.engine.table",
        # How a process of Ray's or Spark's gets a class of ours, by its module.
        "import pickle; pickle.loads(b'cstore_actors.actor\\nStoreActor\\n.')",
        "import pickle; pickle.loads(b'cstore_actors.client.operator_task\\nOperatorTask\\n.')",
    ],
)
def test_workers_and_actors_that_import_no_statefleet_are_refused_too(tmp_path: Path, program: str) -> None:
    file = decoy(tmp_path, "coordinator", is_package=True)
    check_refusal(run(tmp_path, "-c", program), "coordinator", file)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_daemon_of_sparks_workers_is_refused_also_where_its_own_package_is_hidden(
    tmp_path: Path, name: str
) -> None:
    file = decoy(tmp_path, name, is_package=True)
    check_refusal(run(tmp_path, "-m", "statefleet.worker_daemon"), name, file)


def test_a_missing_package_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=f"import coordinator leads to {ROOT}"):
        check_import_names(tmp_path)
    (tmp_path / "statefleet").symlink_to(ROOT / "statefleet")
    program = (
        "import sys\nsys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]\n"
        f"sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\nimport statefleet"
    )
    ran = run(tmp_path, "-c", program, paths=())
    assert ran.stderr.strip().endswith(
        f"'coordinator' is not in {tmp_path}, where the others are: install Statefleet again"
    )

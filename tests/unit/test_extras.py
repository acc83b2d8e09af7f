"""Without the packages of an extra Statefleet works, and what needs one of them says in a sentence what to install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coordinator.model.errors import SetupError
from coordinator.runtime import extras
from coordinator.runtime.extras import EXTRAS, import_extra

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: Refuses imports of packages, as if they were not installed.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
COMMAND = "from statefleet.cli import main\nsys.exit(main({arguments!r}))"


def without(packages: set[str], program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter that cannot import some packages."""
    script = BLOCKER.format(blocked=packages) + program
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("duckdb", "from statefleet.reads.sql import answer\nanswer('SELECT 1', None)"),
        ("polars", "from coordinator.runtime.extras import import_extra\nimport_extra('polars')"),
        (
            "aiohttp",
            "from statefleet.dashboard.deploy import _deploy\n"
            "from statefleet.dashboard.options import DashboardOptions\n_deploy('file:///tmp/x', DashboardOptions())",
        ),
        ("pyspark", "import statefleet\nstatefleet.connect"),
        ("raydp", "import statefleet\nstatefleet.start_session"),
    ],
)
def test_a_missing_package_is_one_sentence_with_the_line_that_installs_it(package: str, program: str) -> None:
    ran = without({package}, program)
    title, extra = EXTRAS[package]
    last = ran.stderr.strip().rpartition("\n")[2]
    assert f"SetupError: {title} is not installed here; " in last
    assert f"(Statefleet's extra {extra})" in last


def test_the_command_line_prints_it_without_a_traceback() -> None:
    query = ["sql", "file:///tmp/no-fleet", "SELECT 1", "--offline"]
    ran = without({"duckdb"}, COMMAND.format(arguments=query))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: DuckDB is not installed here; pip install 'duckdb")
    ran = without({"pyspark"}, COMMAND.format(arguments=["quickstart"]))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: PySpark is not installed here; ")
    assert "Traceback" not in ran.stderr


def test_without_any_extra_all_that_needs_none_is_imported() -> None:
    """Only Spark is: the public names of a query's side need it."""
    program = """
import statefleet
for name, module in statefleet._MODULES.items():
    getattr(statefleet, name)
from statefleet.cli import main
sys.exit(main(["doctor", "--help"]))
"""
    others = {"duckdb", "polars", "jupyterlab", "IPython", "fastapi", "starlette", "uvicorn"}
    ran = without(others, program)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_another_missing_module_stays_the_error_that_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_extra("no_such_module")


def test_where_statefleet_is_only_a_folder_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> list[str]:
        raise extras.metadata.PackageNotFoundError

    monkeypatch.setattr(extras.metadata, "requires", missing)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(SetupError, match=r"^DuckDB is not installed here; install it \(Statefleet's extra sql\)"):
        import_extra("duckdb")


def test_each_extra_is_in_the_project() -> None:
    # Spark's are chosen by the version of Python.
    assert {extra for _, extra in EXTRAS.values()} - {"spark35", "spark4"} <= set(PROJECT["optional-dependencies"])
    for package, (_, extra) in EXTRAS.items():
        if not extra.startswith("spark"):
            assert any(line.startswith(package) for line in PROJECT["optional-dependencies"][extra])
            assert not any(line.startswith(package) for line in PROJECT["dependencies"])


def test_each_extra_of_users_is_on_the_installing_page() -> None:
    page = (ROOT / "docs" / "installing.md").read_text()
    assert [extra for extra in PROJECT["optional-dependencies"] if f"`{extra}`" not in page] == ["test", "docs"]

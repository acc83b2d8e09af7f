"""Without the packages of an extra Statefleet works, and what needs one of them says in a sentence what to install."""

from __future__ import annotations

import json
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

#: Runs programs one after the other, each where some packages cannot be imported, as if they were not installed.
RUNNER = """
import contextlib, io, json, sys, traceback

class Blocker:
    blocked = ()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocker = Blocker()
sys.meta_path.insert(0, blocker)
outcomes = []
for blocked, program in json.load(sys.stdin):
    assert not {name.partition(".")[0] for name in sys.modules} & set(blocked), "imported before it is blocked"
    blocker.blocked, code = blocked, 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            exec(program, {})
        except SystemExit as ended:
            code = ended.code
        except Exception:
            code = traceback.print_exc() or 1
    outcomes.append((code, out.getvalue(), errors.getvalue()))
json.dump(outcomes, sys.stdout)
"""
COMMAND = "import sys\nfrom statefleet.cli import main\nsys.exit(main({arguments!r}))"
SQL = ["sql", "file:///tmp/no-fleet", "SELECT 1", "--offline"]
#: Of the extras only Spark's is needed, by the public names of a query's side.
ALL_ELSE = """
import sys
import statefleet
for name, module in statefleet._MODULES.items():
    getattr(statefleet, name)
from statefleet.cli import main
sys.exit(main(["doctor", "--help"]))
"""
#: What is done without packages. PySpark comes before those that import it.
CASES = {
    "duckdb": (["duckdb"], "from statefleet.reads.sql import answer\nanswer('SELECT 1', None)"),
    "polars": (["polars"], "from coordinator.runtime.extras import import_extra\nimport_extra('polars')"),
    "aiohttp": (
        ["aiohttp"],
        "from statefleet.dashboard.deploy import _deploy\n"
        "from statefleet.dashboard.options import DashboardOptions\n_deploy('file:///tmp/x', DashboardOptions())",
    ),
    "sql on the command line": (["duckdb"], COMMAND.format(arguments=SQL)),
    "quickstart on the command line": (["pyspark"], COMMAND.format(arguments=["quickstart"])),
    "pyspark": (["pyspark"], "import statefleet\nstatefleet.connect"),
    "raydp": (["raydp"], "import statefleet\nstatefleet.start_session('x')"),
    "all else": (["duckdb", "polars", "jupyterlab", "IPython"], ALL_ELSE),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, str, str]]:
    """What came of each case: its exit code, output and errors, all in one process of their own."""
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(list(CASES.values())), capture_output=True, text=True, check=True, cwd=ROOT
    )  # fmt: skip
    return {name: tuple(outcome) for name, outcome in zip(CASES, json.loads(ran.stdout), strict=True)}


@pytest.mark.parametrize("package", ["duckdb", "polars", "aiohttp", "pyspark", "raydp"])
def test_a_missing_package_is_one_sentence_with_the_line_that_installs_it(
    outcomes: dict[str, tuple[int, str, str]], package: str
) -> None:
    _, _, errors = outcomes[package]
    title, extra = EXTRAS[package]
    last = errors.strip().rpartition("\n")[2]
    assert f"SetupError: {title} is not installed here; " in last
    assert f"(Statefleet's extra {extra})" in last


def test_the_command_line_prints_it_without_a_traceback(outcomes: dict[str, tuple[int, str, str]]) -> None:
    code, out, errors = outcomes["sql on the command line"]
    assert (code, out) == (1, "")
    assert errors.startswith("error: DuckDB is not installed here; pip install 'duckdb")
    code, out, errors = outcomes["quickstart on the command line"]
    assert (code, out) == (1, "")
    assert errors.startswith("error: PySpark is not installed here; ")
    assert "Traceback" not in errors


def test_without_any_extra_all_that_needs_none_is_imported(outcomes: dict[str, tuple[int, str, str]]) -> None:
    code, _, errors = outcomes["all else"]
    assert (code, errors) == (0, "")


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


def test_of_an_extra_with_packages_for_several_pythons_those_of_this_one_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["numpy>=2", *(f"{line} and extra == 'raydp'" for line in PROJECT["optional-dependencies"]["raydp"])]
    monkeypatch.setattr(extras.metadata, "requires", lambda _: lines)
    monkeypatch.setitem(sys.modules, "raydp", None)
    version = "1.6.5" if sys.version_info < (3, 12) else "1.7.0b20260911.dev0"
    with pytest.raises(
        SetupError, match=rf"^RayDP is not installed here; pip install 'raydp=={version}' \(Statefleet's extra raydp\)"
    ):
        import_extra("raydp")


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

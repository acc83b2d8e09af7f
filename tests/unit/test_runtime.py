"""A process's clock, ids and threads: ages advance while the machine sleeps, and only the runtime reads a clock."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from coordinator.runtime.runtime import MachineClock, MachineThreads, Runtime

ROOT = Path(__file__).parents[2]
#: Modules that may use the machine's clock, ids and threads directly: the runtime, object stores (which wait between attempts), and
#: modules that no simulation has: the memory and disk of this process, a server for browsers, and the standard error of child
#: processes.
EXCEPT = {
    "coordinator/runtime/native_notes.py",
    "coordinator/runtime/runtime.py",
    "coordinator/storage",
    "store_actors/spilling",
    "statefleet/dashboard",
}


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has such a clock")
def test_ages_are_measured_by_a_clock_that_does_not_stop_while_the_machine_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {time.CLOCK_BOOTTIME: 5000.0, time.CLOCK_MONOTONIC: 1000.0}
    monkeypatch.setattr(time, "clock_gettime", seconds.__getitem__)
    assert MachineClock().elapsed_s() == 5000.0


def test_a_holder_may_take_its_lock_again() -> None:
    lock = MachineThreads().lock()
    with lock:
        assert lock.acquire(blocking=False)
        lock.release()


def test_ids_are_unique_and_have_32_digits() -> None:
    runtime = Runtime()
    ids = {runtime.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(id_) == 32 and int(id_, 16) >= 0 for id_ in ids)


@pytest.mark.parametrize("package", ["coordinator", "store_actors"])
def test_only_the_runtime_takes_time_ids_or_threads_from_the_machine(package: str) -> None:
    for file in sorted((ROOT / package).rglob("*.py")):
        if any(str(file.relative_to(ROOT)).startswith(path) for path in EXCEPT):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {
                "time",
                "uuid",
                "random",
                "threading",
                "concurrent",
            }, file

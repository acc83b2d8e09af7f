"""The cost of many Ray drivers on one node for Ray's control plane: each Python worker of Spark that calls the fleet is a driver.

``python -m benchmarks.costs drivers --json result.json``

A local cluster has one asynchronous actor. Processes that are forked as Spark's workers are, from a process with all imports done,
join the cluster a few at a time, call the actor, and stay. Measured are the time to connect, the unshared memory of a driver, and
CPU, memory and open files of the GCS and the raylet: while drivers join, while they call, and while they are idle. No Spark, no
fleet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from benchmarks.costs.ray_driver import deploy, drive
from benchmarks.harness import add_files, report_json

_TICKS = os.sysconf("SC_CLK_TCK")
#: Processes that connect at the same time, as the tasks of a first wave do.
_AT_ONCE = 8
#: Below this much memory no more drivers are started.
_MIN_AVAILABLE_MIB = 3000
_SERVERS = ("gcs_server", "raylet")
#: Forks from a process with the imports alone, as Spark's workers are forked; this process has a cluster's clients in it.
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["ray", "pyarrow", "benchmarks.costs.ray_driver"])


@dataclass(frozen=True)
class Usage:
    """The resources that a process has used so far."""

    cpu_s: float
    rss_mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Return the usage of a process of this machine."""
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        status = (folder / "status").read_text()
        rss = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        return cls((int(fields[11]) + int(fields[12])) / _TICKS, rss, len(os.listdir(folder / "fd")), int(fields[17]))


def _unshared_mib(pid: int) -> float:
    """Return the memory that a process shares with no other."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(rollup.partition(f"Private_{kind}:")[2].split()[0]) for kind in ("Clean", "Dirty")) / 1024


def _available_mib() -> float:
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) / 1024


class _Drivers:
    """The drivers that have joined."""

    def __init__(self, address: str, calls: int) -> None:
        self._address, self._calls = address, calls
        self._running: list[tuple[Any, Any]] = []

    def add_up_to(self, count: int) -> list[float]:
        """Start drivers up to a number, or until memory is short; return how long each took to connect."""
        took: list[float] = []
        while len(self._running) < count and _available_mib() > _MIN_AVAILABLE_MIB:
            new = []
            for _ in range(min(_AT_ONCE, count - len(self._running))):
                local_pipe, driver_pipe = _FORK.Pipe()
                process = _FORK.Process(target=drive, args=(self._address, self._calls, driver_pipe), daemon=True)
                process.start()
                new.append((process, local_pipe))
            took += [pipe.recv() for _, pipe in new]
            self._running += new
        return took

    def call(self) -> list[float]:
        """Have all drivers call at once; return the seconds of a call of each."""
        for _, pipe in self._running:
            pipe.send(True)
        return [pipe.recv() for _, pipe in self._running]

    def unshared_mib(self) -> list[float]:
        """Return the memory that each driver shares with no other process."""
        return [_unshared_mib(process.pid) for process, _ in self._running]

    def __len__(self) -> int:
        return len(self._running)

    def end(self) -> None:
        """End the drivers that were started here."""
        for process, pipe in self._running:
            pipe.send(False)
            process.join(30)
            if process.is_alive():
                process.kill()


def _spent(before: dict[str, Usage], pids: dict[str, int]) -> dict[str, dict[str, float]]:
    now = {name: Usage.of(pid) for name, pid in pids.items()}
    return {
        name: {
            "cpu_s": usage.cpu_s - before[name].cpu_s,
            "rss_mib": usage.rss_mib,
            "files": usage.files,
            "threads": usage.threads,
        }
        for name, usage in now.items()
    }


def _measure(drivers: _Drivers, count: int, pids: dict[str, int], idle_s: float) -> dict[str, Any]:
    def usage() -> dict[str, Usage]:
        return {name: Usage.of(pid) for name, pid in pids.items()}

    present, before = len(drivers), usage()
    took = drivers.add_up_to(count)
    connecting, before = _spent(before, pids), usage()
    calls = drivers.call()
    calling, before = _spent(before, pids), usage()
    time.sleep(idle_s)
    idle = _spent(before, pids)
    row = {
        "drivers": len(drivers),
        "came": len(drivers) - present,
        "connect_s": statistics.median(took) if took else None,
        "slowest_connect_s": max(took, default=None),
        "call_ms": 1000 * statistics.median(calls),
        "own_mib": statistics.median(drivers.unshared_mib()),
        "connecting": connecting,
        "calling": calling,
        "idle": idle,
        "idle_s": idle_s,
    }
    each = max(1, row["came"])
    print(
        f"{row['drivers']:>5} drivers: connect {row['connect_s'] or 0:.2f} s (slowest {row['slowest_connect_s'] or 0:.2f}), a call "
        f"{row['call_ms']:.1f} ms with all calling, {row['own_mib']:.0f} MiB each; "
        + "; ".join(
            f"{name} {1000 * connecting[name]['cpu_s'] / each:.0f} ms CPU a driver that comes, "
            f"{100 * idle[name]['cpu_s'] / idle_s:.1f} % of a core at rest, {idle[name]['rss_mib']:.0f} MiB, "
            f"{idle[name]['files']:.0f} files"
            for name in pids
        ),
        flush=True,
    )
    return row


def _counts(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    add_files(parser)
    parser.add_argument("--drivers", type=_counts, default=[1, 50, 100, 200], help="numbers of drivers, ascending")
    parser.add_argument("--calls", type=int, default=50, help="of each driver, one after the other (%(default)s)")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long to look at drivers at rest (%(default)s)")


def run(options: argparse.Namespace) -> None:
    """Measure and print a line for each number of drivers."""
    # This process is no driver itself.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    pids = {name: cluster.head_node.all_processes[name][0].process.pid for name in _SERVERS}
    deploying = _FORK.Process(target=deploy, args=(cluster.address,))
    deploying.start()
    deploying.join()
    rows: list[dict[str, Any]] = []
    drivers = _Drivers(cluster.address, options.calls)
    try:
        rows += (_measure(drivers, count, pids, options.idle_s) for count in options.drivers)
    finally:
        drivers.end()
        cluster.shutdown()
    report_json(options, rows=rows)

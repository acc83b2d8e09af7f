"""What many Ray drivers on one node cost Ray's control plane: each Python worker of Spark that calls the fleet is one.

``python -m benchmarks.drivers --json result.json``

A local cluster with one asynchronous actor. So many processes, forked from one that has all imported as Spark's workers are, join it,
a few at a time, call the actor, and stay. Measured are the time to connect, what a driver holds in memory that it does not share, and
CPU, memory and open files of the GCS and the raylet: while drivers come, while they call, and while they do nothing. No Spark, no
fleet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from benchmarks.harness import add_files, report_json
from benchmarks.ray_driver import deploy, drive

_TICKS = os.sysconf("SC_CLK_TCK")
#: Processes that connect at the same time, as the tasks of a first wave do.
_AT_ONCE = 8
#: Below this much memory no more drivers are started.
_LEFT_MIB = 3000
_SERVERS = ("gcs_server", "raylet")
#: Forks from a process that has imported and nothing else, as Spark's workers are forked: this one has a cluster's clients in it.
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["ray", "pyarrow", "benchmarks.ray_driver"])


@dataclass(frozen=True)
class Used:
    """What a process has used so far."""

    cpu_s: float
    rss_mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Used:
        """Of a process of this machine."""
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        status = (folder / "status").read_text()
        rss = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        return cls((int(fields[11]) + int(fields[12])) / _TICKS, rss, len(os.listdir(folder / "fd")), int(fields[17]))


def _own_mib(pid: int) -> float:
    """Memory that a process shares with nobody."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(rollup.partition(f"Private_{kind}:")[2].split()[0]) for kind in ("Clean", "Dirty")) / 1024


def _available_mib() -> float:
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) / 1024


class _Drivers:
    """Drivers that are there."""

    def __init__(self, address: str, calls: int) -> None:
        self._address, self._calls = address, calls
        self._running: list[tuple[Any, Any]] = []

    def add_up_to(self, count: int) -> list[float]:
        """Start more; returns how long each took to connect. Fewer are started where memory ends."""
        took: list[float] = []
        while len(self._running) < count and _available_mib() > _LEFT_MIB:
            new = []
            for _ in range(min(_AT_ONCE, count - len(self._running))):
                here, there = _FORK.Pipe()
                process = _FORK.Process(target=drive, args=(self._address, self._calls, there), daemon=True)
                process.start()
                new.append((process, here))
            took += [pipe.recv() for _, pipe in new]
            self._running += new
        return took

    def call(self) -> list[float]:
        """All call at once; seconds a call."""
        for _, pipe in self._running:
            pipe.send(True)
        return [pipe.recv() for _, pipe in self._running]

    def own_mib(self) -> list[float]:
        """Memory that each shares with nobody."""
        return [_own_mib(process.pid) for process, _ in self._running]

    def __len__(self) -> int:
        return len(self._running)

    def end(self) -> None:
        """End those that were started here."""
        for process, pipe in self._running:
            pipe.send(False)
            process.join(30)
            if process.is_alive():
                process.kill()


def _spent(before: dict[str, Used], pids: dict[str, int]) -> dict[str, dict[str, float]]:
    now = {name: Used.of(pid) for name, pid in pids.items()}
    return {
        name: {
            "cpu_s": one.cpu_s - before[name].cpu_s,
            "rss_mib": one.rss_mib,
            "files": one.files,
            "threads": one.threads,
        }
        for name, one in now.items()
    }


def _measure(drivers: _Drivers, count: int, pids: dict[str, int], idle_s: float) -> dict[str, Any]:
    def look() -> dict[str, Used]:
        return {name: Used.of(pid) for name, pid in pids.items()}

    present, before = len(drivers), look()
    took = drivers.add_up_to(count)
    connecting, before = _spent(before, pids), look()
    calls = drivers.call()
    calling, before = _spent(before, pids), look()
    time.sleep(idle_s)
    idle = _spent(before, pids)
    row = {
        "drivers": len(drivers),
        "came": len(drivers) - present,
        "connect_s": statistics.median(took) if took else None,
        "slowest_connect_s": max(took, default=None),
        "call_ms": 1000 * statistics.median(calls),
        "own_mib": statistics.median(drivers.own_mib()),
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
    return sorted(int(one) for one in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drivers", description=__doc__)
    add_files(parser)
    parser.add_argument("--drivers", type=_counts, default=[1, 50, 100, 200], help="numbers of drivers, ascending")
    parser.add_argument("--calls", type=int, default=50, help="of each driver, one after the other (%(default)s)")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long to look at drivers at rest (%(default)s)")
    options = parser.parse_args(arguments)
    # Connected to by its drivers only.
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
    return 0


if __name__ == "__main__":
    sys.exit(main())

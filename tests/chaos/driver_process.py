"""The driver process of the chaos tests: started, killed, supervised."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from statefleet.fleet import Fleet
from tests.clocks import until

ROOT = Path(__file__).parents[2]


#: For a driver to get on; most of it is the start of Spark, which takes ten times as long on a busy machine.
DEADLINE_S = 400


#: The module of the driver that counts values.
COUNTING = ("tests.chaos.driver",)


class Driver:
    """The driver process with its children, which share a process group of their own."""

    def __init__(self, folder: Path, uri: str, address: str, *, program: Sequence[str]) -> None:
        """`program` is a module with its first arguments; the folder and the URI follow."""
        self._log = (folder / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *program, str(folder), uri],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    def finish(self) -> int:
        code = self.process.wait(timeout=DEADLINE_S)
        self._log.close()
        return code


def final_result(folder: Path) -> tuple[int, dict[int, int]]:
    """Return the number of batches, and the counts of the last one.

    A driver killed between two logs of Spark's file source reads two files in its next batch: batches may be fewer than files.
    """
    newest = max(int(file.stem.partition("-")[2]) for file in folder.glob("result-*.json"))
    result = json.loads((folder / f"result-{newest}.json").read_text())
    return newest + 1, {int(value): count for value, count in result.items()}


def versions(fleet: Fleet) -> list[int]:
    """Return the version of each shard; nothing before the state exists."""
    for query in fleet.status()["queries"]:
        if query["name"] == "chaos":
            return [shard["version"] for shard in query["shards"]]
    return []


def wait_for(driver: Driver, fleet: Fleet, condition: Callable[[list[int]], bool]) -> None:
    deadline, before = time.monotonic() + DEADLINE_S, versions(fleet)
    while not condition(reached := versions(fleet)):
        assert driver.process.poll() is None, "the driver ended by itself; see its log"
        assert time.monotonic() < deadline
        # Moments within a batch are short; the start of Spark is long, and has need of the machine.
        time.sleep(0.002 if reached and reached != before else 0.1)


def between(reached: int) -> Callable[[list[int]], bool]:
    return lambda reached_versions: bool(reached_versions) and min(reached_versions) == max(reached_versions) >= reached


class Supervisor:
    """Keeps a driver running until it ends by itself, as a cluster's scheduler would."""

    def __init__(self, folder: Path, uri: str, address: str, *, program: Sequence[str]) -> None:
        self._start = partial(Driver, folder, uri, address, program=program)
        self.driver = self._start()
        self.starts = 1

    def is_done(self) -> bool:
        code = self.driver.process.poll()
        if code not in (None, 0):
            self.driver = self._start()
            self.starts += 1
        return code == 0


def wait_past(fleet: Fleet, supervisor: Supervisor, version: int) -> None:
    """Wait until every shard is past a version (or the query has ended)."""
    until(
        lambda: supervisor.is_done() or min(versions(fleet), default=version) > version,
        DEADLINE_S,
        lambda: f"no progress past version {version}: shards are at {versions(fleet)}",
        0.05,
    )

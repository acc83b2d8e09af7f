"""The Spark driver is killed with SIGKILL, between two batches and in the middle of one; its restart must not show it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from spark_jobs.fleet import Fleet, connect
from spark_jobs.session.spark_session import ensure_ray
from tests.chaos.inputs import write_inputs
from tests.conftest import NewUri

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[2]
BATCHES = 8
#: For a driver to get on; most of it is the start of Spark, which takes ten times as long on a busy machine.
DEADLINE_S = 400


@pytest.fixture(scope="module")
def cluster(new_uri: NewUri) -> Iterator[str]:
    """A Ray cluster that outlives the drivers; its address."""
    ensure_ray(num_cpus=8)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


class Driver:
    """The driver process with its children, which share a process group of their own."""

    def __init__(self, folder: Path, uri: str, address: str) -> None:
        self._log = (folder / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.driver", str(folder), uri],
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
    """Number of batches and the last one's counts.

    A driver killed between two logs of Spark's file source reads two files in its next batch: batches may be fewer than files.
    """
    newest = max(int(file.stem.partition("-")[2]) for file in folder.glob("result-*.json"))
    result = json.loads((folder / f"result-{newest}.json").read_text())
    return newest + 1, {int(value): count for value, count in result.items()}


def versions(fleet: Fleet) -> list[int]:
    """Version of each shard; empty before the state exists."""
    for query in fleet.status()["queries"]:
        if query["name"] == "chaos":
            return [shard["version"] for shard in query["shards"]]
    return []


def wait_for(driver: Driver, fleet: Fleet, condition: Callable[[list[int]], bool]) -> None:
    deadline, before = time.monotonic() + DEADLINE_S, versions(fleet)
    while not condition(found := versions(fleet)):
        assert driver.process.poll() is None, "the driver ended by itself; see its log"
        assert time.monotonic() < deadline
        # Moments within a batch are short; the start of Spark is long, and has need of the machine.
        time.sleep(0.002 if found and found != before else 0.1)


def between(reached: int) -> Callable[[list[int]], bool]:
    return lambda found: bool(found) and min(found) == max(found) >= reached


def in_the_middle(reached: int) -> Callable[[list[int]], bool]:
    return lambda found: bool(found) and min(found) >= reached and min(found) < max(found)


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param((in_the_middle(4),), id="in the middle of a batch"),
        # A start of Spark more.
        pytest.param(
            (between(2), in_the_middle(4)), id="between batches, and in the middle of one", marks=pytest.mark.soak
        ),
    ],
)
def test_a_killed_driver_leaves_no_trace(
    cluster: str, new_uri: NewUri, tmp_path: Path, moments: tuple[Callable[[list[int]], bool], ...]
) -> None:
    uri = new_uri()
    counted = write_inputs(tmp_path, BATCHES, rows=4000, distinct=257)
    fleet = connect(uri)
    try:
        for condition in moments:
            with Driver(tmp_path, uri, cluster) as driver:
                wait_for(driver, fleet, condition)
                driver.kill()
            assert min(versions(fleet)) < BATCHES
        with Driver(tmp_path, uri, cluster) as driver:
            assert driver.finish() == 0, (tmp_path / "driver.log").read_text()[-3000:]
        batches, result = final_result(tmp_path)
        assert result == dict(counted)
        assert versions(fleet) == [batches] * 4
        # The fleet stayed up, so no restart read any state from storage.
        assert [metrics["bytes_loaded"] for metrics in fleet.metrics().values()] == [0]
    finally:
        fleet.shutdown()

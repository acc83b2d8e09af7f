"""A query of many batches whose processes are killed at random, seeded moments: its result is that of a serial run.

``pytest tests/chaos/test_random_kills.py -m soak -s`` prints what was killed when and how long each recovery took. ``CHAOS_SEED``
chooses another order.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from statefleet.fleet import Fleet
from tests.chaos.driver_process import COUNTING, Supervisor, final_result, versions, wait_past
from tests.chaos.inputs import write_inputs

BATCHES = 36
KINDS = ("store actor", "coordinator", "executor", "driver")


def pid_of(kind: str, fleet: Fleet, supervisor: Supervisor) -> int | None:
    """Return the process of a kind that takes part in the query now."""
    status = fleet.status()
    if kind == "coordinator":
        return int(status["coordinator"]["pid"])
    if kind == "store actor":
        return next((int(actor["pid"]) for actor in status["store_actors"] if actor["alive"]), None)
    if kind == "driver":
        return supervisor.driver.process.pid
    names = {shard["executor"] for query in status["queries"] for shard in query["shards"] if shard["executor"]}
    pids = {int(name.rpartition(":")[2]) for name in names}
    return next((pid for pid in pids if Path(f"/proc/{pid}").exists()), None)


def kill(kind: str, fleet: Fleet, supervisor: Supervisor) -> bool:
    pid = pid_of(kind, fleet, supervisor)
    if pid is None:
        return False
    if kind == "driver":
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)
    return True


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_a_query_survives_random_kills(cluster: str, fleet: Fleet, tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    chance = random.Random(seed)
    counted = write_inputs(tmp_path, BATCHES, rows=4000, distinct=1021)
    supervisor = Supervisor(tmp_path, fleet.uri, cluster, program=COUNTING)
    plan = [*KINDS, *KINDS]
    chance.shuffle(plan)
    recoveries: list[tuple[str, int, float]] = []
    try:
        for number, kind in enumerate(plan):
            wait_past(fleet, supervisor, (number + 1) * BATCHES // (len(plan) + 2))
            time.sleep(chance.random())
            before = min(versions(fleet))
            started = time.monotonic()
            if kill(kind, fleet, supervisor):
                wait_past(fleet, supervisor, before)
                recoveries.append((kind, before, time.monotonic() - started))
        while not supervisor.is_done():
            time.sleep(0.2)
        batches, result = final_result(tmp_path)
        assert result == dict(counted)
        assert versions(fleet) == [batches] * 4
        assert batches >= 30
        assert {kind for kind, _, _ in recoveries} == set(KINDS)
    finally:
        supervisor.driver.__exit__()
    print(f"\nseed {seed}: {batches} batches, {supervisor.starts} driver starts, result equal")
    for kind, version, seconds in recoveries:
        print(f"  {kind:<12} killed after version {version:>2}: next version {seconds:6.1f} s later")

"""A continuous query from Kafka to Kafka, whose processes are killed and paused at random, seeded moments while events come.

``pytest tests/chaos/test_continuous_kills.py -m soak -s`` does so 20 times for each query, and prints for how long nothing came out.
``CHAOS_SEED`` chooses another order.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statefleet.fleet import Fleet
from tests.chaos.continuous_driver import QUERIES
from tests.chaos.driver_process import DEADLINE_S, Supervisor
from tests.chaos.kafka_load import Load, Results, under_load
from tests.clocks import until
from tests.kafka_broker import KafkaBroker
from tests.processes import paused

KEYS, RATE = 97, 300
KINDS = ("store actor", "executor", "driver", "coordinator", "broker")
#: What is done to a process of a kind.
Fault = tuple[str, str]
ALL: list[Fault] = [(kind, how) for kind in KINDS for how in ("killed", "paused")]
FEW: list[Fault] = [("executor", "killed")]


def pid_of(kind: str, fleet: Fleet, supervisor: Supervisor, broker: KafkaBroker) -> int:
    """Return the process of a kind that takes part in the query now."""
    if kind == "driver":
        return supervisor.driver.process.pid
    if kind == "broker":
        return broker.pid
    status = fleet.status()
    if kind == "coordinator":
        return int(status["coordinator"]["pid"])
    if kind == "store actor":
        return next(int(actor["pid"]) for actor in status["store_actors"] if actor["alive"])
    names = {shard["executor"] for query in status["queries"] for shard in query["shards"]}
    pids = [int(name.rpartition(":")[2]) for name in names if name]
    return next(pid for pid in pids if Path(f"/proc/{pid}").exists())


def do(fault: Fault, pid: int, pause_s: float, broker: KafkaBroker) -> None:
    """Kill a process, or stop it for a while."""
    kind, how = fault
    # The driver's Python and its JVM are a group.
    target = -pid if kind == "driver" else pid
    if how == "paused":
        with paused(target):
            time.sleep(pause_s)
        return
    os.kill(target, signal.SIGKILL)
    if kind == "broker":
        broker.stop()
        broker.start()


def committed(folder: Path) -> dict[str, int]:
    """Return the offset at the end of the last epoch in Spark's commit log, by partition; empty without any."""
    epochs = [int(file.name) for file in (folder / "checkpoint" / "commits").glob("[0-9]*")]
    if not epochs:
        return {}
    lines = (folder / "checkpoint" / "offsets" / str(max(epochs))).read_text().splitlines()
    (ends,) = json.loads(lines[-1]).values()
    return dict(ends)


def second_of(window: Any) -> int:
    start = dt.datetime.fromisoformat(window["start"]) if isinstance(window["start"], str) else window["start"]
    return int(start.timestamp())


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("query", "faults"),
    [
        pytest.param("counts", FEW, id="counts-few"),
        pytest.param("counts", ALL * 2, id="counts", marks=pytest.mark.soak),
        pytest.param("windows", ALL * 2, id="windows", marks=pytest.mark.soak),
    ],
)
def test_every_event_is_counted_once_whatever_is_killed(
    cluster: str, fleet: Fleet, broker: KafkaBroker, tmp_path: Path, name: str, query: str, faults: list[Fault]
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    chance = random.Random(seed)
    plan = chance.sample(faults, len(faults))
    partitions = QUERIES[query].partitions
    for topic in (f"{name}-in", f"{name}-out"):
        broker.create_topic(topic, partitions)
    program = ("tests.chaos.continuous_driver", broker.address, query, name)
    supervisor = Supervisor(tmp_path, fleet.uri, cluster, program=program)
    load = Load(broker.address, f"{name}-in", partitions=partitions, keys=KEYS, rate=RATE)
    results = Results(broker.address, f"{name}-out", partitions)

    def wait(is_so: Callable[[], bool], failure: str) -> None:
        def is_so_now() -> bool:
            assert not supervisor.is_done(), "the query was not told to stop"
            return is_so()

        until(is_so_now, DEADLINE_S, lambda: f"{failure}: {(tmp_path / 'driver.log').read_text()[-3000:]}", 0.05)

    def wait_for_results_of_now(failure: str) -> None:
        """Wait for a result of what is sent from now on, and then for the next commit of an epoch; and once more.

        The executor of a killed driver goes on for a while, and the next driver first commits the epoch that counted already.
        """
        for _ in range(2):
            now_us, count = time.time_ns() // 1000, len(results.all)
            wait(lambda: any(result.value["sent"] > now_us for result in results.all[count:]), failure)  # noqa: B023
            before = committed(tmp_path)
            wait(lambda: committed(tmp_path) != before, failure)  # noqa: B023

    gaps: dict[Fault, list[float]] = defaultdict(list)
    try:
        with under_load(load, results):
            wait_for_results_of_now("no result at first")
            for fault in plan:
                time.sleep(2 * chance.random())
                pid, pause_s = pid_of(fault[0], fleet, supervisor, broker), 2 + 4 * chance.random()
                since_s = time.monotonic()
                do(fault, pid, pause_s, broker)
                wait_for_results_of_now(f"no result after the {fault[0]} was {fault[1]}")
                gaps[fault].append(gap_s := results.longest_gap_s(since_s, time.monotonic()))
                print(
                    f"{fault[0]} {fault[1]}{f' for {pause_s:.1f} s' if fault[1] == 'paused' else ''}: nothing for {gap_s:.1f} s"
                )
            load.stop()
            if query == "windows":
                # Closes all others.
                load.send(KEYS, time.time_ns() // 1000 + 60_000_000)
            load.flush()
            wait(lambda: sum(committed(tmp_path).values()) == load.sent.total(), "not all events were read")
            check(query, fleet, load.sent, results, wait)
        # A driver is started again where it was killed, and nothing else ended it.
        assert supervisor.starts == 1 + plan.count(("driver", "killed"))
        (tmp_path / "stop").touch()
        assert supervisor.driver.finish() == 0, (tmp_path / "driver.log").read_text()[-3000:]
    finally:
        supervisor.driver.__exit__()
    print(
        f"\nseed {seed}, {query}: {load.sent.total():,} events of {KEYS} keys counted once, {len(results.all):,} results"
    )
    print("longest times without a result, after a process was")
    for (kind, how), seconds in sorted(gaps.items()):
        print(f"  {how:<6} {kind:<12}" + ", ".join(f"{gap:.1f}" for gap in seconds) + " s")


def check(
    query: str,
    fleet: Fleet,
    sent: Counter[tuple[int, int]],
    results: Results,
    wait: Callable[[Callable[[], bool], str], None],
) -> None:
    """Check the state, and the newest result of each group, once all events were read."""
    state = fleet.state("chaos").scan().to_arrow().to_pylist()
    if query == "counts":
        of_keys = Counter[int]()
        for (key, _), count in sent.items():
            of_keys[key] += count
        assert {row["k"]: row["n"] for row in state} == of_keys
        expected = {(key,): count for key, count in of_keys.items()}
    else:
        last = max(sent, key=lambda group: group[1])
        assert {(row["k"], second_of(row["window"])): row["n"] for row in state} == {last: sent[last]}
        expected = {group: count for group, count in sent.items() if group != last}

    def group_of(value: dict[str, Any]) -> tuple[int, ...]:
        return (value["k"],) if query == "counts" else (value["k"], second_of(value["window"]))

    def newest() -> dict[tuple[int, ...], int]:
        return {group_of(value): value["n"] for value in results.newest().values()}

    wait(lambda: newest() == expected, "the newest results are not those of all events")
    if query == "windows":
        assert all(result.value["n"] == expected[group_of(result.value)] for result in results.all), "it was final"

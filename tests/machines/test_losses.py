"""The main job on a cluster that `ray up` made, while its workers are lost in two ways."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_jobs.jobs.events import make_events
from tests.clocks import until
from tests.machines.machines import SHARED, Machine
from tests.machines.ray_up import Job, LocalCluster

pytestmark = [pytest.mark.machines, pytest.mark.timeout(900)]

ROWS = 3000
STORE_ACTOR, RAYLET = b"ray::StoreActor", b"raylet/raylet"
WINDOW_US, DELAY_US = 300_000_000, 120_000_000


class MainJob:
    """``spark_jobs.quickstart`` in a folder that all machines share."""

    def __init__(self, cluster: LocalCluster, name: str, batches: int) -> None:
        self.cluster, self.batches, self.folder = cluster, batches, SHARED / name
        self.runs = 1
        self.arguments = ["--folder", str(self.folder), "--batches", str(batches), "--rows", str(ROWS)]

    def by_ray(self) -> Job:
        return self.cluster.submit("python", "-m", "spark_jobs.quickstart", *self.arguments, "--executors", "2")

    def by_raydp(self) -> Job:
        program = f"from spark_jobs.quickstart import main; raise SystemExit(main({self.arguments!r}))"
        sizes = {"spark.executor.instances": "2", "spark.executor.cores": "1", "spark.executor.memory": "1g"}
        return self.cluster.raydp_submit(program, sizes)

    def finished(self) -> dict[int, float]:
        """Return when each batch was finished (Unix time), by Spark's checkpoint."""
        commits = self.cluster.room.shared / self.folder.name / "checkpoint" / "commits"
        return {int(file.name): file.stat().st_mtime for file in commits.glob("*") if file.name.isdigit()}

    def newest(self) -> int:
        return max(self.finished(), default=-1)

    def wait_past(self, batch: int, job: Job, *, within_s: float) -> float:
        """Wait until a batch is finished; return when it was."""

        def is_there() -> bool:
            assert job.is_running or self.newest() >= batch, job.text
            return self.newest() >= batch

        until(is_there, within_s, f"batch {batch} is not finished", 0.2)
        return self.finished()[batch]

    def shards(self) -> list[dict[str, Any]]:
        """Return the job's shards and where they are, by the command that people use."""
        printed = self.cluster.run(f"./run statefleet shards file://{self.folder}/fleet --json 2>/dev/null")
        shards: list[dict[str, Any]] = json.loads(printed)
        return shards

    def addresses(self) -> set[str]:
        """Return the addresses of the nodes that have its shards."""
        by_id = {node["node_id"]: node["node_ip"] for node in self.cluster.nodes()}
        return {by_id[shard["node_id"]] for shard in self.shards()}

    def run_until_used(self, machine: Machine, running: list[Job]) -> None:
        """Until one of the machines has shards; if the job ends before, it is run again and goes on."""
        while machine.address not in self.addresses():
            if not running[-1].is_running:
                running[-1].wait(within_s=1)
                self.runs += 1
                assert self.runs < 5, f"{machine.name} is not used"
                running.append(self.by_ray())
            time.sleep(1)

    def check(self) -> None:
        """Its results are those that there should be: every row in one group, once."""
        table = pq.read_table(self.cluster.room.shared / self.folder.name / "results.parquet")
        results = {
            (row["start"].timestamp() * 1_000_000, row["page"]): (row["events"], round(row["amount"] or 0, 2))
            for row in table.to_pylist()
        }
        order = self._order()
        events = (self.cluster.room.shared / self.folder.name / "events").glob("events-*.parquet")
        assert sorted(number for number in order if number is not None) == sorted(
            number_of(file.name) for file in events
        )
        assert results == expected(order)

    def _order(self) -> list[int | None]:
        """Number of the one file of events of each batch, as Spark's own log of the source says; None for one without data.

        A run that ends may add one without data, as the watermark has moved.
        """
        batches: dict[int, int] = {}
        for file in (self.cluster.room.shared / self.folder.name / "checkpoint" / "sources" / "0").glob("[0-9]*"):
            for line in file.read_text().splitlines()[1:]:
                entry = json.loads(line)
                number = number_of(entry["path"])
                # A compacted log has the same entries again.
                assert batches.setdefault(entry["batchId"], number) == number, "a batch has one file"
        return [batches.get(batch) for batch in range(self.newest() + 1)]


def number_of(path: str) -> int:
    """Number of a file of events."""
    return int(re.findall(r"events-(\d+)", path)[0])


def expected(order: list[int | None]) -> dict[tuple[float, str], tuple[int, float]]:
    """Return the job's results of files of events: late rows are dropped by the watermark of the batch before, as in Spark 3.5."""
    groups: dict[tuple[float, str], tuple[int, float]] = {}
    former = watermark = newest = 0
    for number in order:
        events = make_events(number or 0, ROWS if number is not None else 0)
        for at, page, amount in zip(
            events["ts"].cast(pa.int64()).to_pylist(),
            events["page"].to_pylist(),
            events["amount"].to_pylist(),
            strict=True,
        ):
            start = at - at % WINDOW_US
            if start + WINDOW_US > former:
                count, total = groups.get((start, page), (0, 0.0))
                groups[start, page] = count + 1, total + (amount or 0)
            newest = max(newest, at)
        former, watermark = watermark, newest - DELAY_US
    return {key: (count, round(total, 2)) for key, (count, total) in groups.items()}


@pytest.fixture
def jobs(cluster: LocalCluster) -> Iterator[list[Job]]:
    """Jobs that end with the test, and their fleets, which would outlive them."""
    started: list[Job] = []
    yield started
    for job in started:
        job.end()
    # No driver watches over the store actors of such a fleet: Ray leaves them their node until the end of a notice.
    cluster.run(f"for one in {SHARED}/*/fleet; do ./run statefleet stop file://$one || true; done")


def test_the_main_job_runs_as_both_commands_submit_it(cluster: LocalCluster, jobs: list[Job]) -> None:
    for name in ("by_ray", "by_raydp"):
        main = MainJob(cluster, name, 6)
        jobs.append(getattr(main, name)())
        jobs[-1].wait(within_s=240)
        main.check()
        assert main.addresses() == {worker.address for worker in cluster.workers}, "each worker has shards"


def test_a_worker_that_lost_power_is_done_without_and_is_used_again(cluster: LocalCluster, jobs: list[Job]) -> None:
    main = MainJob(cluster, "power", 80)
    jobs.append(main.by_ray())
    main.wait_past(8, jobs[0], within_s=300)
    victim = cluster.workers[1]
    victim.end()
    ended = time.time()
    newest = main.newest()
    print(f"power lost: next batch after {main.wait_past(newest + 2, jobs[0], within_s=200) - ended:.1f} s")
    until(lambda: victim.address not in cluster.living(), 100, "Ray does not notice", 1.0)
    print(f"power lost: Ray had given the node up after {time.time() - ended:.0f} s at most")
    victim.boot()
    booted = time.time()
    cluster.wait_for_workers(2, within_s=300)
    print(f"power back: Ray has the worker again after {time.time() - booted:.0f} s")
    main.run_until_used(victim, jobs)
    print(f"power back: it has shards again after {time.time() - booted:.0f} s")
    jobs[-1].wait(within_s=600)
    main.check()


def test_a_worker_whose_link_is_down_is_given_up_and_commits_nothing_once_it_is_up(
    cluster: LocalCluster, jobs: list[Job]
) -> None:
    main = MainJob(cluster, "link", 80)
    jobs.append(main.by_ray())
    main.wait_past(8, jobs[0], within_s=300)
    victim = cluster.workers[0]
    before = {shard["partition_id"]: shard["epoch"] for shard in main.shards()}
    victim.cut()
    cut = time.time()
    newest = main.newest()
    until(lambda: victim.address not in cluster.living(), 100, "Ray does not notice", 1.0)
    print(f"link down: Ray has given the node up after {time.time() - cut:.0f} s")
    print(f"link down: next batch after {main.wait_past(newest + 2, jobs[0], within_s=200) - cut:.1f} s")
    assert victim.processes(STORE_ACTOR), "its processes go on"
    victim.heal()
    healed = time.time()
    print(
        f"link up: its store actor ended after {until(lambda: not victim.processes(STORE_ACTOR), 120, 'a zombie', 1.0):.0f} s"
    )
    cluster.wait_for_workers(2, within_s=300)
    print(f"link up: Ray has the worker again after {time.time() - healed:.0f} s")
    main.run_until_used(victim, jobs)
    print(f"link up: it has shards again after {time.time() - healed:.0f} s")
    jobs[-1].wait(within_s=600)
    main.check()
    after = {shard["partition_id"]: shard["epoch"] for shard in main.shards()}
    assert any(after[shard] > epoch for shard, epoch in before.items()), "nothing was moved"


def test_a_worker_that_is_going_to_end_is_left_before_it_does(cluster: LocalCluster, jobs: list[Job]) -> None:
    main = MainJob(cluster, "notice", 80)
    jobs.append(main.by_ray())
    main.wait_past(4, jobs[0], within_s=300)
    leaving = cluster.workers[1]
    drain = "./run ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message notice"
    leaving.ssh(f"cd ~/statefleet && {drain} --deadline-remaining-seconds 120")
    noticed_at = time.time()
    took = until(lambda: not leaving.processes(RAYLET), 100, "Ray does not end there", 1.0)
    print(f"a notice of two minutes: the node was empty, and had ended, after {took:.0f} s")
    batch = main.newest()
    main.wait_past(batch + 1, jobs[0], within_s=100)
    cluster.wait_for_workers(2, within_s=300)
    main.run_until_used(leaving, jobs)
    print(
        f"Ray was started there again, and the node had shards again, {time.time() - noticed_at:.0f} s after the notice"
    )
    jobs[-1].wait(within_s=600)
    main.check()

"""Processes that stop for a while (SIGSTOP) and wake up (SIGCONT) when others have taken over: none of them can commit."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from msgspec import structs

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.log.ledger_writer import LedgerWriter
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.commits import CommitEntry
from coordinator.model.errors import FencedError
from coordinator.model.identities import ActorLocation
from coordinator.model.maintenance import Maintenance
from coordinator.model.memory_options import MemoryOptions
from coordinator.placement.actor_registry import ActorRegistry
from coordinator.placement.lease_plans import FleetView, LeaseRequest
from coordinator.placement.policies import Choice
from coordinator.service.calls import RayActors
from coordinator.service.placement_service import KnownFleet
from coordinator.storage.options import StorageOptions
from coordinator.storage.uris import open_object_store
from statefleet.fleet import Fleet
from store_actors.actor.deploy import deploy_store_actor
from store_actors.messages.requests import ApplyRequest
from tests.chaos.driver_process import COUNTING, Driver, between, final_result, versions, wait_for
from tests.chaos.inputs import write_inputs
from tests.processes import paused
from tests.tasks import SCHEMA, Tasks, coordinator_of, deltas_of, shard_input

pytestmark = pytest.mark.timeout(1200)


def only_actor(fleet: Fleet) -> dict[str, Any]:
    (actor,) = [entry for entry in fleet.status()["store_actors"] if entry["alive"]]
    return actor


class Announcing(RayActors):
    """Reports when a task has its lease, lets it continue when it may, and reports when it has called the store actor of it."""

    def __init__(self) -> None:
        super().__init__()
        self.granted, self.may_go_on, self.called = threading.Event(), threading.Event(), threading.Event()

    def get(self, reference: Any) -> Any:
        value = super().get(reference)
        if isinstance(value, list) and value and isinstance(value[0], LeaseGrant):
            self.granted.set()
            assert self.may_go_on.wait(60)
        return value

    def wait(self, references: Sequence[Any], timeout_s: float) -> bool:
        if self.granted.is_set():
            self.called.set()
        return super().wait(references, timeout_s)


def test_an_owner_that_wakes_up_after_its_shard_moved_cannot_commit(fleet: Fleet) -> None:
    tasks = Tasks(fleet, "moved")
    tasks.apply(0, [1, 2])
    former = only_actor(fleet)
    node_id = ray.get_runtime_context().get_node_id()
    successor = deploy_store_actor(
        f"{former['actor_name']}-2", fleet.uri, StorageOptions(), Maintenance(), node_id, MemoryOptions()
    )
    location: ActorLocation = ray.get(successor.location.remote())
    coordinator = coordinator_of(fleet)
    announcing = Announcing()
    sleeping = Tasks(fleet, "moved", announcing)
    sleeping.client.calls.local_location()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sleeping.apply, 1, [2, 3])
        assert announcing.granted.wait(60)
        with paused(former["pid"]):
            announcing.may_go_on.set()
            assert announcing.called.wait(60)
            coordinator.report_store_actor_lost(former["instance_id"])
            task = tasks.identity(1, attempt=1)
            (grant,) = coordinator.attach_and_lease_all([task], tasks.metadata(), location)
            assert grant.lease.location == location
            request = ApplyRequest(task, grant.lease, grant.base_version, SCHEMA, grant.watermarks)
            ((emitted, counted),) = ray.get(successor.apply.remote([request], [shard_input([2, 3])]))
        # Awake again, it commits under its old lease, is refused, and its task is given what the successor counted.
        assert waiting.result(60) == sorted(emitted.to_pylist(), key=lambda row: row["v"])
    assert [(entry.version, entry.attempt_id) for entry in tasks.chain()][1:] == [(2, counted.attempt_id)]
    assert tasks.apply(2, [3]) == [{"v": 3, "n": 2}]


def test_an_owner_that_stays_stopped_is_replaced(fleet: Fleet) -> None:
    tasks = Tasks(fleet, "stopped", RayActors(hung_after_s=3.0))
    tasks.apply(0, [1, 2])
    former = only_actor(fleet)
    with paused(former["pid"]):
        assert tasks.apply(1, [2, 3]) == [{"v": 2, "n": 2}, {"v": 3, "n": 1}]
    assert only_actor(fleet)["instance_id"] != former["instance_id"]


def to_who_asks(request: LeaseRequest, fleet: FleetView) -> Choice:
    """Place each lease on the node whose task asks for it."""
    return Choice(request.asking)


def test_a_coordinator_that_wakes_up_after_it_was_replaced_counts_nothing(fleet: Fleet) -> None:
    tasks = Tasks(fleet, "replaced")
    tasks.apply(0, [1])
    log = ManifestLog(open_object_store(fleet.uri), "replaced", "successor")

    async def take_over() -> CommitEntry:
        keeper = LedgerWriter(log)
        await keeper.open()
        location, no_actors = ActorLocation("elsewhere", "life", "node", "host", 1), KnownFleet(ActorRegistry(), list)
        task = tasks.identity(1, "run-2")
        grant = await keeper.decide(lambda ledger: ledger.decide_lease(task, location, no_actors, to_who_asks))
        (former,) = tasks_chain
        entry = structs.replace(
            former, version=2, base_version=1, epoch=grant.lease.epoch, run_id="run-2", attempt_id="mine"
        )
        (counted,) = await keeper.decide(lambda ledger: ledger.decide_commits([entry]))
        return counted

    tasks_chain = tasks.chain()
    with paused(fleet.status()["coordinator"]["pid"]):
        mine = asyncio.run(take_over())
    with pytest.raises(FencedError):
        tasks.apply(1, [5])
    assert [entry.attempt_id for entry in tasks.chain()][1:] == [mine.attempt_id]


@pytest.mark.soak
def test_a_driver_that_wakes_up_after_another_took_its_query_changes_nothing(
    cluster: str, fleet: Fleet, tmp_path: Path
) -> None:
    counted = write_inputs(tmp_path, 8, rows=2000, distinct=97)
    with Driver(tmp_path, fleet.uri, cluster, program=COUNTING) as first:
        wait_for(first, fleet, between(2))
        os.killpg(first.process.pid, signal.SIGSTOP)
        with Driver(tmp_path, fleet.uri, cluster, program=COUNTING) as second:
            assert second.finish() == 0, (tmp_path / "driver.log").read_text()[-3000:]
        reached = versions(fleet)
        os.killpg(first.process.pid, signal.SIGCONT)
        assert first.finish() != 0, "it had to be told that it is no longer the query's driver"
    assert versions(fleet) == reached == [final_result(tmp_path)[0]] * 4
    assert fleet_rows(fleet) == dict(counted)


def fleet_rows(fleet: Fleet) -> dict[int, int]:
    """All counts of the state ``chaos``, read from storage."""
    objects = open_object_store(fleet.uri)
    rows: dict[int, int] = {}
    for partition in range(4):
        shard: dict[int, int] = {}
        for entry in deltas_of(fleet, "chaos", partition):
            for row in pa.ipc.open_file(pa.BufferReader(objects.get(entry.file))).read_all().to_pylist():
                shard[row["k0"]] = row["a0_count"]
        rows |= shard
    return rows

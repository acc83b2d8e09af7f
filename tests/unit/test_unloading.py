"""Ledgers of ended queries leave memory, are still in the status, and are read again on request. No Ray."""

from __future__ import annotations

import asyncio

from coordinator.model.maintenance import Maintenance
from coordinator.telemetry.drivers import DriverReport
from tests.memory_store import MemoryObjectStore
from tests.unit.service_harness import QueriedCoordinator


async def test_a_ledger_leaves_memory_long_after_its_query_ended_is_still_in_the_status_and_comes_back() -> None:
    coordinator = QueriedCoordinator(maintenance=Maintenance(interval_s=0.01, unload_after_s=600, grace_s=60))

    async def after_s(seconds: float) -> set[str]:
        """Let time pass with rounds of maintenance, and return the names of the states whose ledgers are in memory."""
        coordinator.clock.later_s += seconds
        await asyncio.sleep(0.1)
        return {name for name, _ in coordinator._states.writers()}

    await coordinator.commit("run-1", 0)
    await coordinator.commit("run-1", 0, state="beside")
    assert await coordinator.describe_state("typo") is None
    report = DriverReport("app", run_ids=("run-1",))
    for _ in range(40):  # a driver reports each ten seconds, and its query has no rows
        await coordinator.report_driver(report)
        names = await after_s(25.0)
    assert names == {"s", "beside"}, "a name without a state is forgotten, an idle query is not"
    # The driver is killed: no process reports that its query ended.
    assert await after_s(590.0) == {"s", "beside"}
    assert await after_s(1000.0) == set()
    after = await coordinator.status_details()
    assert [query["name"] for query in after["queries"]] == ["beside", "s"]
    assert await coordinator.load_all_states() == ["beside", "s"]
    assert await after_s(0.0) == set(), "listing states reads no ledger"
    assert [
        (query["name"], query["version"], query["active"]) for query in (await coordinator.status())["queries"]
    ] == [
        ("beside", 1, False),
        ("s", 1, False),
    ]
    # A read of a state opens the others of its query, too: a finished version is finished on all of them.
    assert await coordinator.version() == 1
    assert await after_s(0.0) == {"s", "beside"}
    assert (await coordinator.lease("run-2", 1)).base_version == 1
    again = await coordinator.status_details()
    assert [query["name"] for query in again["queries"]] == ["beside", "s"]


async def test_an_unloaded_state_is_dropped_or_deleted_as_any_other() -> None:
    objects = MemoryObjectStore()
    coordinator = QueriedCoordinator(objects, Maintenance(interval_s=0.01, unload_after_s=0, grace_s=1))
    for state in ("s", "beside", "deleted"):
        await coordinator.commit("run-1", 0, state=state)
    await coordinator.deactivate_instances("run-1")
    for _ in range(4):
        coordinator.clock.later_s += 1000
        await asyncio.sleep(0.2)
    assert coordinator._states.writers() == []
    objects.delete_all([info.path for info in objects.list("deleted")])
    assert (await coordinator.drop("s", False, False)).others == ("beside",)
    assert {query["name"] for query in (await coordinator.status())["queries"]} == {"beside"}
    assert (await coordinator.lease("run-2", 0, state="deleted", query="another")).base_version == 0

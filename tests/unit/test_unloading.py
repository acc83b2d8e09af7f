"""Ended queries leave memory, are shown all the same, and are read again when somebody asks for them. No Ray."""

from __future__ import annotations

import asyncio

from coordinator.model.maintenance import Maintenance
from coordinator.storage.memory import MemoryObjectStore
from coordinator.telemetry.drivers import DriverReport
from tests.unit.service_harness import ServiceHarness, run


def test_a_ledger_leaves_memory_once_its_query_ended_long_ago_and_is_still_shown_and_comes_back() -> None:
    async def scenario(_: ServiceHarness, objects: MemoryObjectStore) -> None:
        people = ServiceHarness(objects, Maintenance(interval_s=0.01, unload_after_s=600, grace_s=60))

        async def after_s(seconds: float) -> set[str]:
            """Names of the states whose ledgers are in memory after some rounds of maintenance."""
            people.clock.later_s += seconds
            await asyncio.sleep(0.1)
            return {name for name, _ in people.coordinator._states.writers()}

        await people.commit("run-1", 0)
        await people.commit("run-1", 0, state="beside")
        assert await people.coordinator.describe_state("typo") is None
        report = DriverReport("app", run_ids=("run-1",))
        for _ in range(40):  # a driver reports each ten seconds, and its query has no rows
            await people.coordinator.report_driver(report)
            names = await after_s(25.0)
        assert names == {"s", "beside"}, "the name that no state has is forgotten, a query that is quiet is not"
        before = await people.coordinator.watch({})
        # The driver is killed: nobody says that its query ended.
        assert await after_s(590.0) == {"s", "beside"}
        assert await after_s(1000.0) == set()
        shown = await people.coordinator.watch(before["stamps"])
        assert set(shown["stamps"]) == {"s", "beside"}
        assert await people.coordinator.load_all_states() == ["beside", "s"]
        assert await after_s(0.0) == set(), "whoever lists states reads no ledger for that"
        assert [
            (one["name"], one["version"], one["active"]) for one in (await people.coordinator.status())["queries"]
        ] == [
            ("beside", 1, False),
            ("s", 1, False),
        ]
        # A read of one opens the others of its query, too: what is finished is so on all of them.
        assert await people.version() == 1
        assert await after_s(0.0) == {"s", "beside"}
        assert (await people.lease("run-2", 1)).base_version == 1
        again = await people.coordinator.watch(shown["stamps"])
        assert {one["name"] for one in again["queries"]} == {"s", "beside"}

    run(scenario)


def test_a_state_that_rests_is_dropped_or_deleted_as_any_other() -> None:
    async def scenario(_: ServiceHarness, objects: MemoryObjectStore) -> None:
        people = ServiceHarness(objects, Maintenance(interval_s=0.01, unload_after_s=0, grace_s=1))
        for state in ("s", "beside", "deleted"):
            await people.commit("run-1", 0, state=state)
        await people.end("run-1")
        for _ in range(4):
            people.clock.later_s += 1000
            await asyncio.sleep(0.2)
        assert people.coordinator._states.writers() == []
        objects.delete_all([info.path for info in objects.list("deleted")])
        assert (await people.coordinator.drop("s", False, False)).others == ("beside",)
        assert {one["name"] for one in (await people.coordinator.status())["queries"]} == {"beside"}
        assert (await people.lease("run-2", 0, state="deleted", query="another")).base_version == 0

    run(scenario)

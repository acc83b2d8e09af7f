"""When executors are asked for, given up and ended, and when a node's shards are moved: the rules, without Ray and Spark."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.model.errors import InvalidRequestError
from coordinator.telemetry.drivers import DriverReport, ExecutorState
from spark_jobs.driver_reports import DriverReports
from spark_jobs.nodes.executor_slots import ExecutorSlots
from spark_jobs.nodes.node_watch import NodeWatch, WatchedFleet
from spark_jobs.nodes.ray_nodes import RayNode, RestartingExecutor
from spark_jobs.plan.executors import Executor
from spark_jobs.session.settings import EXECUTOR_RESOURCES, MAX_EXECUTORS, STORE_RESOURCE

GIB = 2.0**30


# -- executors that are asked for -------------------------------------------------------------------------------------


def test_rays_own_restart_comes_first() -> None:
    places = ExecutorSlots(3)
    assert [places.due(now, present=2, free=1) for now in (0.0, 2.0, 7.9)] == [0, 0, 0]
    assert places.due(8.0, present=2, free=1) == 1


def test_a_place_that_is_taken_meanwhile_is_waited_for_anew() -> None:
    places = ExecutorSlots(3)
    assert places.due(0.0, present=2, free=1) == 0
    assert places.due(7.0, present=2, free=0) == 0
    assert places.due(9.0, present=2, free=1) == 0, "the time begins again"
    assert places.due(17.0, present=2, free=1) == 1


def test_what_was_asked_for_is_not_asked_for_again_while_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    places = ExecutorSlots(4)
    places.due(0.0, present=2, free=2)
    assert places.due(8.0, present=2, free=2) == 2
    assert [places.due(now, present=2, free=2) for now in (10.0, 30.0, 67.0)] == [0, 0, 0]
    assert places.due(68.0, present=2, free=2) == 3, "nothing came: RayDP thinks that one is there"
    assert "asked again: 2 of at most 4" in caplog.text


def test_one_of_two_that_came_does_not_hold_up_the_other() -> None:
    places = ExecutorSlots(4)
    places.due(0.0, present=2, free=2)
    assert places.due(8.0, present=2, free=2) == 2
    assert places.due(10.0, present=3, free=1) == 1


@pytest.mark.parametrize(("present", "free", "due"), [(3, 5, 0), (4, 5, 0), (1, 5, 2), (1, 1, 1), (0, 0, 0)])
def test_there_are_never_more_than_the_limit_or_than_nodes_with_room(present: int, free: int, due: int) -> None:
    places = ExecutorSlots(3)
    places.due(0.0, present, free)
    assert places.due(8.0, present, free) == due


# -- nodes ------------------------------------------------------------------------------------------------------------


class FakeCluster:
    """A cluster of nodes by address, with executors of two cores on some."""

    def __init__(self, *addresses: str, limit: int = 4, offers_places: bool = True, is_dynamic: bool = False) -> None:
        self.alive = {address: f"id-{address}" for address in addresses}
        self.ending: dict[str, int] = {}
        self.executors: dict[str, str] = {}
        self.shards: dict[str, int] = {}
        self.told: list[Any] = []
        self.refuses = False
        self.drained: set[str] = set()
        self.starts = False
        self.restarts: list[RestartingExecutor] = []
        self.store_actors = set(addresses)
        self._settings = {"spark.executor.cores": "2", "spark.executor.instances": "1", MAX_EXECUTORS: str(limit)}
        if offers_places:
            self._settings[f"{EXECUTOR_RESOURCES}{STORE_RESOURCE}"] = "1"
        if is_dynamic:
            self._settings["spark.dynamicAllocation.enabled"] = "true"
        self.fleets = [WatchedFleet(self, self)]  # type: ignore[arg-type]
        self.watch = NodeWatch(self, lambda: self.fleets, self, self)  # type: ignore[arg-type]

    def look(self, *times: float) -> None:
        for now_s in times:
            self.watch.look(now_s)

    def nodes(self) -> list[RayNode]:
        total = {"CPU": 2.0, STORE_RESOURCE: 1.0, "memory": 8 * GIB}
        busy = {"CPU": 0.0, "memory": 7 * GIB}  # Ray leaves out what is used up
        at_work = set(self.executors.values())
        return [
            RayNode(node_id, address, total, busy if address in at_work else total, self.ending.get(address))
            for address, node_id in self.alive.items()
        ]

    # What the watch knows of Spark.
    def setting(self, name: str, otherwise: str) -> str:
        return self._settings.get(name, otherwise)

    def memory_mb(self) -> int:
        return 1024

    def present(self) -> list[Executor]:
        return [Executor(number, host) for number, host in self.executors.items()]

    def request(self, count: int) -> None:
        self.told.append(("ask", count))

    def lose(self, executor_ids: Sequence[str], why: str) -> None:
        self.told.append(("lose", *executor_ids))

    def is_starting(self) -> bool:
        return self.starts

    def restarting(self) -> list[RestartingExecutor]:
        return self.restarts

    def end(self, ended: Sequence[str] | RestartingExecutor) -> None:
        if isinstance(ended, RestartingExecutor):
            self.told.append(("end actor", ended.name))
            self.restarts.remove(ended)
            return
        self.told.append(("end", *ended))
        for one in ended:
            del self.executors[one]

    # What it knows of the fleet.
    def load_all_states(self) -> list[str]:
        return []

    def drain(self, node_id: str, *, dry_run: bool) -> tuple[str, ...]:
        if self.refuses:
            raise InvalidRequestError("no other node has a living store actor")
        address = next(one for one, known in self.alive.items() if known == node_id)
        self.drained |= set() if dry_run else {address}
        return tuple(f"{address}:{number}" for number in range(self.shards.get(address, 0)))

    def undrain(self, node_id: str) -> None:
        self.told.append(("undrain", node_id))

    def begin(self, moves: Sequence[str]) -> None:
        self.told += [("move", *moves)] if moves else []

    def status(self) -> dict[str, Any]:
        return {
            "store_actors": [
                {
                    "actor_name": f"at-{one}",
                    "instance_id": f"life-{one}",
                    "node_id": f"id-{one}",
                    "alive": one in self.store_actors,
                }
                for one in self.alive
            ]
        }

    def report_store_actor_lost(self, instance_id: str) -> None:
        self.told.append(("lost", instance_id))

    # What it knows of Ray's actors.
    def node_id(self) -> str:
        return "id-head"

    def find(self, name: str) -> Any:
        return SimpleNamespace(address=name.removeprefix("at-"))

    def kill(self, handle: Any, *, restart: bool) -> None:
        assert not restart
        self.store_actors.remove(handle.address)
        self.told.append(("end store actor", handle.address))


class ReportedDrivers:
    """A coordinator that notes what is reported."""

    def __init__(self) -> None:
        self.reports: list[DriverReport] = []

    def report_driver(self, report: DriverReport) -> None:
        self.reports.append(report)


def test_what_is_new_is_reported_at_once_and_repeated_for_coordinators_that_started_anew() -> None:
    reports, listener = DriverReports(), ReportedDrivers()
    calm = DriverReport("app", (ExecutorState("1", "a"),))
    lost = DriverReport("app", (ExecutorState("1", "a", 5, "killed"),))
    for now_s, report in ((0.0, calm), (2.0, calm), (4.0, lost), (6.0, lost), (14.0, lost)):
        reports.report(report, [listener], now_s)
    assert listener.reports == [calm, lost, lost]


def test_a_report_that_fails_does_not_keep_nodes_from_being_looked_after(caplog: pytest.LogCaptureFixture) -> None:
    world = FakeCluster("a")

    def fails(now_ms: int) -> DriverReport:
        raise RuntimeError("Spark does not say")

    world.report, world.has_ended = fails, lambda: False  # type: ignore[attr-defined]
    world.watch.report(0.0, 0)
    world.watch.report(2.0, 2000)
    assert caplog.text.count("could not be reported") == 1, "it is said once"


def test_a_node_that_joins_gets_an_executor() -> None:
    world = FakeCluster("a")
    world.executors = {"0": "a"}
    world.look(0, 20)
    assert world.told == []
    world.alive["b"] = "id-b"
    world.look(22, 24, 31)
    assert world.told == [("ask", 1)]
    world.executors["1"] = "b"
    world.look(33, 60)
    assert world.told == [("ask", 1)]


def test_none_is_asked_for_while_one_is_being_started() -> None:
    world = FakeCluster("a", "b")
    world.executors, world.starts = {"0": "a"}, True
    world.look(0, 10, 20, 100)
    assert world.told == []
    world.starts = False
    world.look(102, 110)
    assert world.told == [("ask", 1)]


def test_without_places_for_stores_executors_are_raydps_own_business() -> None:
    world = FakeCluster("a", "b", offers_places=False)
    world.look(0, 20, 100)
    assert world.told == []


def test_with_dynamic_allocation_executors_are_sparks_own_business() -> None:
    world = FakeCluster("a", "b", "c", is_dynamic=True)
    world.executors = {"0": "a", "1": "b"}
    world.ending["b"] = 1
    world.look(0, 20, 100)
    world.watch.batch_ended()
    assert world.told == [], "its store actor is not idle, either"


def test_spark_is_told_of_executors_whose_node_ray_has_given_up() -> None:
    world = FakeCluster("a", "b")
    world.executors = {"0": "a", "1": "b"}
    world.look(0)
    del world.alive["b"]
    world.look(2, 4)
    assert world.told == [("lose", "1")]


def test_an_executor_on_a_new_node_of_the_same_address_is_not_given_up() -> None:
    world = FakeCluster("a", "b")
    world.executors = {"0": "a", "1": "b"}
    world.look(0)
    world.alive["b"] = "id-b-anew"
    world.executors["2"] = "b"
    world.look(2)
    assert world.told == [("lose", "1")]


def test_an_executor_whose_host_never_was_a_nodes_address_is_left_alone() -> None:
    world = FakeCluster("a")
    world.executors = {"0": "a", "1": "host-without-a-node"}
    world.look(0, 2)
    assert world.told == []


def test_an_executor_that_raydp_refuses_to_start_anew_is_ended_so_that_its_place_is_free() -> None:
    world = FakeCluster("a", "b")
    world.executors = {"0": "a", "1": "b"}
    world.look(0)
    del world.executors["1"]
    world.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 5)]
    world.look(2, 4)
    assert world.told == [], "it may well start"
    world.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 6)]
    world.look(6)
    assert world.told == [("end actor", "raydp-executor-1")]


def test_an_executor_that_started_anew_in_between_may_do_so_again() -> None:
    world = FakeCluster("a", "b")
    world.executors = {"0": "a", "1": "b"}
    world.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 1)]
    world.look(0)
    world.restarts = []
    world.look(2)
    world.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 2)]
    world.look(4)
    assert world.told == []


def test_executors_of_other_applications_are_not_ended() -> None:
    world = FakeCluster("a", "b")
    world.executors = {"0": "a"}
    for restarts in (1, 2, 3):
        world.restarts = [RestartingExecutor("id-9", "raydp-executor-0", "ns", "id-b", restarts)]
        world.look(restarts)
    assert world.told == []


def test_a_node_that_ends_is_emptied_then_its_executor_ends_with_a_batch_then_its_store_actor() -> None:
    world = FakeCluster("a", "b")
    world.executors, world.shards = {"0": "a", "1": "b"}, {"b": 2}
    world.look(0)
    world.ending["b"] = 1
    world.look(2)
    assert world.told == [("move", "b:0", "b:1")]
    assert world.drained == {"b"}
    world.look(4, 6)
    world.watch.batch_ended()
    assert len(world.told) == 1, "it still has shards, and they are under way"
    world.shards = {"b": 1}
    world.look(32)
    assert world.told[1:] == [("move", "b:0")], "one that did not go is tried again"
    world.shards = {}
    world.look(34)
    world.watch.batch_ended()
    assert world.told[2:] == [("end", "1")]
    world.look(36)
    assert world.told[3:] == [("end store actor", "b"), ("lost", "life-b")]
    world.look(60)
    assert len(world.told) == 5, "no executor is asked for on it"
    del world.alive["b"], world.ending["b"]
    world.look(62)
    assert world.told[5:] == [("undrain", "id-b")]


def test_without_batches_the_executor_ends_all_the_same() -> None:
    world = FakeCluster("a", "b")
    world.executors = {"0": "a", "1": "b"}
    world.ending["b"] = 0
    world.look(0, 4)
    assert ("end", "1") not in world.told
    world.look(10)
    assert ("end", "1") in world.told


def test_a_store_actor_stays_as_long_as_somebody_elses_executor_is_on_its_node() -> None:
    world = FakeCluster("a", "b")
    world.executors = {"0": "a", "1": "b"}
    world.ending["b"] = 1
    world.end = lambda executor_ids: None  # type: ignore[method-assign]
    world.look(0, 10, 20, 30)
    assert "b" in world.store_actors


def test_shards_that_have_nowhere_to_go_are_told_of_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world = FakeCluster("a", limit=1)
    world.executors, world.shards, world.refuses = {"0": "a"}, {"a": 3}, True
    world.ending["a"] = 1_700_000_000_000
    world.look(0, 10, 20)
    assert caplog.text.count("Ray ends node a at 22:13:20 UTC, and shards stay there") == 1
    world.watch.batch_ended()
    assert world.told == []
    world.refuses = False
    world.look(30)
    assert world.told == [("move", "a:0", "a:1", "a:2")]
    assert "its 3 shards go to other nodes" in caplog.text


def test_one_fleet_that_has_no_other_node_does_not_keep_the_others_there() -> None:
    world, other = FakeCluster("a", "b"), FakeCluster("a", "b")
    world.executors, other.shards, world.refuses = {"0": "a", "1": "b"}, {"b": 1}, True
    world.fleets += other.fleets
    world.ending["b"] = 1
    world.look(0)
    assert other.told == [("move", "b:0")]
    other.shards = {}
    world.look(2)
    world.watch.batch_ended()
    assert world.told == [], "one fleet has not left it"
    world.refuses = False
    world.look(4)
    world.watch.batch_ended()
    assert world.told == [("end", "1")]

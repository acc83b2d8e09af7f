"""Rules by which executors are requested, given up and ended, and a node's shards are moved, without Ray and Spark."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from coordinator.model.errors import InvalidRequestError
from coordinator.service.calls import answer
from coordinator.telemetry.drivers import DriverReport, ExecutorState
from spark_jobs.nodes.executor_nodes import ExecutorNodes
from spark_jobs.nodes.node_watch import DriverReports, NodeWatch, WatchedFleet
from spark_jobs.nodes.ray_nodes import ExecutorSlots, RayNode, RestartingExecutor
from spark_jobs.plan.executors import Executor
from spark_jobs.session.settings import EXECUTOR_RESOURCES, MAX_EXECUTORS, STORE_RESOURCE

GIB = 2.0**30


# -- requested executors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "asked"),
    [
        # Ray's own restart comes first.
        (3, [(0.0, 2, 1, 0), (2.0, 2, 1, 0), (7.9, 2, 1, 0), (8.0, 2, 1, 1)]),
        # A slot that is taken meanwhile starts a new wait.
        (3, [(0.0, 2, 1, 0), (7.0, 2, 0, 0), (9.0, 2, 1, 0), (17.0, 2, 1, 1)]),
        # The first of two requested executors does not delay the second.
        (4, [(0.0, 2, 2, 0), (8.0, 2, 2, 2), (10.0, 3, 1, 1)]),
        # There are never more than the limit, or than nodes with room.
        *(
            (3, [(0.0, present, free, 0), (8.0, present, free, due)])
            for present, free, due in ((3, 5, 0), (4, 5, 0), (1, 5, 2), (1, 1, 1), (0, 0, 0))
        ),
    ],
)
def test_executors_are_due(limit: int, asked: list[tuple[float, int, int, int]]) -> None:
    slots = ExecutorSlots(limit)
    for now_s, present, free, due in asked:
        assert slots.due(now_s, present, free) == due, now_s


def test_an_executor_is_not_requested_again_while_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    slots = ExecutorSlots(4)
    slots.due(0.0, present=2, free=2)
    assert slots.due(8.0, present=2, free=2) == 2
    assert [slots.due(now, present=2, free=2) for now in (10.0, 30.0, 67.0)] == [0, 0, 0]
    assert slots.due(68.0, present=2, free=2) == 3, "no executor came: RayDP believes that one is there"
    assert "asked again: 2 of at most 4" in caplog.text


# -- nodes ------------------------------------------------------------------------------------------------------------


class FakeCluster:
    """A cluster of nodes by address, with executors of two cores on some."""

    def __init__(
        self,
        *addresses: str,
        executors: dict[str, str] | None = None,
        limit: int = 4,
        offers_slots: bool = True,
        is_dynamic: bool = False,
        is_on_ray: bool = True,
    ) -> None:
        self.alive = {address: f"id-{address}" for address in addresses}
        self.ending: dict[str, int] = {}
        self.executors = executors or {}
        self.shards: dict[str, int] = {}
        self.calls: list[Any] = []
        self.refuses = False
        self.drained: set[str] = set()
        self.starts = False
        self.restarts: list[RestartingExecutor] = []
        self.store_actors = set(addresses)
        self._settings = {"spark.executor.cores": "2", "spark.executor.instances": "1", MAX_EXECUTORS: str(limit)}
        self._settings["spark.master"] = "ray://10.0.0.1:1" if is_on_ray else "k8s://10.0.0.9"
        if offers_slots:
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

    # Spark, as the watch sees it.
    def setting(self, name: str, otherwise: str) -> str:
        return self._settings.get(name, otherwise)

    def memory_mb(self) -> int:
        return 1024

    def present(self) -> list[Executor]:
        return [Executor(number, host) for number, host in self.executors.items()]

    def start(self, hosts: Sequence[str]) -> None:
        self.calls.append(("start", *hosts))

    def end_hung(self, nodes: Collection[str], passed_s: float) -> None:
        assert set(nodes) == set(self.alive.values())
        assert passed_s > 0

    def request(self, count: int) -> None:
        self.calls.append(("ask", count))

    def lose(self, executor_ids: Sequence[str], why: str) -> None:
        self.calls.append(("lose", *executor_ids))

    def is_starting(self) -> bool:
        return self.starts

    def restarting(self) -> list[RestartingExecutor]:
        return self.restarts

    def end(self, ended: Sequence[str] | RestartingExecutor) -> None:
        if isinstance(ended, RestartingExecutor):
            self.calls.append(("end actor", ended.name))
            self.restarts.remove(ended)
            return
        self.calls.append(("end", *ended))
        for executor_id in ended:
            del self.executors[executor_id]

    # The fleet, as the watch sees it.
    def load_all_states(self) -> list[str]:
        return []

    def drain(self, node_id: str, *, dry_run: bool) -> tuple[str, ...]:
        if self.refuses:
            raise InvalidRequestError("no other node has a living store actor")
        address = next(address for address, alive_id in self.alive.items() if alive_id == node_id)
        self.drained |= set() if dry_run else {address}
        return tuple(f"{address}:{number}" for number in range(self.shards.get(address, 0)))

    def undrain(self, node_id: str) -> None:
        self.calls.append(("undrain", node_id))

    def begin(self, moves: Sequence[str]) -> None:
        self.calls += [("move", *moves)] if moves else []

    def status(self) -> dict[str, Any]:
        return {
            "store_actors": [
                {
                    "actor_name": f"at-{address}",
                    "instance_id": f"life-{address}",
                    "node_id": f"id-{address}",
                    "alive": address in self.store_actors,
                }
                for address in self.alive
            ]
        }

    def report_store_actor_lost(self, instance_id: str) -> None:
        self.calls.append(("lost", instance_id))

    # Ray's actors, as the watch sees them.
    def node_id(self) -> str:
        return "id-head"

    def find(self, name: str) -> Any:
        return SimpleNamespace(address=name.removeprefix("at-"))

    def kill(self, handle: Any, *, restart: bool) -> None:
        assert not restart
        self.store_actors.remove(handle.address)
        self.calls.append(("end store actor", handle.address))


def test_lost_executors_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster("a", executors={"1": "a"})
    cluster.watch.warn_of_lost()
    assert not caplog.text
    cluster.executors.clear()
    cluster.watch.warn_of_lost()
    assert "Spark has 0 of the 1 executors that it was started with: batches wait for one" in caplog.text


class ReportedDrivers:
    """A coordinator that records the reports."""

    def __init__(self) -> None:
        self.reports: list[DriverReport] = []

    def report_driver(self, report: DriverReport) -> None:
        self.reports.append(report)


def test_a_new_report_is_sent_at_once_and_repeated_for_restarted_coordinators() -> None:
    reports, listener = DriverReports(), ReportedDrivers()
    calm = DriverReport("app", (ExecutorState("1", "a"),))
    lost = DriverReport("app", (ExecutorState("1", "a", 5, "killed"),))
    for now_s, report in ((0.0, calm), (2.0, calm), (4.0, lost), (6.0, lost), (14.0, lost)):
        reports.report(report, [listener], now_s)
    assert listener.reports == [calm, lost, lost]


def test_a_report_that_fails_does_not_stop_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster("a")

    def fails(now_ms: int) -> DriverReport:
        raise RuntimeError("Spark does not say")

    cluster.report, cluster.has_ended = fails, lambda: False  # type: ignore[attr-defined]
    cluster.watch.report(0.0, 0)
    cluster.watch.report(2.0, 2000)
    assert caplog.text.count("could not be reported") == 1, "it is logged once"


def test_a_node_that_joins_gets_an_executor() -> None:
    cluster = FakeCluster("a", executors={"0": "a"})
    cluster.look(0, 20)
    assert cluster.calls == []
    cluster.alive["b"] = "id-b"
    cluster.look(22, 24, 31)
    assert cluster.calls == [("ask", 1)]
    cluster.executors["1"] = "b"
    cluster.look(33, 60)
    assert cluster.calls == [("ask", 1)]


def test_an_executor_that_comes_in_the_middle_of_a_batch_gets_a_store_actor() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a"})
    (idle,) = cluster.fleets
    cluster.look(0)
    assert cluster.calls == [], "no query runs"
    cluster.fleets = [idle._replace(nodes=cluster)]
    cluster.look(2)
    assert cluster.calls == []
    cluster.executors = {"1": "b"}
    cluster.look(4, 6)
    assert cluster.calls == [("start", "b")]
    cluster.look(14)
    assert cluster.calls[1] == ("start", "b"), "its store actor may be gone"


def test_no_executor_is_requested_while_another_is_starting() -> None:
    cluster = FakeCluster("a", "b")
    cluster.executors, cluster.starts = {"0": "a"}, True
    cluster.look(0, 10, 20, 100)
    assert cluster.calls == []
    cluster.starts = False
    cluster.look(102, 110)
    assert cluster.calls == [("ask", 1)]


def test_without_slots_for_stores_the_watch_leaves_executors_to_raydp() -> None:
    cluster = FakeCluster("a", "b", offers_slots=False)
    cluster.look(0, 20, 100)
    assert cluster.calls == []


@pytest.mark.parametrize("option", [{"is_dynamic": True}, {"is_on_ray": False}])
def test_executors_are_left_to_spark_with_dynamic_allocation_and_where_they_are_not_raydps(option: Any) -> None:
    cluster = FakeCluster("a", "b", "c", executors={"0": "a", "1": "b"}, **option)
    cluster.ending["b"] = 1
    cluster.look(0, 20, 100)
    cluster.watch.batch_ended()
    assert cluster.calls == [], "its store actor is not idle, either"


def test_spark_is_told_of_executors_whose_node_ray_has_given_up() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a", "1": "b"})
    cluster.look(0)
    del cluster.alive["b"]
    cluster.look(2, 4)
    assert cluster.calls == [("lose", "1")]


def test_an_executor_on_a_new_node_of_the_same_address_is_not_given_up() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a", "1": "b"})
    cluster.look(0)
    cluster.alive["b"] = "id-b-new"
    cluster.executors["2"] = "b"
    cluster.look(2)
    assert cluster.calls == [("lose", "1")]


def test_an_executor_whose_host_never_was_a_nodes_address_is_left_alone() -> None:
    cluster = FakeCluster("a", executors={"0": "a", "1": "host-without-a-node"})
    cluster.look(0, 2)
    assert cluster.calls == []


def test_an_executor_that_raydp_refuses_to_restart_is_ended_so_that_its_slot_is_free() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a", "1": "b"})
    cluster.look(0)
    del cluster.executors["1"]
    cluster.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 5)]
    cluster.look(2, 4)
    assert cluster.calls == [], "it may well start"
    cluster.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 6)]
    cluster.look(6)
    assert cluster.calls == [("end actor", "raydp-executor-1")]


def test_an_executor_that_restarted_in_between_may_restart_again() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a", "1": "b"})
    cluster.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 1)]
    cluster.look(0)
    cluster.restarts = []
    cluster.look(2)
    cluster.restarts = [RestartingExecutor("id-1", "raydp-executor-1", "ns", "id-b", 2)]
    cluster.look(4)
    assert cluster.calls == []


def test_executors_of_other_applications_are_not_ended() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a"})
    for restarts in (1, 2, 3):
        cluster.restarts = [RestartingExecutor("id-9", "raydp-executor-0", "ns", "id-b", restarts)]
        cluster.look(restarts)
    assert cluster.calls == []


def test_a_node_that_ends_is_emptied_then_its_executor_ends_with_a_batch_then_its_store_actor() -> None:
    cluster = FakeCluster("a", "b")
    cluster.executors, cluster.shards = {"0": "a", "1": "b"}, {"b": 2}
    cluster.look(0)
    cluster.ending["b"] = 1
    cluster.look(2)
    assert cluster.calls == [("move", "b:0", "b:1")]
    assert cluster.drained == {"b"}
    cluster.look(4, 6)
    cluster.watch.batch_ended()
    assert len(cluster.calls) == 1, "it still has shards, and they are under way"
    cluster.shards = {"b": 1}
    cluster.look(32)
    assert cluster.calls[1:] == [("move", "b:0")], "a shard that did not move is tried again"
    cluster.shards = {}
    cluster.look(34)
    cluster.watch.batch_ended()
    assert cluster.calls[2:] == [("end", "1")]
    cluster.look(36)
    assert cluster.calls[3:] == [("end store actor", "b"), ("lost", "life-b")]
    cluster.look(60)
    assert len(cluster.calls) == 5, "no executor is asked for on it"
    del cluster.alive["b"], cluster.ending["b"]
    cluster.look(62)
    assert cluster.calls[5:] == [("undrain", "id-b")]


def test_without_batches_the_executor_ends_all_the_same() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a", "1": "b"})
    cluster.ending["b"] = 0
    cluster.look(0, 4)
    assert ("end", "1") not in cluster.calls
    cluster.look(10)
    assert ("end", "1") in cluster.calls


def test_a_store_actor_stays_as_long_as_another_applications_executor_is_on_its_node() -> None:
    cluster = FakeCluster("a", "b", executors={"0": "a", "1": "b"})
    cluster.ending["b"] = 1
    cluster.end = lambda executor_ids: None  # type: ignore[method-assign]
    cluster.look(0, 10, 20, 30)
    assert "b" in cluster.store_actors


def test_shards_without_a_target_are_reported_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cluster = FakeCluster("a", limit=1)
    cluster.executors, cluster.shards, cluster.refuses = {"0": "a"}, {"a": 3}, True
    cluster.ending["a"] = 1_700_000_000_000
    cluster.look(0, 10, 20)
    assert caplog.text.count("Ray ends node a at 22:13:20 UTC, and shards stay there") == 1
    cluster.watch.batch_ended()
    assert cluster.calls == []
    cluster.refuses = False
    cluster.look(30)
    assert cluster.calls == [("move", "a:0", "a:1", "a:2")]
    assert "its 3 shards go to other nodes" in caplog.text


def test_one_fleet_that_has_no_other_node_does_not_keep_the_others_there() -> None:
    cluster, other_fleet = FakeCluster("a", "b"), FakeCluster("a", "b")
    cluster.executors, other_fleet.shards, cluster.refuses = {"0": "a", "1": "b"}, {"b": 1}, True
    cluster.fleets += other_fleet.fleets
    cluster.ending["b"] = 1
    cluster.look(0)
    assert other_fleet.calls == [("move", "b:0")]
    other_fleet.shards = {}
    cluster.look(2)
    cluster.watch.batch_ended()
    assert cluster.calls == [], "one fleet has not left it"
    cluster.refuses = False
    cluster.look(4)
    cluster.watch.batch_ended()
    assert cluster.calls == [("end", "1")]


# -- store actors that hang ---------------------------------------------------------------------------------------------


class PingedActors:
    """Store actors of one node each, which answer pings, hang, or are being started again by Ray."""

    hung_after_s = 20.0

    def __init__(self) -> None:
        self.hangs: set[str] = set()
        self.starts: set[str] = set()
        self.ended: list[str] = []
        #: How often the next store actor that is asked where it is will not answer, as Ray starts it again.
        self.unavailable = 0

    def handle(self, name: str) -> Any:
        return SimpleNamespace(
            ping=SimpleNamespace(remote=lambda: name), location=SimpleNamespace(remote=lambda: f"location of {name}")
        )

    def wait(self, references: Sequence[str], timeout_s: float) -> bool:
        assert timeout_s == 0 or references[0].startswith("location")
        return references[0] not in self.hangs

    def get(self, reference: str) -> str:
        if reference in self.starts:
            raise RayActorError
        if self.unavailable > 0:
            self.unavailable -= 1
            raise ActorUnavailableError("it is restarting", None)
        return reference

    def kill(self, handle: Any, *, restart: bool) -> None:
        assert restart
        self.ended.append(handle.ping.remote())


@pytest.fixture
def pinged(monkeypatch: pytest.MonkeyPatch) -> tuple[ExecutorNodes, PingedActors]:
    actors = PingedActors()
    monkeypatch.setattr("spark_jobs.nodes.executor_nodes.ensure_store_actor", lambda *asked: actors.handle(asked[4]))
    nodes = ExecutorNodes(SimpleNamespace(uri="", storage_options=None, maintenance=None, memory=None), None)  # type: ignore[arg-type]
    nodes._actors = actors  # type: ignore[assignment]
    for node in "ab":
        nodes._ensure(node, 0)
    return nodes, actors


def looked(nodes: ExecutorNodes, times: int, alive: str = "ab") -> None:
    for _ in range(times):
        nodes.end_hung(alive, 2.0)


def test_a_store_actor_that_owes_an_answer_for_long_is_ended_once(pinged: tuple[ExecutorNodes, PingedActors]) -> None:
    nodes, actors = pinged
    looked(nodes, 100)
    actors.hangs.add("a")
    # A ping is on its way, and is waited for from then on.
    looked(nodes, 9)
    assert actors.ended == []
    looked(nodes, 1)
    assert actors.ended == ["a"]
    # It is being started, which may take longer.
    looked(nodes, 59)
    assert actors.ended == ["a"]
    looked(nodes, 2)
    assert actors.ended == ["a", "a"]


def test_one_that_ray_restarts_has_the_time_to_start(pinged: tuple[ExecutorNodes, PingedActors]) -> None:
    nodes, actors = pinged
    looked(nodes, 2)
    actors.starts.add("a")
    looked(nodes, 5)
    actors.hangs.add("a")
    looked(nodes, 59)
    assert actors.ended == []


def test_store_actors_of_lost_nodes_are_pinged_no_more(pinged: tuple[ExecutorNodes, PingedActors]) -> None:
    nodes, actors = pinged
    looked(nodes, 2)
    actors.hangs |= {"a", "b"}
    looked(nodes, 100, alive="a")
    assert set(actors.ended) == {"a"}


@pytest.mark.parametrize(("within_s", "times", "placed"), [(60, 0, 2), (60, 3, 2), (-1, 0, 2), (-1, 1, 1)])
def test_shards_are_placed_on_store_actors_that_ray_starts_again(
    pinged: tuple[ExecutorNodes, PingedActors],
    monkeypatch: pytest.MonkeyPatch,
    within_s: float,
    times: int,
    placed: int,
) -> None:
    nodes, actors = pinged
    monkeypatch.setattr("spark_jobs.nodes.executor_nodes.START_S", within_s)
    monkeypatch.setattr("spark_jobs.nodes.executor_nodes.ray_nodes", lambda: ({"a": "host-a", "b": "host-b"}, set()))
    actors.unavailable = times
    slots = nodes.slots({"host-a": 1, "host-b": 1})
    assert [slot.location for slot in slots] == ["location of a", "location of b"][2 - placed :]


@pytest.mark.parametrize(
    ("executors", "shares", "near", "are_strange"),
    [
        ({"10.0.0.1": 3, "10.0.0.2": 1}, {"a": 3, "b": 1}, {"10.0.0.1": "10.0.0.1", "10.0.0.2": "10.0.0.2"}, False),
        # By a name, and several executors of a machine under several hosts.
        ({"of-b": 2, "10.0.0.2": 1}, {"b": 3}, {"10.0.0.2": "10.0.0.2"}, False),
        # This machine is the driver's node, by whatever address.
        ({"192.168.7.7": 2}, {"a": 2}, {"10.0.0.1": "192.168.7.7"}, False),
        # Elsewhere: all nodes.
        ({"10.9.9.9": 5}, {"a": 3, "b": 2}, {}, True),
        ({"10.9.9.9": 1, "10.0.0.2": 1}, {"a": 1, "b": 1}, {"10.0.0.2": "10.0.0.2"}, True),
        # Spark does not know yet that a node is lost.
        ({"10.0.0.3": 4, "10.0.0.2": 1}, {"b": 1}, {"10.0.0.2": "10.0.0.2"}, False),
        ({}, {}, {}, False),
    ],
)
def test_store_actors_are_on_the_nodes_of_executors_or_else_on_all(
    pinged: tuple[ExecutorNodes, PingedActors],
    monkeypatch: pytest.MonkeyPatch,
    executors: dict[str, int],
    shares: dict[str, int],
    near: dict[str, str],
    are_strange: bool,
) -> None:
    nodes, actors = pinged
    module = "spark_jobs.nodes.executor_nodes"
    monkeypatch.setattr(f"{module}.ray_nodes", lambda: ({"a": "10.0.0.1", "b": "10.0.0.2"}, {"10.0.0.3"}))
    monkeypatch.setattr(f"{module}.addresses_of", lambda host: {host, *(["10.0.0.2"] if host == "of-b" else [])})
    monkeypatch.setattr(f"{module}.addresses_of_machine", lambda: {"127.0.0.1", "192.168.7.7"})
    monkeypatch.setattr(actors, "node_id", lambda: "a", raising=False)
    found = nodes.slots(executors)
    assert {str(slot.location)[-1]: slot.cores for slot in found} == shares
    assert (nodes.near, nodes.are_strange) == (near, are_strange)


class SlowActor:
    """An actor that answers `answers_after_s` from now, by the time that is waited for it, and starts until then or hangs."""

    hung_after_s = 20.0

    def __init__(self, answers_after_s: float, *, starts: bool) -> None:
        self.left_s, self.starts, self.was_ended = answers_after_s, starts, False
        self.ping = SimpleNamespace(remote=lambda: "pong")

    def wait(self, references: Sequence[str], timeout_s: float) -> bool:
        self.left_s -= timeout_s
        return self.left_s <= 0

    def get(self, reference: str) -> str:
        return reference

    def is_starting(self, handle: Any) -> bool:
        return self.starts

    def kill(self, handle: Any, *, restart: bool) -> None:
        assert restart
        self.was_ended = True


@pytest.mark.parametrize(
    ("answers_after_s", "starts", "is_ended"),
    [(24.9, False, False), (25.1, False, True), (25.1, True, False), (144.9, True, False), (145.1, True, True)],
)
def test_only_an_actor_that_runs_and_answers_nothing_is_ended(
    answers_after_s: float, starts: bool, is_ended: bool
) -> None:
    actor: Any = SlowActor(answers_after_s, starts=starts)
    with pytest.raises(RayActorError) if is_ended else nullcontext():
        assert answer(actor, actor, "result") == "result"
    assert actor.was_ended == is_ended

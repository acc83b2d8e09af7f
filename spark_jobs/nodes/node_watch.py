"""Watches the nodes of a driver's fleets: it requests executors where nodes join, moves shards off nodes that end, ends store actors
that hang, and reports.

Neither Spark nor RayDP does that: RayDP never has more executors than it began with, and does not report to Spark which nodes Ray
is going to end. Ray's nodes are checked every few seconds, in a thread that ends with the Spark application.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import ray
from ray.exceptions import RayError

from coordinator.model.errors import StateStoreError
from coordinator.placement.lease_plans import PlannedMove
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from coordinator.telemetry.drivers import DriverReport
from spark_jobs.nodes.executor_nodes import ExecutorNodes
from spark_jobs.nodes.ray_nodes import ExecutorSlots, RayCluster, RayNode
from spark_jobs.plan.executors import Executors
from spark_jobs.session.settings import EXECUTOR_RESOURCES, MAX_EXECUTORS, STORE_RESOURCE, is_on_ray
from store_actors.actor.deploy import LiveMigration, end_store_actors

log = logging.getLogger(__name__)

#: Seconds after which an unchanged report is repeated, as a coordinator that has restarted has none.
_REPEAT_S = 10.0
_INTERVAL_S = 2.0
#: Seconds after which the move of a shard off a node is begun again: a batch has to end after the copy for the shard to move.
_AGAIN_S = 30.0
#: Seconds after which it is looked again whether the nodes of the executors have store actors, if the executors are the same.
_STORE_ACTORS_S = 10.0
#: Seconds for which an executor on a node without shards waits for the end of a batch, so that no task is cut off.
_LAST_BATCH_S = 10.0
#: Resources that only executors use.
_USED_BY_EXECUTORS = ("CPU", STORE_RESOURCE)


class DriverReports:
    """Sends a changed report at once, and repeats an unchanged one periodically."""

    def __init__(self) -> None:
        self._last: DriverReport | None = None
        self._reported_s = 0.0

    def report(self, report: DriverReport, coordinators: Iterable[CoordinatorClient], now_s: float) -> None:
        """Send a report if it is due; `now_s` is the time of a monotonic clock."""
        if report == self._last and now_s - self._reported_s < _REPEAT_S:
            return
        for coordinator in coordinators:
            coordinator.report_driver(report)
        self._last, self._reported_s = report, now_s


class WatchedFleet(NamedTuple):
    """A fleet of this driver; `nodes` are None while no query writes its states."""

    coordinator: CoordinatorClient
    migration: LiveMigration
    nodes: ExecutorNodes | None = None


@dataclass(slots=True)
class _Drain:
    """A node that Ray is going to end."""

    node: RayNode
    begun_s: dict[PlannedMove, float] = field(default_factory=dict)
    #: Since when the node is known to have no shards.
    empty_s: float | None = None
    is_logged: bool = False
    #: Whether the move of its shards was refused, as no other node can take them.
    is_refused: bool = False
    ended: set[str] = field(default_factory=set)


class NodeWatch:
    """Watches nodes for one Spark application."""

    def __init__(
        self,
        executors: Executors,
        fleets: Callable[[], Iterable[WatchedFleet]],
        cluster: RayCluster | None = None,
        actors: RayActors | None = None,
    ) -> None:
        self._executors = executors
        self._fleets = fleets
        self._cluster = cluster or RayCluster()
        self._actors = actors or RayActors()
        self._reports = DriverReports()
        #: Error text of the last report; empty if it succeeded.
        self._report_error = ""
        # Locked while the nodes are checked.
        self._guard = threading.Lock()
        self._drains: dict[str, _Drain] = {}
        #: As of the last check: addresses of the living nodes by id, and ids of the executors. And all nodes that ever had executors.
        self._last_nodes: dict[str, str] = {}
        self._last_executors: set[str] = set()
        self._executor_nodes: set[str] = set()
        #: The executors whose nodes had store actors at the time.
        self._served: tuple[set[str], float] = set(), -math.inf
        #: For the executors that Ray is restarting, their number of restarts when that was first seen.
        self._restarts: dict[str, int] = {}
        self._needed = _needed(executors)
        # With dynamic allocation, and where executors are not RayDP's, only Spark itself may request and end them.
        is_dynamic = executors.setting("spark.dynamicAllocation.enabled", "false") == "true"
        self._may_change = is_on_ray(executors.setting("spark.master", "")) and not is_dynamic
        limit = int(executors.setting(MAX_EXECUTORS, executors.setting("spark.executor.instances", "0")))
        # Without that resource RayDP would start several executors on one node, and leave another idle.
        self._slots = ExecutorSlots(limit if self._may_change and STORE_RESOURCE in self._needed else 0)

    def start(self) -> None:
        """Watch, in a thread of its own, until the application ends."""
        threading.Thread(target=self._watch, name="statefleet-nodes", daemon=True).start()

    def _watch(self) -> None:
        while not self._executors.has_ended() and ray.is_initialized():
            try:
                self.report(time.monotonic(), int(time.time() * 1000))
                self.look(time.monotonic())
            except (RayError, StateStoreError) as error:
                log.warning(
                    "Ray's nodes could not be looked at; it is tried again: %s: %s", type(error).__name__, error
                )
            except Exception:  # no caller gets the error of a thread
                if self._executors.has_ended() or not ray.is_initialized():
                    return
                log.exception("Ray's nodes could not be looked at; it is tried again")
            time.sleep(_INTERVAL_S)

    def report(self, now_s: float, now_ms: int) -> None:
        """Report executors and long batches to the fleets' coordinators."""
        try:
            report = self._executors.report(now_ms)
            self._reports.report(report, (fleet.coordinator for fleet in self._fleets()), now_s)
        except Exception as error:  # noqa: BLE001 - nodes are watched all the same
            # Logged once: it is tried every two seconds.
            if str(error) != self._report_error and not self._executors.has_ended():
                log.warning("executors and long batches could not be reported; it is tried again: %s", error)
            self._report_error = str(error)

    def look(self, now_s: float) -> None:
        """Check the nodes once, and do what is due."""
        with self._guard:
            nodes = self._cluster.nodes()
            self._lose(nodes)
            self._start_store_actors(now_s)
            for fleet in self._fleets():
                if fleet.nodes is not None:
                    fleet.nodes.end_hung(self._last_nodes, _INTERVAL_S)
            self._end_restarts()
            self._drain(nodes, now_s)
            hosts = {executor.host for executor in self._executors.present()}
            free = [node for node in nodes if node.address not in hosts and node.has_room(self._needed)]
            if free and self._cluster.is_starting():
                free = []  # a node may be for the starting executor, which RayDP would not count
            due = self._slots.due(now_s, len(hosts), len(free))
            if due:
                self._executors.request(due)
                log.warning(
                    "Spark has %d executors, and these nodes have room for one: %s; %d more are asked for, and shards move there "
                    "once they are up",
                    len(hosts),
                    ", ".join(node.address for node in free),
                    due,
                )

    def warn_of_lost(self) -> None:
        """Log how many executors are lost, if any: RayDP does not restart every one, and users would wait in silence."""
        present, asked = len(self._executors.present()), int(self._executors.setting("spark.executor.instances", "0"))
        if present < asked:
            log.warning(
                "Spark has %d of the %d executors that it was started with: %s; others are asked for once nodes have room for them",
                present,
                asked,
                "batches go on, and their nodes have all shards" if present else "batches wait for one",
            )

    def batch_ended(self) -> None:
        """End executors that are due, as a batch has ended except for Spark's own commit: none of its tasks runs now."""
        # A check of the nodes may wait for Ray; a batch must not.
        if self._drains and self._guard.acquire(blocking=False):
            try:
                for drain in self._drains.values():
                    if drain.empty_s is not None:
                        self._end_executors(drain)
            finally:
                self._guard.release()

    def _lose(self, nodes: Sequence[RayNode]) -> None:
        """Report executors to Spark as lost whose node Ray has given up: behind a broken link Spark would wait longer than Ray."""
        nodes_now = {node.node_id: node.address for node in nodes}
        lost_hosts = {address for node_id, address in self._last_nodes.items() if node_id not in nodes_now}
        present = self._executors.present()
        # By now another node may have the address, and an executor.
        lost = [
            executor
            for executor in present
            if executor.host in lost_hosts and executor.executor_id in self._last_executors
        ]
        self._last_nodes, self._last_executors = nodes_now, {executor.executor_id for executor in present}
        self._executor_nodes |= {
            node.node_id for node in nodes if any(executor.host == node.address for executor in present)
        }
        if lost:
            log.warning(
                "Ray has given up nodes that had executors, and Spark is told: %s",
                ", ".join(executor.host for executor in lost),
            )
            self._executors.lose([executor.executor_id for executor in lost], "Ray has given its node up")

    def _start_store_actors(self, now_s: float) -> None:
        """Have store actors started where executors came in the middle of a batch: their tasks wait for one, and start none."""
        served, at_s = self._served
        if self._last_executors == served and now_s - at_s < _STORE_ACTORS_S:
            return
        hosts = {executor.host for executor in self._executors.present()}
        for fleet in self._fleets():
            if fleet.nodes is not None:
                fleet.nodes.start(sorted(hosts))
        self._served = self._last_executors, now_s

    def _end_restarts(self) -> None:
        """End executors that cannot restart, and use resources while they try.

        RayDP's master refuses an executor whose connection it did not see break, as it thinks that the executor is still there
        (raydp#487).
        """
        if STORE_RESOURCE not in self._needed:
            return  # they use no resource of ours, and may be other applications'
        restarting = [executor for executor in self._cluster.restarting() if executor.node_id in self._executor_nodes]
        self._restarts = {
            executor.actor_id: self._restarts.get(executor.actor_id, executor.restarts) for executor in restarting
        }
        for executor in restarting:
            if executor.restarts > self._restarts[executor.actor_id]:
                log.warning(
                    "RayDP refuses again and again to restart %s; it is ended, and another asked for", executor.name
                )
                self._cluster.end(executor)

    # -- nodes that end -------------------------------------------------------------------------------------------

    def _drain(self, nodes: Iterable[RayNode], now_s: float) -> None:
        ending = {node.node_id: node for node in nodes if node.draining_until_ms is not None}
        for node_id in self._drains.keys() - ending.keys():
            del self._drains[node_id]
            for fleet in self._fleets():
                fleet.coordinator.undrain(node_id)  # the id is never used again
        for node_id, node in ending.items():
            drain = self._drains.setdefault(node_id, _Drain(node))
            drain.node = node
            if drain.empty_s is not None:
                self._leave(drain, now_s)
            else:
                self._empty(drain, now_s)

    def _empty(self, drain: _Drain, now_s: float) -> None:
        node, shards, refused = drain.node, 0, None
        for fleet in self._fleets():
            try:
                shards += self._move_off(drain, fleet, now_s)
            except StateStoreError as error:  # the other fleets' shards are moved all the same
                refused = error
        if refused is not None and not drain.is_refused:
            log.warning("Ray ends node %s %s, and shards stay there: %s", node.address, _when(node), refused)
        if refused is None and (drain.is_refused or not drain.is_logged):
            log.warning(
                "Ray ends node %s %s: its %d shards go to other nodes while batches go on",
                node.address,
                _when(node),
                shards,
            )
        drain.is_logged, drain.is_refused = True, refused is not None
        drain.empty_s = None if shards or refused else now_s

    def _move_off(self, drain: _Drain, fleet: WatchedFleet, now_s: float) -> int:
        """Have a fleet's shards moved off a node; return how many it still has."""
        if not drain.is_logged:
            fleet.coordinator.load_all_states()
        moves = fleet.coordinator.drain(drain.node.node_id, dry_run=True)
        due = [move for move in moves if now_s - drain.begun_s.get(move, -math.inf) >= _AGAIN_S]
        if due or not drain.is_logged:
            fleet.coordinator.drain(drain.node.node_id, dry_run=False)  # records the drain
        drain.begun_s |= dict.fromkeys(due, now_s)
        fleet.migration.begin(due)
        return len(moves)

    def _leave(self, drain: _Drain, now_s: float) -> None:
        """End this driver's actors on a node without shards, so that nothing is lost with the node, and Ray can end it at once."""
        assert drain.empty_s is not None
        if now_s - drain.empty_s >= _LAST_BATCH_S:
            self._end_executors(drain)
        if any(executor.host == drain.node.address for executor in self._executors.present()):
            return
        # Executors of other drivers still need the store actor.
        if drain.node.is_idle(_USED_BY_EXECUTORS) and drain.node.node_id != self._actors.node_id():
            for fleet in self._fleets():
                end_store_actors(self._actors, fleet.coordinator, drain.node.node_id)

    def _end_executors(self, drain: _Drain) -> None:
        on_node = {
            executor.executor_id for executor in self._executors.present() if executor.host == drain.node.address
        } - drain.ended
        if on_node and self._may_change:
            log.warning(
                "node %s has no shards any more; its executor is ended before Ray ends the node", drain.node.address
            )
            self._executors.end(sorted(on_node))
            drain.ended |= on_node


def _needed(executors: Executors) -> dict[str, float]:
    """Return the resources that RayDP requests of Ray for an executor."""
    cores = executors.setting("spark.executor.cores", "1")
    cpus = executors.setting("spark.ray.actor.resource.cpu", cores)
    needed = {
        "CPU": float(executors.setting(f"{EXECUTOR_RESOURCES}cpu", cpus)),
        "memory": executors.memory_mb() * 1024.0**2,
    }
    if float(executors.setting(f"{EXECUTOR_RESOURCES}{STORE_RESOURCE}", "0")):
        needed[STORE_RESOURCE] = 1.0
    return needed


def _when(node: RayNode) -> str:
    if not node.draining_until_ms:
        return "as soon as it can"
    return f"at {dt.datetime.fromtimestamp(node.draining_until_ms / 1000, dt.UTC):%H:%M:%S} UTC"

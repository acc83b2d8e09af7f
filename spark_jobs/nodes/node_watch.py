"""Looks after the nodes of a driver's fleets while its queries run: executors where nodes join, shards off nodes that end, and reports.

Neither Spark nor RayDP does it: RayDP has as many executors as it began with, or fewer, and tells Spark of no node that Ray is going to
end. What Ray tells is looked at every few seconds, in a thread that ends with the Spark application.
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
from coordinator.placement.move_planner import PlannedMove
from coordinator.service.calls import Actors, RayActors
from coordinator.service.client import CoordinatorClient
from spark_jobs.driver_reports import DriverReports
from spark_jobs.nodes.executor_slots import ExecutorPlaces
from spark_jobs.nodes.live_migration import ShadowMoves
from spark_jobs.nodes.ray_nodes import RayCluster, RayNode
from spark_jobs.plan.executors import Executors
from spark_jobs.session.settings import EXECUTOR_RESOURCES, MAX_EXECUTORS, STORE_RESOURCE
from store_actors.deploy import end_store_actors

__all__ = ["NodeWatch", "WatchedFleet"]

log = logging.getLogger(__name__)

_LOOK_S = 2.0
#: After how long a shard that is still on a node that ends is moved once more: it goes with the end of a batch, if a copy was made.
_AGAIN_S = 30.0
#: How long an executor of a node without shards waits for the end of a batch, so that none of its tasks is cut off.
_LAST_BATCH_S = 10.0
#: Resources that only executors use.
_USED_BY_EXECUTORS = ("CPU", STORE_RESOURCE)


class WatchedFleet(NamedTuple):
    """A fleet of this driver."""

    coordinator: CoordinatorClient
    moves: ShadowMoves


@dataclass(slots=True)
class _Drain:
    """A node that Ray is going to end.

    Attributes
    ----------
    begun_s
        When each move of a shard off it was begun.
    empty_s
        Since when it is known to have none.
    is_told
        Whether the log says that it ends.
    is_refused
        Whether its shards have nowhere to go.
    ended
        Executors on it that were ended.
    """

    node: RayNode
    begun_s: dict[PlannedMove, float] = field(default_factory=dict)
    empty_s: float | None = None
    is_told: bool = False
    is_refused: bool = False
    ended: set[str] = field(default_factory=set)


class NodeWatch:
    """Watches nodes for one Spark application.

    Parameters
    ----------
    executors
        Those of the application.
    fleets
        Gives the fleets of this driver.
    cluster
        What Ray tells.
    actors
        Ray's actors.
    """

    def __init__(
        self,
        executors: Executors,
        fleets: Callable[[], Iterable[WatchedFleet]],
        cluster: RayCluster | None = None,
        actors: Actors | None = None,
    ) -> None:
        self._executors = executors
        self._fleets = fleets
        self._cluster = cluster or RayCluster()
        self._actors = actors or RayActors()
        self._reports = DriverReports()
        #: Why the last report failed.
        self._unreported = ""
        # Held while the nodes are looked at.
        self._guard = threading.Lock()
        self._drains: dict[str, _Drain] = {}
        #: Addresses of the nodes that lived at the last look, by id, ids of the executors then, and nodes that ever had some.
        self._lived: dict[str, str] = {}
        self._worked: set[str] = set()
        self._used: set[str] = set()
        #: Restarts of the executors that Ray is starting anew when they were first seen so.
        self._restarts: dict[str, int] = {}
        self._needed = _needed(executors)
        # With dynamic allocation Spark itself asks for executors and ends them, and lets nobody else do so.
        self._may_change = executors.setting("spark.dynamicAllocation.enabled", "false") != "true"
        limit = int(executors.setting(MAX_EXECUTORS, executors.setting("spark.executor.instances", "0")))
        # Without that resource RayDP would put several on one node, and leave another idle.
        self._places = ExecutorPlaces(limit if self._may_change and STORE_RESOURCE in self._needed else 0)

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
            except Exception:  # a thread's error has nobody else to be told to
                if self._executors.has_ended() or not ray.is_initialized():
                    return
                log.exception("Ray's nodes could not be looked at; it is tried again")
            time.sleep(_LOOK_S)

    def report(self, now_s: float, now_ms: int) -> None:
        """Report executors and long batches to the fleets' coordinators."""
        try:
            report = self._executors.report(now_ms)
            self._reports.report(report, (fleet.coordinator for fleet in self._fleets()), now_s)
        except Exception as error:  # noqa: BLE001 - nodes are looked after all the same
            # Said once: it is tried every two seconds.
            if str(error) != self._unreported and not self._executors.has_ended():
                log.warning("executors and long batches could not be reported; it is tried again: %s", error)
            self._unreported = str(error)

    def look(self, now_s: float) -> None:
        """Look once, and do what is due."""
        with self._guard:
            nodes = self._cluster.nodes()
            self._lose(nodes)
            self._end_restarts()
            self._drain(nodes, now_s)
            hosts = {one.host for one in self._executors.present()}
            free = [node for node in nodes if node.address not in hosts and node.has_room(self._needed)]
            if free and self._cluster.is_starting():
                free = []  # one of them may be for it, and RayDP would not count it
            due = self._places.due(now_s, len(hosts), len(free))
            if due:
                self._executors.request(due)
                log.warning(
                    "Spark has %d executors, and these nodes have room for one: %s; %d more are asked for, and shards move there "
                    "once they are up",
                    len(hosts),
                    ", ".join(node.address for node in free),
                    due,
                )

    def batch_ended(self) -> None:
        """A batch is over but for Spark's own commit: no task of it runs now."""
        # Whoever looks at nodes may wait for Ray; a batch does not.
        if self._drains and self._guard.acquire(blocking=False):
            try:
                for drain in self._drains.values():
                    if drain.empty_s is not None:
                        self._end_executors(drain)
            finally:
                self._guard.release()

    def _lose(self, nodes: Sequence[RayNode]) -> None:
        """Tell Spark of executors whose node Ray has given up: behind a link that is down it would wait for them longer than Ray."""
        living = {node.node_id: node.address for node in nodes}
        gone = {address for node_id, address in self._lived.items() if node_id not in living}
        present = self._executors.present()
        # Another node may have the address by now, and an executor.
        lost = [one for one in present if one.host in gone and one.executor_id in self._worked]
        self._lived, self._worked = living, {one.executor_id for one in present}
        self._used |= {node.node_id for node in nodes if any(one.host == node.address for one in present)}
        if lost:
            log.warning(
                "Ray has given up nodes that had executors, and Spark is told: %s", ", ".join(one.host for one in lost)
            )
            self._executors.lose([one.executor_id for one in lost], "Ray has given its node up")

    def _end_restarts(self) -> None:
        """End executors that cannot start anew, and hold a place while they try.

        Of one whose connection RayDP's master did not see break it thinks that it is still there, and refuses it (raydp#487).
        """
        if STORE_RESOURCE not in self._needed:
            return  # they hold no place, and may be other applications'
        restarting = [one for one in self._cluster.restarting() if one.node_id in self._used]
        self._restarts = {one.actor_id: self._restarts.get(one.actor_id, one.restarts) for one in restarting}
        for one in restarting:
            if one.restarts > self._restarts[one.actor_id]:
                log.warning(
                    "RayDP refuses to start %s anew, again and again; it is ended, and another asked for", one.name
                )
                self._cluster.end(one)

    # -- nodes that end -------------------------------------------------------------------------------------------

    def _drain(self, nodes: Iterable[RayNode], now_s: float) -> None:
        ending = {node.node_id: node for node in nodes if node.draining_until_ms is not None}
        for gone in self._drains.keys() - ending.keys():
            del self._drains[gone]
            for fleet in self._fleets():
                fleet.coordinator.undrain(gone)  # nobody asks for that id again
        for node_id, node in ending.items():
            drain = self._drains.setdefault(node_id, _Drain(node))
            drain.node = node
            if drain.empty_s is not None:
                self._leave(drain, now_s)
            else:
                self._empty(drain, now_s)

    def _empty(self, drain: _Drain, now_s: float) -> None:
        """Have a node's shards moved."""
        node, left, refused = drain.node, 0, None
        for fleet in self._fleets():
            try:
                left += self._move_off(drain, fleet, now_s)
            except StateStoreError as error:  # the other fleets' shards go all the same
                refused = error
        if refused is not None and not drain.is_refused:
            log.warning("Ray ends node %s %s, and shards stay there: %s", node.address, _when(node), refused)
        if refused is None and (drain.is_refused or not drain.is_told):
            log.warning(
                "Ray ends node %s %s: its %d shards go to other nodes while batches go on",
                node.address,
                _when(node),
                left,
            )
        drain.is_told, drain.is_refused = True, refused is not None
        drain.empty_s = None if left or refused else now_s

    def _move_off(self, drain: _Drain, fleet: WatchedFleet, now_s: float) -> int:
        """Have a fleet's shards moved off a node; returns how many are there."""
        if not drain.is_told:
            fleet.coordinator.load_all_states()
        moves = fleet.coordinator.drain(drain.node.node_id, dry_run=True)
        due = [one for one in moves if now_s - drain.begun_s.get(one, -math.inf) >= _AGAIN_S]
        if due or not drain.is_told:
            fleet.coordinator.drain(drain.node.node_id, dry_run=False)  # writes it down
        drain.begun_s |= dict.fromkeys(due, now_s)
        fleet.moves.begin(due)
        return len(moves)

    def _leave(self, drain: _Drain, now_s: float) -> None:
        """End what this driver has on a node without shards, so that nothing is lost with it, and Ray can end it at once."""
        assert drain.empty_s is not None
        if now_s - drain.empty_s >= _LAST_BATCH_S:
            self._end_executors(drain)
        if any(one.host == drain.node.address for one in self._executors.present()):
            return
        # Those of other drivers need their store actor.
        if drain.node.is_idle(_USED_BY_EXECUTORS) and drain.node.node_id != self._actors.node_id():
            for fleet in self._fleets():
                end_store_actors(self._actors, fleet.coordinator, drain.node.node_id)

    def _end_executors(self, drain: _Drain) -> None:
        here = {one.executor_id for one in self._executors.present() if one.host == drain.node.address} - drain.ended
        if here and self._may_change:
            log.warning(
                "node %s has no shards any more; its executor is ended before Ray ends the node", drain.node.address
            )
            self._executors.end(sorted(here))
            drain.ended |= here


def _needed(executors: Executors) -> dict[str, float]:
    """Ray's resources of one executor, as RayDP asks for them."""
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

"""Looks after the nodes of a driver's fleets while its queries run: executors where nodes join, shards off nodes that end.

Neither Spark nor RayDP does it: RayDP has as many executors as it began with, or fewer, and tells Spark of no node that Ray is going to
end. What Ray tells is looked at every few seconds, in a thread that ends with the Spark application.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import ray
from ray.exceptions import RayError

from coordinator.calls import RayActors
from coordinator.client import CoordinatorClient
from coordinator.errors import StateStoreError
from spark_jobs.executor_places import ExecutorPlaces
from spark_jobs.plan.executors import Executors
from spark_jobs.ray_nodes import RayNode, ray_nodes
from spark_jobs.session.spark_session import EXECUTOR_RESOURCES, MAX_EXECUTORS, STORE_RESOURCE
from spark_jobs.shadow_moves import ShadowMoves
from store_actors.deploy import end_store_actor

__all__ = ["NodeWatch", "WatchedFleet"]

log = logging.getLogger(__name__)

_LOOK_S = 2.0
#: After how long what is left on a node that ends is looked at again: a shard goes with the end of a batch.
_AGAIN_S = 10.0
#: Resources that only executors use.
_USED_BY_EXECUTORS = ("CPU", STORE_RESOURCE)


class WatchedFleet(NamedTuple):
    """A fleet of this driver."""

    uri: str
    coordinator: CoordinatorClient
    moves: ShadowMoves


class _Drain:
    """A node that Ray is going to end.

    Attributes
    ----------
    looked_s
        When its shards were looked for.
    is_empty
        Whether it had none then.
    """

    def __init__(self, node: RayNode) -> None:
        self.node = node
        self.looked_s: float | None = None
        self.is_empty = False
        self.is_refused = False


class NodeWatch:
    """Watches nodes for one Spark application.

    Parameters
    ----------
    executors
        Those of the application.
    fleets
        Gives the fleets of this driver.
    """

    def __init__(self, executors: Executors, fleets: Callable[[], Iterable[WatchedFleet]]) -> None:
        self._executors = executors
        self._fleets = fleets
        self._drains: dict[str, _Drain] = {}
        #: Addresses of nodes that lived at the last look.
        self._living: set[str] = set()
        self._needed = _needed(executors)
        # Without that resource RayDP would put several on one node, and leave another idle.
        limit = int(executors.setting(MAX_EXECUTORS, executors.setting("spark.executor.instances", "0")))
        self._places = ExecutorPlaces(limit if STORE_RESOURCE in self._needed else 0)

    def start(self) -> None:
        """Watch, in a thread of its own, until the application ends."""
        threading.Thread(target=self._watch, name="statefleet-nodes", daemon=True).start()

    def _watch(self) -> None:
        while not self._executors.is_over() and ray.is_initialized():
            try:
                self.look(time.monotonic())
            except (RayError, StateStoreError) as error:
                log.warning(
                    "Ray's nodes could not be looked at; it is tried again: %s: %s", type(error).__name__, error
                )
            except Exception:  # a thread's error has nobody else to be told to
                if self._executors.is_over() or not ray.is_initialized():
                    return
                log.exception("Ray's nodes could not be looked at; it is tried again")
            time.sleep(_LOOK_S)

    def look(self, now_s: float) -> None:
        """Look once, and do what is due."""
        nodes = ray_nodes()
        self._lose(nodes)
        self._drain(nodes, now_s)
        hosts = {one.host for one in self._executors.present()}
        free = [node for node in nodes if node.address not in hosts and node.has_room(self._needed)]
        due = self._places.due(now_s, len(hosts), len(free))
        if due:
            self._executors.ask_for(due)
            log.warning(
                "Spark has %d executors, and these nodes have room for one: %s; %d more are asked for, and shards move there once "
                "they are up",
                len(hosts),
                ", ".join(node.address for node in free),
                due,
            )

    def _lose(self, nodes: Sequence[RayNode]) -> None:
        """Tell Spark of executors whose node Ray has given up: behind a link that is down it would wait for them longer than Ray."""
        living = {node.address for node in nodes}
        gone = self._living - living
        self._living = living
        lost = [one for one in self._executors.present() if one.host in gone]
        if lost:
            log.warning(
                "Ray has given up nodes that had executors, and Spark is told: %s", ", ".join(one.host for one in lost)
            )
            self._executors.lose([one.executor_id for one in lost], "Ray has given its node up")

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
            if not drain.is_empty and (drain.looked_s is None or now_s - drain.looked_s >= _AGAIN_S):
                self._empty(drain, is_first=drain.looked_s is None)
                drain.looked_s = now_s
            elif drain.is_empty:
                self._leave(drain, now_s)

    def _empty(self, drain: _Drain, *, is_first: bool) -> None:
        """Have a node's shards moved."""
        left = 0
        for fleet in self._fleets():
            try:
                fleet.coordinator.load_all_states()
                moves = fleet.coordinator.drain(drain.node.node_id, dry_run=False)
            except StateStoreError as error:
                if not drain.is_refused:
                    log.warning(
                        "Ray ends node %s %s, and its shards stay: %s", drain.node.address, _when(drain.node), error
                    )
                drain.is_refused = True
                return
            fleet.moves.begin(moves)
            left += len(moves)
        drain.is_refused = False
        if is_first:
            log.warning(
                "Ray ends node %s %s: its %d shards go to other nodes while batches go on",
                drain.node.address,
                _when(drain.node),
                left,
            )
        drain.is_empty = not left

    def _leave(self, drain: _Drain, now_s: float) -> None:
        """End what this driver has on a node without shards, so that nothing is lost with it, and Ray can end it at once."""
        here = [one.executor_id for one in self._executors.present() if one.host == drain.node.address]
        if here:
            log.warning(
                "node %s has no shards any more; its executor is ended before Ray ends the node", drain.node.address
            )
            self._executors.end(here)
            return
        if drain.node.is_idle(_USED_BY_EXECUTORS) and drain.node.node_id != RayActors().node_id():
            for fleet in self._fleets():
                end_store_actor(RayActors(), fleet.coordinator, fleet.uri, drain.node.node_id)


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

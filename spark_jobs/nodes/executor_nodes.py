"""Which Ray nodes Spark's executors are on, and their store actors.

RayDP starts an executor under the address of its Ray node, which is the host that Spark's scheduler knows it by.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import RayActorError

from coordinator.model.errors import StateStoreError
from coordinator.placement.policy import ActorSlot
from coordinator.service.calls import RayActors, unwrapped
from spark_jobs.worker.fleet_client import FleetAddress
from store_actors.deploy import actors_for, ensure_store_actor

__all__ = ["ExecutorNodes"]

log = logging.getLogger(__name__)

#: Seconds that a store actor may take to start before it is asked whether it hangs.
_START_S = 120.0


class ExecutorNodes:
    """Nodes of one fleet.

    Parameters
    ----------
    address
        The fleet.
    per_node
        Store actors on each node; None for as many as its executors' cores keep busy.
    """

    def __init__(self, address: FleetAddress, per_node: int | None) -> None:
        self._address = address
        self._per_node = per_node
        self._actors = RayActors()
        self._hosts: dict[str, str] = {}

    def slots(self, executors: Mapping[str, int]) -> list[ActorSlot]:
        """Store actors of the nodes that have executors, which are started where there are none.

        Parameters
        ----------
        executors
            Cores of the executors by host.
        """
        self._look()
        fleet = self._address
        # Several Ray nodes of one address cannot be told apart by Spark; the first stands for all.
        by_host = {host: node for node, host in sorted(self._hosts.items(), reverse=True)}
        starting = []
        for host, cores in executors.items():
            node = by_host.get(host)
            if node is None:
                log.warning("an executor's host is no address of a Ray node; shards are not placed there: %s", host)
                continue
            for number, share in enumerate(self._shares(cores)):
                handle = ensure_store_actor(
                    self._actors, fleet.uri, fleet.storage_options, fleet.maintenance, node, fleet.memory, number
                )
                starting.append((handle, handle.location.remote(), share))
        found = []
        for handle, location, cores in starting:
            # However long it takes, up to a point: one that starts answers no ping, and is not hung.
            self._actors.wait([location], _START_S)
            try:
                found.append(ActorSlot(unwrapped(self._actors, handle, location), cores))
            except (RayActorError, StateStoreError) as error:
                log.warning("a node's store actor does not start; shards are not placed there: %s", error)
        return found

    def _shares(self, cores: int) -> list[int]:
        """Cores of a node's executors for each of its store actors, which have shards by them."""
        actors = min(self._per_node or actors_for(cores), max(1, cores))
        return [cores // actors + (number < cores % actors) for number in range(actors)]

    def hosts(self, nodes: Sequence[str | None]) -> list[str | None]:
        """Address of each node; None for one that is not known."""
        if any(node is not None and node not in self._hosts for node in nodes):
            self._look()
        return [None if node is None else self._hosts.get(node) for node in nodes]

    def _look(self) -> None:
        self._hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]

"""The Ray nodes of Spark's executors, and their store actors.

RayDP starts an executor under the address of its Ray node, so Spark's scheduler knows the executor by that host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError

from coordinator.model.errors import StateStoreError
from coordinator.placement.policy import ActorSlot
from coordinator.service.calls import RayActors, unwrapped
from spark_jobs.worker.fleet_client import FleetAddress
from store_actors.deploy import actors_for, ensure_store_actor

__all__ = ["ExecutorNodes"]

log = logging.getLogger(__name__)

#: Seconds that a store actor may take to start before it is checked for a hang.
_START_S = 120.0


class ExecutorNodes:
    """The nodes of a fleet.

    Parameters
    ----------
    address
        The fleet.
    per_node
        Store actors on each node; None for a number by the cores of its executors.
    """

    def __init__(self, address: FleetAddress, per_node: int | None) -> None:
        self._address = address
        self._per_node = per_node
        self._actors = RayActors()

    def slots(self, executors: Mapping[str, int]) -> list[ActorSlot]:
        """Return the store actors of the nodes that have executors; start them where there are none.

        Parameters
        ----------
        executors
            Cores of the executors by host.
        """
        by_host = self._nodes_by_host()
        starting = []
        for host, cores in executors.items():
            node = by_host.get(host)
            if node is None:
                log.warning("an executor's host is no address of a Ray node; shards are not placed there: %s", host)
                continue
            for number, share in enumerate(self._shares(cores)):
                handle = self._ensure(node, number)
                starting.append((handle, handle.location.remote(), share))
        slots = []
        for handle, location, cores in starting:
            # A store actor that is starting answers no ping, and is no hung one: it is checked for a hang only after this wait.
            self._actors.wait([location], _START_S)
            try:
                slots.append(ActorSlot(unwrapped(self._actors, handle, location), cores))
            except (RayActorError, StateStoreError) as error:
                log.warning("a node's store actor does not start; shards are not placed there: %s", error)
        return slots

    def start(self, hosts: Iterable[str]) -> None:
        """Have the first store actor of some hosts started where there is none, without waiting for it."""
        by_host = self._nodes_by_host()
        for host in hosts:
            if host in by_host:
                self._ensure(by_host[host], 0)

    def _ensure(self, node: str, number: int) -> Any:
        fleet = self._address
        return ensure_store_actor(
            self._actors, fleet.uri, fleet.storage_options, fleet.maintenance, node, fleet.memory, number
        )

    def _nodes_by_host(self) -> dict[str, str]:
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        # Spark cannot distinguish Ray nodes of the same address; the first is used for all.
        return {host: node for node, host in sorted(hosts.items(), reverse=True)}

    def _shares(self, cores: int) -> list[int]:
        """Return how many of a node's cores each of its store actors counts for; they get shards accordingly."""
        actors = min(self._per_node or actors_for(cores), max(1, cores))
        return [cores // actors + (number < cores % actors) for number in range(actors)]

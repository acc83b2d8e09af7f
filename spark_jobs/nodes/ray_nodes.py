"""Ray's nodes as a driver sees them: which have resources for an executor, and which Ray is about to end; and when RayDP is asked for
executors, on nodes that joined and in place of lost ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state as ray_state
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

#: Seconds for which a free slot is left to RayDP, which by itself restarts most lost executors.
_GRACE_S = 8.0
#: Seconds within which a requested executor should have started.
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node."""

    node_id: str
    address: str
    #: ``total``, ``available``: Its resources, and those that are free.
    total: Mapping[str, float]
    available: Mapping[str, float]
    #: When Ray or the cloud will end it (Unix time; 0: any time); None if it is not going to end.
    draining_until_ms: int | None

    def has_room(self, needed: Mapping[str, float]) -> bool:
        """Return whether an actor that needs these resources could start on it now."""
        return self.draining_until_ms is None and all(
            self.available.get(name, 0.0) >= amount for name, amount in needed.items()
        )

    def is_idle(self, names: tuple[str, ...]) -> bool:
        return all(self.available.get(name, 0.0) >= self.total.get(name, 0.0) for name in names)


@dataclass(frozen=True, slots=True)
class RestartingExecutor:
    """The Ray actor of a Spark executor that Ray is restarting."""

    actor_id: str
    name: str
    #: The namespace of its application: executors of several applications have the same names.
    namespace: str
    #: The node that it last ran on.
    node_id: str
    restarts: int


class RayCluster:
    """Ray's nodes, and RayDP's actors on them."""

    def nodes(self) -> list[RayNode]:
        available = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
        draining = ray_state.state.get_draining_nodes()
        return [
            RayNode(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"],
                available.get(node["NodeID"], {}),
                draining.get(node["NodeID"]),
            )
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        ]

    def restarting(self) -> list[RestartingExecutor]:
        """Return the executors of all Spark applications that Ray is restarting."""
        return [
            RestartingExecutor(
                actor.actor_id.hex(), actor.name, actor.ray_namespace, actor.node_id.hex(), actor.num_restarts
            )
            for actor in _executors("RESTARTING")
        ]

    def is_starting(self) -> bool:
        """Return whether Ray is starting a requested executor of any Spark application, or lacks the resources for it."""
        return bool(_executors("PENDING_CREATION"))

    def end(self, executor: RestartingExecutor) -> None:
        """End an executor for good."""
        try:
            handle = ray.get_actor(executor.name, namespace=executor.namespace)
        except ValueError:  # it has ended meanwhile
            return
        ray.kill(handle, no_restart=True)


def _executors(state: str) -> list[Any]:
    """Return the rows of Ray's table of actors (``ActorTableData``) for RayDP's executors in a state.

    ``ray._private.state.actors`` lacks the node of an actor.
    """
    table = ray_state.state._connect_and_get_accessor().get_actor_table(None, state)
    rows = [ActorTableData.FromString(row) for row in table]
    return [row for row in rows if row.class_name.rpartition(".")[2] == "RayDPExecutor"]


class ExecutorSlots:
    """Compares the executors with the nodes that have resources for one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free_since_s: float | None = None
        #: Number of executors at the last request, and the time of that; None without an open request.
        self._requested: tuple[int, float] | None = None
        #: Number of requests that no executor followed.
        self._failed_requests = 0

    def due(self, now_s: float, present: int, free: int) -> int:
        """Return how many executors to request now, at a time of a monotonic clock; `free` nodes have resources for an executor.

        Each repeated request asks for one more: RayDP's master starts the difference to the executors that it knows, and may know
        executors that never came.
        """
        missing = min(self._limit - present, free)
        if missing <= 0:
            self._free_since_s = self._requested = None
            self._failed_requests = 0
            return 0
        if self._requested is not None:
            before, requested_s = self._requested
            if present <= before and now_s - requested_s < _START_S:
                return 0
            if present <= before:
                self._failed_requests += 1
                log.warning(
                    "an executor that RayDP was asked for has not come in %.0f s; it is asked again: %d of at most %d executors are "
                    "there, and %d nodes have room for one; see `ray list actors` and the logs of the actors named raydp-executor-*",
                    now_s - requested_s,
                    present,
                    self._limit,
                    free,
                )
            self._requested = None
        if self._free_since_s is None:
            self._free_since_s = now_s
        if now_s - self._free_since_s < _GRACE_S:
            return 0
        self._requested = (present, now_s)
        return missing + self._failed_requests

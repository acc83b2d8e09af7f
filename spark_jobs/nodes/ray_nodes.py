"""Ray's nodes as a driver sees them: which have room for an executor, and which Ray is about to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state as ray_state
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

__all__ = ["RayCluster", "RayNode", "RestartingExecutor"]


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node.

    Attributes
    ----------
    total, available
        Its resources, and those that nobody uses.
    draining_until_ms
        When Ray, or the cloud that Ray was told of, will end it (Unix time; 0: any time); None if nobody has said so.
    """

    node_id: str
    address: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    draining_until_ms: int | None

    def has_room(self, needed: Mapping[str, float]) -> bool:
        """Whether an actor that needs these resources could start on it now."""
        return self.draining_until_ms is None and all(
            self.available.get(name, 0.0) >= amount for name, amount in needed.items()
        )

    def is_idle(self, names: tuple[str, ...]) -> bool:
        """Whether nobody uses some of its resources."""
        return all(self.available.get(name, 0.0) >= self.total.get(name, 0.0) for name in names)


@dataclass(frozen=True, slots=True)
class RestartingExecutor:
    """The Ray actor of a Spark executor that Ray is starting anew.

    Attributes
    ----------
    namespace
        That of its application: executors of several have the same names.
    node_id
        The node that it worked on last.
    restarts
        How often Ray has started it anew.
    """

    actor_id: str
    name: str
    namespace: str
    node_id: str
    restarts: int


class RayCluster:
    """What Ray tells of its nodes, and of RayDP's actors."""

    def nodes(self) -> list[RayNode]:
        """Those that live."""
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
        """Executors of all Spark applications that Ray is starting anew."""
        return [
            RestartingExecutor(
                actor.actor_id.hex(), actor.name, actor.ray_namespace, actor.node_id.hex(), actor.num_restarts
            )
            for actor in _executors("RESTARTING")
        ]

    def is_starting(self) -> bool:
        """Whether Ray is starting an executor of any Spark application, or has no room for one that was asked for."""
        return bool(_executors("PENDING_CREATION"))

    def end(self, executor: RestartingExecutor) -> None:
        """Have Ray start it no more."""
        try:
            handle = ray.get_actor(executor.name, namespace=executor.namespace)
        except ValueError:  # it has ended meanwhile
            return
        ray.kill(handle, no_restart=True)


def _executors(state: str) -> list[Any]:
    """Rows of Ray's table of actors (``ActorTableData``) that are RayDP's executors in a state.

    ``ray._private.state.actors`` leaves out on which node an actor was.
    """
    table = ray_state.state._connect_and_get_accessor().get_actor_table(None, state)
    rows = [ActorTableData.FromString(row) for row in table]
    return [row for row in rows if row.class_name.rpartition(".")[2] == "RayDPExecutor"]

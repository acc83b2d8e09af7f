"""Ray's nodes as a driver sees them: which have room for an executor, and which Ray is about to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray
import ray.util
from ray._private import state as ray_state

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
    address
        Of the node that it was on last.
    restarts
        How often Ray has started it anew.
    """

    actor_id: str
    name: str
    address: str
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
        found = ray_state.actors(actor_state_name="RESTARTING")
        return [
            RestartingExecutor(actor_id, actor["Name"], actor["Address"]["IPAddress"], actor["NumRestarts"])
            for actor_id, actor in found.items()
            if actor["ActorClassName"].rpartition(".")[2] == "RayDPExecutor"
        ]

    def is_starting(self) -> bool:
        """Whether Ray is starting an executor of any Spark application, or has no room for one that was asked for."""
        return any(
            actor["ActorClassName"].rpartition(".")[2] == "RayDPExecutor"
            for actor in ray_state.actors(actor_state_name="PENDING_CREATION").values()
        )

    def end(self, executor: RestartingExecutor) -> None:
        """Have Ray start it no more."""
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["name"] != executor.name:
                continue
            try:
                handle = ray.get_actor(named["name"], namespace=named["namespace"])
            except ValueError:  # it has ended meanwhile
                continue
            # Each application has a namespace, and executors of the same names.
            if handle._actor_id.hex() == executor.actor_id:
                ray.kill(handle, no_restart=True)

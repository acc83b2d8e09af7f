"""Ray's nodes as a driver sees them: which have room for an executor, and which Ray is about to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray._private import state as ray_state

__all__ = ["RayNode", "ray_nodes"]


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


def ray_nodes() -> list[RayNode]:
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

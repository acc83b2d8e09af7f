"""How store actors are deployed on Ray: names, placement and every option with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.deploy import NAMESPACE, fleet_id_of
from coordinator.model import Maintenance

__all__ = ["ensure_store_actor", "store_actor_name"]

#: Shards of one node that are worked on at once; more requests queue. Kernels and Arrow release the GIL, so threads
#: use all cores of a node.
_THREADS = 16


def store_actor_name(uri: str, node_id: str) -> str:
    """Name of the store actor of a fleet on a node."""
    return f"statefleet-store-{fleet_id_of(uri)}-{node_id[:12]}"


def ensure_store_actor(
    uri: str, storage_options: Mapping[str, str] | None, maintenance: Maintenance, node_id: str
) -> Any:
    """Handle of the node's store actor, started (with these options) if it isn't there."""
    name = store_actor_name(uri, node_id)
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:  # how Ray says that there is none
        # Late: the engine takes seconds to import, and most callers only look the actor up.
        from store_actors.actor import StoreActor
    # A ping must be answered while all threads work.
    remote = ray.remote(concurrency_groups={"control": 1})(StoreActor)  # type: ignore[call-overload]
    actor = remote.options(
        name=name,
        namespace=NAMESPACE,
        # State must outlive the Spark driver that caused it to be loaded.
        lifetime="detached",
        get_if_exists=True,
        # A restarted actor starts empty and reads its shards from storage when they are asked for.
        max_restarts=-1,
        # A repeated call is ours to decide: the shard may have moved meanwhile.
        max_task_retries=0,
        # Executors have reserved the node's cores; the fleet shares them instead of waiting for free ones.
        num_cpus=0,
        max_concurrency=_THREADS,
        # Soft: if the node is gone Ray may restart the actor elsewhere rather than never.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=True),
    )
    return actor.remote(name, uri, dict(storage_options) if storage_options else None, maintenance)

"""The fleet's client in a process that is not a store actor, which has the store actor of its node started."""

from __future__ import annotations

from coordinator.runtime.runtime import Runtime
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from store_actors.actor.deploy import ensure_store_actor
from store_actors.client.fleet_client import FleetAddress, FleetClient


def fleet_client_of(
    address: FleetAddress, actors: RayActors | None = None, runtime: Runtime | None = None
) -> FleetClient:
    """Return the client of a fleet for a process that is not a store actor; a simulation passes actors and a machine of its own."""
    actors, runtime = actors or RayActors(), runtime or Runtime()
    options = address.storage_options, address.maintenance
    return FleetClient(
        CoordinatorClient.connect(address.uri, *options, actors=actors, runtime=runtime),
        actors,
        runtime.clock,
        lambda: ensure_store_actor(actors, address.uri, *options, actors.node_id(), address.memory),
    )

"""Spark tasks acted out by a test, through the very client that Spark's tasks use."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa
import ray

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.commits import CommitEntry
from coordinator.model.identities import DEFAULT_STORE, StateStoreId, TaskIdentity
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from statefleet.fleet import Fleet
from store_actors.actor.fleet_clients import fleet_client_of
from store_actors.client.fleet_client import FleetAddress
from store_actors.client.operator_task import ShardWork, apply_all
from store_actors.messages.requests import ShardInput

SCHEMA = StateSchema(
    keys=(Field("v", "int64"),),
    inputs=(),
    accumulators=(Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)


def shard_input(values: list[int]) -> ShardInput:
    return ShardInput.of_raw(SCHEMA, pa.record_batch({"v": pa.array(values, pa.int64())}))


def coordinator_of(fleet: Fleet) -> CoordinatorClient:
    """Return the fleet's coordinator."""
    coordinator = CoordinatorClient.find(fleet.uri)
    assert coordinator is not None
    return coordinator


def deltas_of(fleet: Fleet, name: str, partition_id: int) -> tuple[CommitEntry, ...]:
    """Return the accepted commits of a partition's only store, oldest first."""
    loading = coordinator_of(fleet).load_plans(name, partition_id, sys.maxsize, [DEFAULT_STORE])
    return loading.plans[DEFAULT_STORE].deltas


class Tasks:
    """Spark tasks of one state, acted out by the test process through the very client that Spark's tasks use.

    Parameters
    ----------
    actors
        Its way to the actors.
    """

    def __init__(self, fleet: Fleet, name: str, actors: RayActors | None = None) -> None:
        self.fleet, self.name = fleet, name
        address = FleetAddress(fleet.uri)
        self.client = fleet_client_of(address, actors)

    def identity(self, batch_id: int, run_id: str = "run-1", attempt: int = 0, query_id: str = "query") -> TaskIdentity:
        return TaskIdentity(self.name, query_id, run_id, batch_id, 0, attempt, "test")

    def metadata(self, query_id: str = "query") -> StateMetadata:
        return StateMetadata(self.name, query_id, 1, "update", SCHEMA)

    def apply(
        self, batch_id: int, values: list[int], *, run_id: str = "run-1", attempt: int = 0, query_id: str = "query"
    ) -> list[dict[str, int]]:
        task = self.identity(batch_id, run_id, attempt, query_id)
        works = [ShardWork(task, shard_input(values))]
        (emitted,) = apply_all(self.client.calls, works, self.metadata(query_id), SCHEMA, is_limited=False)
        return sorted(emitted.to_pylist(), key=lambda row: row["v"])

    def chain(self) -> list[Any]:
        return list(deltas_of(self.fleet, self.name, 0))

    def unload(self) -> None:
        """Make the store actor forget the shard."""
        (actor, *_) = [a for a in self.fleet.status()["store_actors"] if a["alive"]]
        handle: Any = RayActors().find(actor["actor_name"])
        assert ray.get(handle.unload.remote(StateStoreId(f"{self.fleet.uri}/{self.name}", 0, 0)))

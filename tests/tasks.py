"""Spark tasks acted out by a test, through the very client that Spark's tasks use."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import ray

from coordinator.deploy import NAMESPACE, call, find_coordinator
from coordinator.model import StateMetadata, StateStoreId, TaskIdentity
from spark_jobs.fleet import Fleet
from spark_jobs.worker.fleet_client import FleetAddress, fleet_client
from store_actors.messages import ShardInput
from store_actors.schema import Accumulator, AccumulatorKind, Field, StateSchema

__all__ = ["SCHEMA", "Tasks", "shard_input"]

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


class Tasks:
    """Spark tasks of one state, acted out by the test process through the very client that Spark's tasks use."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.client = fleet_client(FleetAddress(fleet.uri, ray.get_runtime_context().gcs_address))

    def identity(self, batch_id: int, run_id: str = "run-1", attempt: int = 0, query_id: str = "query") -> TaskIdentity:
        return TaskIdentity(self.name, query_id, run_id, batch_id, 0, attempt, "test")

    def metadata(self, query_id: str = "query") -> StateMetadata:
        return StateMetadata(self.name, query_id, 1, "update", SCHEMA.to_json())

    def apply(
        self, batch_id: int, values: list[int], *, run_id: str = "run-1", attempt: int = 0, query_id: str = "query"
    ) -> list[dict[str, int]]:
        task = self.identity(batch_id, run_id, attempt, query_id)
        emitted = self.client.apply(task, self.metadata(query_id), SCHEMA, shard_input(values), {})
        return sorted(emitted.to_pylist(), key=lambda row: row["v"])

    def chain(self) -> list[Any]:
        return list(call(find_coordinator(self.fleet.uri), "load_plan", self.name, 0, 1 << 30).deltas)

    def unload(self) -> None:
        """Make the store actor forget the shard."""
        (actor, *_) = [a for a in self.fleet.status()["store_actors"] if a["alive"]]
        handle = ray.get_actor(actor["actor_name"], namespace=NAMESPACE)
        assert ray.get(handle.unload.remote(StateStoreId(f"{self.fleet.uri}/{self.name}", 0, 0)))

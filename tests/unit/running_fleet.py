"""A fleet in this process without Ray: the real coordinator, a store actor's shards, and queries."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.commits import CommitEntry, SnapshotEntry
from coordinator.model.identities import StateStoreId, StateStoreProviderId, TaskIdentity
from coordinator.model.load_plans import InstancePlans, LoadPlans
from coordinator.model.maintenance import Maintenance
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from coordinator.runtime.runtime import Runtime
from store_actors.messages.requests import ApplyRequest
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.memory_store import MemoryObjectStore
from tests.unit.rescaled_query import SUMS, random_sums, row_counts, rows_of_shard
from tests.unit.service_harness import HERE, QueriedCoordinator

Answer = TypeVar("Answer")
#: The fleets whose loops run.
RUNNING = set["RunningFleet"]()


class RunningFleet:
    """A coordinator and shards over files; implements :class:`~store_actors.serving.coordinator_ref.CoordinatorRef` for the shards."""

    def __init__(self, objects: MemoryObjectStore, checkpoint_interval: int = 6) -> None:
        self.objects = objects
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        maintenance = Maintenance(min_versions_to_retain=100)
        self.coordinator = QueriedCoordinator(
            objects, maintenance, checkpoint_interval=checkpoint_interval, part_records=3
        )
        self.clock = self.coordinator.clock
        self.shards = OperatorShards(Partitions(objects, self, runtime=Runtime(clock=self.clock)))
        RUNNING.add(self)

    def do(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a call of the coordinator, and return its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def stop(self) -> None:
        """Stop the coordinator and its loop; the objects stay."""
        self.settle()
        self.do(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        RUNNING.discard(self)

    async def _cancel(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def settle(self) -> None:
        """Wait for the checkpoints that are being written."""
        for _, ledger_writer in self.coordinator._states.writers():
            while not ledger_writer.is_idle:
                time.sleep(0.001)

    # -- calls of the store ----------------------------------------------------------------------------------------

    def commit_all(self, state_name: str, entries: Sequence[CommitEntry]) -> Sequence[CommitEntry]:
        return self.do(self.coordinator.accept(*entries)).entries

    def load_plans(self, state_name: str, partition_id: int, version: int, store_names: Sequence[str]) -> LoadPlans:
        return self.do(self.coordinator.load_plans(state_name, partition_id, version, store_names))

    def open_instance(
        self,
        provider_id: StateStoreProviderId,
        ids_to_check: Sequence[StateStoreProviderId],
        version: int,
        store_names: Sequence[str],
    ) -> InstancePlans:
        return self.do(self.coordinator.open_instance(provider_id, HERE, ids_to_check, version, store_names))

    def add_snapshot(self, state_name: str, snapshot: SnapshotEntry) -> bool:
        return self.do(self.coordinator.add_snapshot(state_name, snapshot))

    def reassigned(self, state_name: str, store_ids: Sequence[StateStoreId]) -> set[StateStoreId]:
        partitions = [store_id.partition_id for store_id in store_ids]
        reassigned = set(self.do(self.coordinator.reassigned(state_name, HERE.actor_name, partitions)))
        return {store_id for store_id in store_ids if store_id.partition_id in reassigned}


class RunningQuery:
    """A run of a query that sums by key, of a state of two shards."""

    def __init__(self, fleet: RunningFleet, state: str, query: str, run: str, batch: int = 0) -> None:
        self.fleet, self.state, self.query, self.run, self.batch = fleet, state, query, run, batch
        self.metadata = StateMetadata(state, query, 2, "update", SUMS)

    def lease(self, partition: int) -> LeaseGrant:
        """Return the lease of a shard for the next batch."""
        return self.fleet.do(self.fleet.coordinator.attach_and_lease(self._task(partition), self.metadata, HERE))

    def _task(self, partition: int) -> TaskIdentity:
        # The batch is planned at the same time whichever run repeats it, as Spark's offsets have it.
        batch = self.batch
        times = {"batch_time_ms": 1000 + batch, "former_time_ms": 999 + batch if batch else None}
        return TaskIdentity(self.state, self.query, self.run, batch, partition, 0, "executor", **times)

    def next_batch(self, seed: str, num_shards: int | None = None) -> list[str]:
        """Run the next batch, and return the rows that it emits.

        Parameters
        ----------
        seed
            Seed of the batch's rows, together with its number.
        num_shards
            Number of shards that the batch requests; None keeps those of the batch before.
        """
        fleet, coordinator = self.fleet, self.fleet.coordinator
        partitions: range = fleet.do(coordinator.begin_batch(self._task(0), 2, num_shards))
        rows, emitted = random_sums(random.Random(f"{seed} {self.batch}"), self.batch), list[str]()
        for shard, partition in enumerate(partitions):
            grant = self.lease(partition)
            request = ApplyRequest(self._task(partition), grant.lease, grant.base_version, SUMS, Watermarks(0, 0), 0)
            output = fleet.shards.apply(request, rows_of_shard(rows, SUMS, shard, len(partitions)))[0]
            emitted += row_counts(output).elements()
        fleet.do(coordinator.batch_result(self._task(0), partitions))
        fleet.do(coordinator.batch_finished([self.state], self.run, self.batch, 0.0))
        self.batch += 1
        fleet.settle()
        return emitted

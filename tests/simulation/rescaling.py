"""A query whose state is rescaled, at restarts and while it runs: in each batch rows go to shards by Spark's hash of their keys."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from ray.exceptions import RayError

from coordinator.ledger.rescaling import BatchShards
from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.errors import StateStoreError
from coordinator.model.identities import DEFAULT_STORE, TaskIdentity
from coordinator.model.state_metadata import StateMetadata
from coordinator.service.client import CoordinatorClient
from coordinator.storage.protocol import ObjectStore
from store_actors.client.fleet_client import FleetClient
from store_actors.client.operator_task import ShardWork
from store_actors.engine.spark_hash import shards_of
from store_actors.messages.requests import ShardInput
from store_actors.serving.operator_shards import OperatorShards
from store_actors.serving.partitions import Partitions
from tests.simulation.scheduler import Party, Violation
from tests.simulation.workload import (
    _DELAY_S,
    AggregationWorkload,
    Entry,
    Groups,
    Key,
    Read,
    compare,
    groups_of,
    stamps_of,
)
from tests.stored_shards import stored_rows

#: What runs ask for.
NUMBERS = (None, 1, 2, 3, 4, 6)


class RescaledWorkload(AggregationWorkload):
    """A :class:`tests.simulation.workload.Workload`, partition by partition; no id is given twice.

    Attributes
    ----------
    shards
        How many the state is made with.
    """

    forms = 1
    together = True

    def __init__(self, rng: random.Random, further_batches: int = 0) -> None:
        super().__init__(rng, further_batches)
        self._rows = [[[row for rows in shards for row in rows]] for shards in self._rows]
        states, emitted = self._serial(0)
        self.states, self.emitted = [states], [emitted]
        self.shards = rng.choice((1, 2, 3))
        #: Shard and number of shards of each partition that a batch was begun with.
        self._partitions: dict[int, tuple[int, int]] = {}
        self._shard_of: dict[tuple[Key, int], int] = {}

    def begun(self, shards: BatchShards) -> None:
        """Note the shards of a batch."""
        for shard, partition in enumerate(shards.partitions):
            if self._partitions.setdefault(partition, (shard, shards.num_shards)) != (shard, shards.num_shards):
                raise Violation(f"partition {partition} is another shard than it was")

    def _own(self, groups: Groups, partition: int) -> Groups:
        shard, num_shards = self._partitions[partition]
        return {key: row for key, row in groups.items() if self._shard(key, num_shards) == shard}

    def _shard(self, key: Key, num_shards: int) -> int:
        shard = self._shard_of.get((key, num_shards))
        if shard is None:
            end, name = key
            columns = {"name": pa.array([name])}
            if self.watermark:
                times = pa.array([None if end is None else end * 1_000_000], pa.timestamp("us", tz="UTC"))
                columns = {"end": times, **columns}
            shard = self._shard_of[key, num_shards] = int(shards_of(pa.table(columns), list(columns), num_shards)[0])
        return shard

    def rows_at(self, version: int, partition: int) -> Groups:
        return self._own(self.states[0][version], partition)

    # -- see Workload -------------------------------------------------------------------------------------------------

    def run_task(
        self, client: FleetClient, tasks: Sequence[TaskIdentity], metadata: StateMetadata, stamp: int, form: int
    ) -> None:
        batch = tasks[0].batch_id
        rows = self.input_of(batch, 0, stamp, self.schema).raw
        newest = self.max_event_ms[batch]
        evict_ms = 0 if newest is None or not self.watermark else newest - _DELAY_S * 1000
        works = []
        for task in tasks:
            shard, num_shards = self._partitions[task.partition_id]
            mine = rows.filter(pa.array(shards_of(rows, [key.name for key in self.schema.keys], num_shards) == shard))
            works.append(
                ShardWork(task, ShardInput.of_raw(self.schema, *mine.combine_chunks().to_batches()), evict_ms=evict_ms)
            )
        for task, emitted in zip(tasks, client.apply_all(works, metadata, self.schema), strict=True):
            subject = f"rows emitted by batch {batch} of shard, number {self._partitions[task.partition_id]}"
            compare(subject, groups_of(emitted), self._own(self.emitted[0][batch], task.partition_id))

    def check_version(
        self, objects: ObjectStore, coordinator: Any, grant: LeaseGrant, version: int, forms: Sequence[int]
    ) -> None:
        store_id = grant.lease.store_id
        rows = stored_rows(OperatorShards(Partitions(objects, coordinator)), store_id, version, self.schema)
        subject = f"version {version} of partition {store_id.partition_id} as loaded"
        compare(subject, groups_of(rows), self._own(self.states[0][version], store_id.partition_id))

    def check_snapshot(self, snapshot: Entry, read: Read) -> None:
        expected = self._own(self.states[0][snapshot["version"]], snapshot["partition_id"])
        compare(f"snapshot {snapshot['file']}", groups_of(read(snapshot)), expected)

    def check_history(
        self, shard: int, chains: dict[str, list[Entry]], read: Read, form_of: Callable[[str], int]
    ) -> None:
        entries = chains[DEFAULT_STORE]
        if not entries:
            return
        # Of a shard that was made of others, the model says with what it began.
        groups = self._own(self.states[0][entries[0]["base_version"]], shard)
        for entry in entries:
            delta = read(entry)
            for (key, row), kind, (_, stamp) in zip(
                groups_of(delta).items(), delta.column("__change").to_pylist(), stamps_of(delta), strict=True
            ):
                if stamp is None:
                    raise Violation(f"a group without an attempt: {key}, {entry}")
                groups.pop(key, None)
                if kind == 0:
                    groups[key] = row
            subject = f"version {entry['version']} of partition {shard} by its deltas"
            compare(subject, groups, self._own(self.states[0][entry["version"]], shard))


class Rescaler(Party):
    """Asks for another number of shards while a query runs, and ends.

    Parameters
    ----------
    world
        Makes clients of the coordinator.
    factor
        How many times as many; below 0, how many times fewer.
    """

    def __init__(self, world: Any, name: str, state: str, present: int, factor: int) -> None:
        super().__init__(name, "node-0")
        self._world = world
        self._wish = state, present * factor if factor > 0 else max(1, present // -factor)
        self.is_over = False
        world.scheduler.spawn(self, self._run)

    def _run(self) -> None:
        scheduler, (state, shards) = self._world.scheduler, self._wish
        try:
            coordinator: CoordinatorClient = self._world.new_coordinator_client()
            coordinator.rescale(state, shards, dry_run=False)
            scheduler.fault(self.name, "rescale_asked", str(shards))
        except StateStoreError as error:
            scheduler.log(self.name, f"rescales nothing: {type(error).__name__}")
        except RayError as error:
            raise Violation(f"{self.name}: an error that no caller can tell from others escaped: {error!r}") from error
        finally:
            self.is_over = True

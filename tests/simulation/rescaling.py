"""A query whose state is rescaled, at restarts and while it runs: in each batch rows go to shards by Spark's hash of their keys."""

from __future__ import annotations

import random

import pyarrow as pa

from coordinator.model.schema import StateSchema
from store_actors.engine.spark_hash import shards_of
from store_actors.messages.requests import ShardInput
from tests.simulation.scheduler import Violation
from tests.simulation.workload import AggregationWorkload, Groups, Key

#: What runs ask for.
NUMBERS = (None, 1, 2, 3, 4, 6)


class RescaledWorkload(AggregationWorkload):
    """A workload, partition by partition; no id is given twice.

    Attributes
    ----------
    shards
        How many the state is made with.
    """

    forms = 1

    def __init__(self, rng: random.Random, further_batches: int = 0) -> None:
        super().__init__(rng, further_batches)
        self._rows = [[[row for rows in shards for row in rows]] for shards in self._rows]
        states, emitted = self._serial(0)
        self.states, self.emitted = [states], [emitted]
        self.shards = rng.choice((1, 2, 3))
        #: Shard and number of shards of each partition that a batch was begun with.
        self._partitions: dict[int, tuple[int, int]] = {}
        self._shard_of: dict[tuple[Key, int], int] = {}

    def begun(self, shards: range) -> None:
        """Note the shards of a batch."""
        for shard, partition in enumerate(shards):
            if self._partitions.setdefault(partition, (shard, len(shards))) != (shard, len(shards)):
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

    def emitted_by(self, batch: int, partition: int) -> Groups:
        return self._own(self.emitted[0][batch], partition)

    def input_of(self, batch: int, partition: int, stamp: int, schema: StateSchema) -> ShardInput:
        rows = super().input_of(batch, 0, stamp, schema).raw
        shard, num_shards = self._partitions[partition]
        mine = rows.filter(pa.array(shards_of(rows, [key.name for key in schema.keys], num_shards) == shard))
        return ShardInput.of_raw(schema, *mine.combine_chunks().to_batches())

"""A query whose state is rescaled between batches."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa

from coordinator.ledger.rescaling import decide_shards
from coordinator.ledger.shard_layouts import ShardLayout
from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.identities import TaskIdentity
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, StateSchema
from coordinator.model.state_metadata import StateMetadata
from coordinator.model.watermarks import Watermarks
from store_actors.engine.spark_hash import shards_of
from store_actors.messages.requests import ApplyRequest, ShardInput
from store_actors.serving.operator_shards import OperatorShards
from tests.stored_shards import stored_rows
from tests.unit.aggregation_fleet import AggregationFleet

WORD = Field("k", "string")
SUMS = StateSchema(
    keys=(WORD, Field("f", "float64")),
    inputs=(Field("v", "int64"),),
    accumulators=(
        Accumulator(AccumulatorKind.SUM_INT, ("v",), (Field("a0_sum", "int64"), Field("a0_is_empty", "bool", False))),
        Accumulator(AccumulatorKind.COLLECT_LIST, ("v",), (Field("a1_values", "list<int64>", False),)),
    ),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)


KEYS = [None, "", *"abcdefghijklmnop"]


def random_sums(chance: random.Random, _batch: int) -> ShardInput:
    rows = [
        {"k": chance.choice(KEYS), "f": chance.choice([-0.0, 0.0, 1.5, None]), "v": chance.randint(0, 9)}
        for _batch in range(30)
    ]
    return ShardInput.of_raw(SUMS, pa.RecordBatch.from_pylist(rows, schema=SUMS.raw_schema()))


def rows_of_shard(rows: ShardInput, schema: StateSchema, shard: int, num_shards: int) -> ShardInput:
    names = [field.name for field in schema.input_keys]
    tables = tuple(table.filter(pa.array(shards_of(table, names, num_shards) == shard)) for table in rows.tables)
    return ShardInput(tables, sum(table.num_rows for table in tables))


def row_counts(table: pa.Table) -> Counter[str]:
    """Count rows regardless of their order and of the order in their lists, without their number in the shard."""
    numberless = table.drop_columns([name for name in table.column_names if name == ROW_COLUMN])
    rows = (
        {name: sorted(value, key=str) if isinstance(value, list) else value for name, value in row.items()}
        for row in numberless.to_pylist()
    )
    return Counter(repr(sorted(row.items())) for row in rows)


class RescaledQuery:
    """Batches of a query whose state is rescaled."""

    def __init__(self, schema: StateSchema, num_shards: int) -> None:
        self.fleet, self.schema, self.run, self.batch = AggregationFleet(), schema, "run-0", 0
        self.created = StateMetadata("s", "query", num_shards, schema.output_mode, schema)
        self.layout = ShardLayout(num_shards)

    def task(self, partition: int) -> TaskIdentity:
        return TaskIdentity("s", "query", self.run, self.batch, partition, 0, "executor")

    def rescale(self, num_shards: int) -> None:
        """Start a run with another number of shards."""
        self.run += "+"
        self.layout = self.fleet.coordinator.decide(
            lambda ledger: decide_shards(ledger, self.created, self.task(0), num_shards)
        )
        assert self.layout.num_shards == num_shards

    def apply(self, rows: ShardInput, watermark_ms: int, store: OperatorShards) -> Counter[str]:
        emitted: Counter[str] = Counter()
        for shard, partition in enumerate(self.layout.partitions):
            task = self.task(partition)
            grant = self.fleet.coordinator.lease(task, "a")
            assert grant.base_version == self.batch
            watermarks = Watermarks(watermark_ms, watermark_ms)
            request = ApplyRequest(
                task, grant.lease, grant.base_version, self.schema, watermarks, grant.watermarks.input_ms
            )
            emitted += row_counts(
                store.apply(request, rows_of_shard(rows, self.schema, shard, self.layout.num_shards))[0]
            )
        self.batch += 1
        return emitted

    def state(self) -> Counter[str]:
        """Return the counts of the rows stored in the newest version."""
        counts: Counter[str] = Counter()
        for partition in self.layout.partitions:
            store_id = self.fleet.coordinator.lease(self.task(partition), "a").lease.store_id
            counts += row_counts(stored_rows(self.fleet.new_store(), store_id, self.batch, self.schema))
        return counts

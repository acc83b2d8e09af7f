"""Rows that go through the exchange, as each shard receives them."""

from __future__ import annotations

import pyarrow as pa

from coordinator.model.schema import Accumulator, AccumulatorKind, Field, StateSchema
from spark_jobs.worker.exchange import (
    HASH_COLUMN,
    ROUTE_COLUMN,
    ExchangeTask,
    Received,
    unpack,
)
from spark_jobs.worker.routing import murmur3_int

KEYED = StateSchema(
    keys=(Field("k", "int64"), Field("s", "string")),
    inputs=(Field("v", "int64"),),
    accumulators=(
        Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),
        Accumulator(AccumulatorKind.SUM_INT, ("v",), (Field("t", "int64"),)),
    ),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)


Row = tuple[int | None, str | None, int | None]


def hash_of(row: Row) -> int:
    return murmur3_int(hash(row[:2]) & 0xFFFFFFFF)


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    names = ["k", "s", "v", HASH_COLUMN]
    types = [pa.int64(), pa.string(), pa.int64(), pa.int32()]
    columns = [pa.array([row[column] for row in rows], types[column]) for column in range(3)]
    columns.append(pa.array([hash_of(row) for row in rows], pa.int32()))
    return pa.record_batch(columns, names=names)


def shuffle(schema: StateSchema, tasks: list[list[pa.RecordBatch]], shards: int) -> list[Received]:
    """Return the rows that each shard receives from map tasks, by Spark's hash partitioning of the route."""
    sent = [batch for task in tasks for batch in ExchangeTask(schema, shards)(iter(task))]
    received: list[list[pa.RecordBatch]] = [[] for _ in range(shards)]
    for batch in sent:
        for index, route in enumerate(batch.column(ROUTE_COLUMN).to_pylist()):
            received[murmur3_int(route) % shards].append(batch.slice(index, 1))
    return [unpack(batches, schema) for batches in received]

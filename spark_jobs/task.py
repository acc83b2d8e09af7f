"""What runs inside Spark's tasks on the reduce side, and the streaming plan round it.

Both sides are ``mapInArrow`` functions round a ``repartition(N, route)``, so the fleet's operator is a part of an ordinary
streaming plan. Partition p is shard p, and it is the partition where Spark's own aggregation would put the same keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from coordinator.errors import InvalidRequestError
from coordinator.model import StateMetadata, TaskIdentity
from spark_jobs.exchange import EXCHANGE_SCHEMA, ROUTE_COLUMN, SHARD, ExchangeTask, unpack
from spark_jobs.operator import ReduceTask, RoutedOperator, TaskMaker
from spark_jobs.worker import FleetAddress, executor_name, fleet_client
from store_actors.schema import StateSchema

__all__ = ["StateTask", "route_plan"]


@dataclass(frozen=True, slots=True)
class StateTask:
    """Reduce side: sends partition p's rows to shard p's store actor and yields what comes back."""

    schema: StateSchema
    metadata: StateMetadata
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows, seen = unpack(batches, self.schema)
        task = task_identity(self.metadata, seen.pop(SHARD, None))
        emitted = fleet_client(self.address).apply(task, self.metadata, self.schema, rows, seen)
        # The numbers of rows are the shard's own affair.
        emitted = emitted.drop_columns([name for name in emitted.column_names if name.startswith("__")])
        yield from emitted.to_batches(max_chunksize=1 << 16)


def task_identity(metadata: StateMetadata, shard: int | None) -> TaskIdentity:
    """Who this Spark task is.

    Parameters
    ----------
    shard
        Which shard it has; None if nothing came that tells. Then no shard has any rows, and it is enough that each task has another
        one: their partitions are successive numbers, though not always from 0 (:data:`~spark_jobs.exchange.SHARD`).

    Raises
    ------
    InvalidRequestError
        The DataFrame runs outside a streaming query.
    """
    context = TaskContext.get()
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    if context is None or batch is None:
        raise InvalidRequestError(
            "a stateful DataFrame of the fleet runs only inside a streaming query; start it with writeStream",
            state=metadata.state_name,
        )
    return TaskIdentity(
        state_name=metadata.state_name,
        query_id=context.getLocalProperty("sql.streaming.queryId") or "",
        # StreamExecution names its job group after the run.
        run_id=context.getLocalProperty("spark.jobGroup.id") or "",
        batch_id=int(batch),
        partition_id=context.partitionId() % metadata.num_shards if shard is None else shard,
        attempt=context.attemptNumber(),
        executor=executor_name(),
    )


def route_plan(operator: RoutedOperator, metadata: StateMetadata, address: FleetAddress) -> DataFrame:
    """The streaming DataFrame in which an operator's state lives in the fleet."""
    schema, num_shards = operator.schema, metadata.num_shards
    kind = from_arrow_schema(EXCHANGE_SCHEMA)
    parts: list[DataFrame] = []
    source = 0
    for number, branches in enumerate(operator.branches):
        for branch in branches:
            marked = None if branch.delay_ms is None else (source, branch.delay_ms)
            source += marked is not None
            parts.append(branch.frame.mapInArrow(ExchangeTask(schema, num_shards, marked, number), kind))
    # The name of the column tells operators that this one feeds whom they follow.
    route = operator.upstream.route_column()
    chunks = reduce(DataFrame.unionAll, parts).withColumnRenamed(ROUTE_COLUMN, route)
    shuffled = chunks.repartition(num_shards, F.col(f"`{route}`")).drop(F.col(f"`{route}`"))
    task: ReduceTask = StateTask(schema, metadata, address)
    if isinstance(operator.plan, TaskMaker):
        task = operator.plan.reduce_task(schema, metadata, address)
    return operator.plan.finish(shuffled.mapInArrow(task, operator.plan.row_type()))

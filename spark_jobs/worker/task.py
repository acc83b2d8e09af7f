"""What runs inside Spark's tasks on the reduce side: partition p's rows go to shard p."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext

from coordinator.errors import InvalidRequestError
from coordinator.model import StateMetadata, TaskIdentity
from spark_jobs.worker.exchange import unpack
from spark_jobs.worker.fleet_client import FleetAddress, executor_name, fleet_client
from store_actors.schema import StateSchema

__all__ = ["StateTask", "task_identity"]


@dataclass(frozen=True, slots=True)
class StateTask:
    """Reduce side: sends partition p's rows to shard p's store actor and yields what comes back."""

    schema: StateSchema
    metadata: StateMetadata
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        received = unpack(batches, self.schema)
        task = task_identity(self.metadata, received.shard)
        emitted = fleet_client(self.address).apply(
            task, self.metadata, self.schema, received.rows, received.watermarks_ms
        )
        # The numbers of rows are the shard's own affair.
        emitted = emitted.drop_columns([name for name in emitted.column_names if name.startswith("__")])
        yield from emitted.to_batches(max_chunksize=1 << 16)


def task_identity(metadata: StateMetadata, shard: int | None) -> TaskIdentity:
    """Who this Spark task is.

    Parameters
    ----------
    shard
        Which shard it has; None if nothing came that tells. Then no shard has any rows, and it is enough that each task has another
        one: their partitions are successive numbers, though not always from 0 (:class:`~spark_jobs.worker.exchange.Received`).

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

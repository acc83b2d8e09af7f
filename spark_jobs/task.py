"""What runs inside Spark's tasks: the map side that combines, the reduce side that hands a shard its rows.

Both are ``mapInArrow`` functions round a ``repartition(N, route)``, so the fleet's operator is a part of an ordinary
streaming plan. With a watermark the map side also tells every shard the largest event time that it saw, as a marker
row through the shuffle itself: a shuffle is a barrier, so every shard knows the watermark that includes this batch, the same
one on every shard and on every retry, with nobody to ask who could have died meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from coordinator.errors import InvalidRequestError
from coordinator.model import StateMetadata, TaskIdentity
from spark_jobs.plan import EVENT_TIME_COLUMN, AggregatePlan
from spark_jobs.routing import marker_routes
from spark_jobs.worker import FleetAddress, executor_name, fleet_client, settle_worker
from store_actors.schema import StateSchema

if TYPE_CHECKING:
    from store_actors.table import GroupTable

__all__ = ["CombineTask", "StateTask", "route_plan"]

ROUTE_COLUMN = "__route"
MAX_EVENT_COLUMN = "__max_event_ms"


@cache
def _table_class() -> type[GroupTable]:
    # The engine's compiled code is loaded once, by the worker that combines; the reduce side never needs it.
    from store_actors.table import GroupTable

    settle_worker()
    return GroupTable


@dataclass(frozen=True, slots=True)
class CombineTask:
    """Map side: one row a group and task, and the marker rows."""

    schema: StateSchema
    num_shards: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = _table_class()(self.schema, merge=False)
        max_event_ms: int | None = None
        for batch in batches:
            if batch.num_rows:
                largest = pc.max(batch.column(EVENT_TIME_COLUMN)).as_py()
                if largest is not None:
                    max_event_ms = largest if max_event_ms is None else max(max_event_ms, largest)
                table.accumulate(table.encode(batch), 1)
        yield from self._with_route(table.decode(table.rows[table.live()]))
        if max_event_ms is not None:
            yield self._markers(max_event_ms)

    def _with_route(self, rows: pa.Table) -> list[pa.RecordBatch]:
        size = rows.num_rows
        columns = [pa.nulls(size, pa.int32()), pa.nulls(size, pa.int64()), *rows.columns]
        batches: list[pa.RecordBatch] = pa.table(columns, schema=self.output_schema()).to_batches()
        return batches

    def _markers(self, max_event_ms: int) -> pa.RecordBatch:
        schema = self.output_schema()
        size = self.num_shards
        columns = [
            pa.array(marker_routes(size), pa.int32()),
            pa.array([max_event_ms] * size, pa.int64()),
            *(pa.nulls(size, field.type) for field in list(schema)[2:]),
        ]
        return pa.record_batch(columns, schema=schema)

    def output_schema(self) -> pa.Schema:
        """Route, largest event time, then ``row_schema`` with every column nullable (marker rows are null there)."""
        routed = [pa.field(ROUTE_COLUMN, pa.int32()), pa.field(MAX_EVENT_COLUMN, pa.int64())]
        return pa.schema([*routed, *(field.with_nullable(True) for field in self.schema.row_schema())])


@dataclass(frozen=True, slots=True)
class StateTask:
    """Reduce side: sends partition p's rows to shard p's store actor and yields what comes back."""

    schema: StateSchema
    metadata: StateMetadata
    address: FleetAddress

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Told apart by name: Spark sends a partition without rows as no batch at all.
        rows, max_event_ms = self._collect(list(batches))
        task = task_identity(self.metadata.state_name)
        metadata = replace(self.metadata, query_id=task.query_id)
        emitted = fleet_client(self.address).apply(task, metadata, self.schema, rows, max_event_ms)
        yield from emitted.to_batches(max_chunksize=1 << 16)

    def _collect(self, batches: list[pa.RecordBatch]) -> tuple[pa.Table, int | None]:
        expected = self.schema.row_schema() if self.schema.combined else self.schema.raw_schema()
        if not batches:
            return expected.empty_table(), None
        table = pa.Table.from_batches(batches)
        if not self.schema.combined:
            return table, None
        event_times = table.column(MAX_EVENT_COLUMN)
        max_event_ms: int | None = pc.max(event_times).as_py()
        rows = table.filter(pc.is_null(event_times)).drop_columns([MAX_EVENT_COLUMN])
        return rows, max_event_ms


def task_identity(state_name: str) -> TaskIdentity:
    """Who this Spark task is.

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
            state=state_name,
        )
    return TaskIdentity(
        state_name=state_name,
        query_id=context.getLocalProperty("sql.streaming.queryId") or "",
        # StreamExecution names its job group after the run.
        run_id=context.getLocalProperty("spark.jobGroup.id") or "",
        batch_id=int(batch),
        partition_id=context.partitionId(),
        attempt=context.attemptNumber(),
        executor=executor_name(),
    )


def route_plan(plan: AggregatePlan, metadata: StateMetadata, address: FleetAddress) -> DataFrame:
    """The streaming DataFrame in which a plan's groups live in the fleet."""
    schema, num_shards = plan.schema, metadata.num_shards
    rows = plan.prepared
    if schema.combined:
        combine = CombineTask(schema, num_shards)
        extra = [StructField(ROUTE_COLUMN, IntegerType()), StructField(MAX_EVENT_COLUMN, LongType())]
        nullable = [StructField(field.name, field.dataType) for field in plan.row_type()]
        rows = rows.mapInArrow(combine, StructType([*extra, *nullable]))
    keys = [F.col(field.name) for field in schema.keys]
    by_key = F.hash(*keys) if keys else F.lit(0)
    route = F.coalesce(F.col(ROUTE_COLUMN), by_key) if schema.combined else by_key
    shuffled = rows.withColumn(ROUTE_COLUMN, route).repartition(num_shards, ROUTE_COLUMN).drop(ROUTE_COLUMN)
    return plan.finish(shuffled.mapInArrow(StateTask(schema, metadata, address), plan.row_type()))

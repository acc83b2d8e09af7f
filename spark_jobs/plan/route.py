"""The streaming plan around an operator's tasks.

Both sides are ``mapInArrow`` nodes around a ``repartition(N, route)``, so the fleet's operator is a part of an ordinary streaming plan.
Partition p is shard p, and it is the partition where Spark's own aggregation would put the same keys. Spark's planner replaces the
nodes below the exchange, and all but a user's function above it (``ExchangeStrategy.java``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import SetupError
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.plan.logical import quoted
from spark_jobs.plan.operator_plan import ReduceTask, RoutedOperator, SparksOwn, TaskMaker
from spark_jobs.plan.stateful_exchange import marked_as_aggregation, with_event_time, with_sparks_own
from spark_jobs.worker.exchange import END_COLUMN, HASH_COLUMN
from store_actors.client.fleet_client import FleetAddress
from store_actors.client.operator_task import OperatorTask

__all__ = ["requested_state", "route_plan"]

#: By the name of an operator's route column, the state as the program asks for it.
_REQUESTED: dict[str, StateMetadata] = {}


def requested_state(route: str, query_mode: str | None) -> StateMetadata:
    """Return the state that an operator of a plan asks for.

    Parameters
    ----------
    route
        Name of its route column.
    query_mode
        The query's output mode, for an operator that has no mode of its own.
    """
    requested = _REQUESTED[route]
    if query_mode is None or requested.schema is None:
        return requested
    return requested.in_output_mode(requested.schema.in_output_mode(query_mode))


def route_plan(operator: RoutedOperator, metadata: StateMetadata, address: FleetAddress) -> DataFrame:
    """Return the streaming DataFrame of an operator's results, with its state in the fleet."""
    schema, plan = operator.schema, operator.plan
    # Operators that this one feeds find its facts by the name of the column.
    route = operator.upstream.route_column(plan.inputs[0].sparkSession, OperatorTask(schema, metadata))
    _REQUESTED[route] = metadata
    task: ReduceTask = _replaced
    columns = [T.StructField(route, T.IntegerType())]
    if isinstance(plan, TaskMaker):
        task = plan.reduce_task(schema, metadata, address)
        (rows,) = plan.inputs
        values = [T.StructField(item.name, item.dataType) for item in rows.schema if item.name != HASH_COLUMN]
        columns = [*values, T.StructField(END_COLUMN, T.BinaryType()), *columns]
    kind = T.StructType(columns)
    shuffled = reduce(DataFrame.unionAll, (rows.mapInArrow(_replaced, kind) for rows in plan.inputs))
    is_marked = operator.upstream.mode in (None, "complete")
    if is_marked and "append" in operator.upstream.modes:
        shuffled = with_event_time(shuffled, route)
    exchange = shuffled.repartition(metadata.num_shards, F.col(quoted(route)))
    if is_marked:
        exchange = marked_as_aggregation(exchange)
    results = plan.finish(exchange.mapInArrow(task, plan.row_type()))
    return with_sparks_own(results, plan.analysed) if isinstance(plan, SparksOwn) else results


def _replaced(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    raise SetupError(
        "a stateful DataFrame of the fleet runs only in a session that the fleet knows; call fleet.stateful, or spark_jobs.connect, "
        "with this session before the query is started"
    )

"""The streaming plan around an operator's tasks.

Both sides are ``mapInArrow`` functions around a ``repartition(N, route)``, so the fleet's operator is a part of an ordinary
streaming plan. Partition p is shard p, and it is the partition where Spark's own aggregation would put the same keys.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from coordinator.model.state_metadata import StateMetadata
from spark_jobs.plan.logical import quoted
from spark_jobs.plan.operator_plan import ReduceTask, RoutedOperator, SparksOwn, TaskMaker
from spark_jobs.plan.stateful_exchange import marked_as_aggregation, with_event_time, with_sparks_own
from spark_jobs.worker.exchange import EXCHANGE_SCHEMA, ROUTE_COLUMN, ExchangeTask
from spark_jobs.worker.fleet_client import FleetAddress
from spark_jobs.worker.task import StateTask, in_output_mode

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
    return in_output_mode(requested, requested.schema.in_output_mode(query_mode))


def route_plan(operator: RoutedOperator, metadata: StateMetadata, address: FleetAddress) -> DataFrame:
    """Return the streaming DataFrame of an operator's results, with its state in the fleet."""
    schema, num_shards = operator.schema, metadata.num_shards
    kind = from_arrow_schema(EXCHANGE_SCHEMA)
    inputs = [
        rows.mapInArrow(ExchangeTask(schema, num_shards, number, metadata.state_name), kind)
        for number, rows in enumerate(operator.plan.inputs)
    ]
    # Operators that this one feeds find its facts by the name of the column.
    route = operator.upstream.route_column(inputs[0].sparkSession, metadata)
    _REQUESTED[route] = metadata
    chunks = reduce(DataFrame.unionAll, inputs).withColumnRenamed(ROUTE_COLUMN, route)
    is_marked = operator.upstream.mode in (None, "complete")
    if is_marked and "append" in operator.upstream.modes:
        chunks = with_event_time(chunks)
    exchange = chunks.repartition(num_shards, F.col(quoted(route)))
    if is_marked:
        exchange = marked_as_aggregation(exchange)
    shuffled = exchange.drop(F.col(quoted(route)))
    task: ReduceTask = StateTask(schema, metadata, address)
    if isinstance(operator.plan, TaskMaker):
        task = operator.plan.reduce_task(schema, metadata, address)
    results = operator.plan.finish(shuffled.mapInArrow(task, operator.plan.row_type()))
    return with_sparks_own(results, operator.plan.analysed) if isinstance(operator.plan, SparksOwn) else results

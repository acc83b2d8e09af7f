"""The streaming plan around an operator's tasks.

An exchange gives the rows of an operator's inputs to its shards, and the tasks above it hand them over to store actors; or a user's
function above it gets them, in Python workers. Both are nodes of ours in Spark's plan (``spark_jobs/jvm/common/Operators.scala``).
Partition p is shard p, and it is the partition where Spark's own aggregation would put the same keys.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from coordinator.model.state_metadata import StateMetadata
from spark_jobs.plan.catalyst import WATERMARK_KEY
from spark_jobs.plan.operator_plan import RoutedOperator, SparksOwn, TaskMaker
from spark_jobs.plan.stateful_exchange import exchanged, handed_over, marked_as_aggregation, with_sparks_own
from spark_jobs.worker.exchange import END_COLUMN, HASH_COLUMN
from store_actors.client.fleet_client import FleetAddress
from store_actors.client.operator_task import OperatorTask

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
    schema, plan, upstream = operator.schema, operator.plan, operator.upstream
    task = OperatorTask(schema, metadata).to_json()
    facts = upstream.to_json()
    route = upstream.route_column(task)
    _REQUESTED[route] = metadata
    is_marked = upstream.mode in (None, "complete")
    # Spark's checks look for the event time of groups, as append mode asks for.
    marks = {WATERMARK_KEY: 0} if is_marked and "append" in upstream.modes else None
    columns = [T.StructField(route, T.IntegerType(), metadata=marks)]
    if isinstance(plan, TaskMaker):
        (rows,) = plan.inputs
        values = [T.StructField(item.name, item.dataType) for item in rows.schema if item.name != HASH_COLUMN]
        columns = [*values, T.StructField(END_COLUMN, T.BinaryType()), *columns]
    rows = exchanged(plan.inputs, T.StructType(columns), metadata.num_shards, facts)
    if is_marked:
        rows = marked_as_aggregation(rows)
    if isinstance(plan, TaskMaker):
        emitted = rows.mapInArrow(plan.reduce_task(schema, metadata, address), plan.row_type())
    else:
        emitted = handed_over(rows, plan.row_type(), task)
    results = plan.finish(emitted)
    return with_sparks_own(results, plan.analysed) if isinstance(plan, SparksOwn) else results

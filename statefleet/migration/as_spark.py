"""A query of the fleet, rebuilt with Spark's own aggregations.

Spark's state of a group depends on the plan above the aggregation: the optimiser merges a select into it, so the buffers are in the
order of the select (``CollapseProject``), and unused aggregates have no buffer (``ColumnPruning``). So the whole query is rebuilt with
plain aggregations, and Spark's optimiser decides what it would run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spark_jobs.plan.event_time import operators_of, state_of_task
from spark_jobs.plan.logical import Plan


def aggregations_as_run(plan: Plan, spark_plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Return each aggregation of a query as Spark would run it.

    Parameters
    ----------
    spark_plans
        Spark's own plan of each aggregation of the fleet in the query, as analysed, by the name of the state.

    Returns
    -------
    dict
        Aggregations by the name of the state; empty if Spark would not run one for each.
    """
    names = [operator.state for operator in operators_of(plan) if operator.state in spark_plans]
    run = _as_spark(plan, spark_plans).optimised()
    aggregations = [node for node in _all_of(run) if node.kind == "Aggregate" and node.is_streaming]
    return dict(zip(names, aggregations, strict=True)) if len(names) == len(aggregations) else {}


def _as_spark(node: Plan, spark_plans: Mapping[str, Plan]) -> Plan:
    state = _aggregation_at(node, spark_plans)
    if state is not None:
        spark = spark_plans[state].with_children([_as_spark(spark_plans[state].child, spark_plans)])
        # Under the ids by which the plan above refers to the columns.
        return spark.project(column.named_as(output) for column, output in zip(spark.output, node.output, strict=True))
    children = node.children
    return node.with_children([_as_spark(child, spark_plans) for child in children]) if children else node


def _aggregation_at(node: Plan, spark_plans: Mapping[str, Plan]) -> str | None:
    """Return the state of the aggregation whose result a node is: of the nodes with its columns, the one nearest to its task."""
    path = [node]
    while (state := state_of_task(path[-1])) is None:
        if len(path[-1].children) != 1:
            return None
        path.append(path[-1].child)
    if state not in spark_plans:
        return None
    columns = [column.name for column in spark_plans[state].output]
    results = [step for step in path if [column.name for column in step.output] == columns]
    return state if results and results[-1] is node else None


def _all_of(node: Plan) -> Iterator[Plan]:
    yield node
    for child in node.children:
        yield from _all_of(child)

"""A query of the fleet as it would be with Spark's own aggregations.

What Spark keeps of a group depends on what is above the aggregation: the optimiser makes one of it and a select on it, so the buffers
are in the order in which the select names them (``CollapseProject``), and of what nothing uses there is none (``ColumnPruning``). So
the whole query is put together with plain aggregations, and Spark's own optimiser says what it would run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spark_jobs.plan.event_time import operators_of, state_of_task
from spark_jobs.plan.logical import Plan

__all__ = ["aggregations_as_run"]


def aggregations_as_run(plan: Plan, own: Mapping[str, Plan]) -> dict[str, Plan]:
    """Each aggregation of a query as Spark would run it.

    Parameters
    ----------
    plan
        The query, as analysed.
    own
        By the name of the state of each aggregation of the fleet in it: Spark's own, as analysed.

    Returns
    -------
    dict
        By the name of the state; empty if Spark would not run an aggregation for each.
    """
    names = [one.state for one in operators_of(plan) if one.state in own]
    run = _as_spark(plan, own).optimised()
    found = [node for node in _all_of(run) if node.kind == "Aggregate" and node.is_streaming]
    return dict(zip(names, found, strict=True)) if len(names) == len(found) else {}


def _as_spark(node: Plan, own: Mapping[str, Plan]) -> Plan:
    state = _aggregation_at(node, own)
    if state is not None:
        spark = own[state].with_children([_as_spark(own[state].child, own)])
        # Under the ids by which what is above knows its columns.
        return spark.project(column.named_as(wanted) for column, wanted in zip(spark.output, node.output, strict=True))
    children = node.children
    return node.with_children([_as_spark(one, own) for one in children]) if children else node


def _aggregation_at(node: Plan, own: Mapping[str, Plan]) -> str | None:
    """State of the aggregation whose result a node is: of those that have its columns, the next one to its task."""
    path = [node]
    while (state := state_of_task(path[-1])) is None:
        if len(path[-1].children) != 1:
            return None
        path.append(path[-1].child)
    if state not in own:
        return None
    columns = [one.name for one in own[state].output]
    results = [one for one in path if [column.name for column in one.output] == columns]
    return state if results and results[-1] is node else None


def _all_of(node: Plan) -> Iterator[Plan]:
    yield node
    for child in node.children:
        yield from _all_of(child)

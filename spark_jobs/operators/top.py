"""``topN`` and ``keepLast``, which plain Spark streaming cannot do, as the fleet runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from coordinator.model.nested_types import is_nested
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.event_time import event_time, event_time_column
from spark_jobs.plan.keys import key_of, leaf_field
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.plan.operator_plan import check_output_mode
from spark_jobs.plan.row_columns import ProjectedPlan, Result, RowColumns
from spark_jobs.plan.view_components import ViewComponent, column
from spark_jobs.worker.exchange import HASH_COLUMN
from store_actors.operators.top_schema import RANK_COLUMN, top_schema

__all__ = ["build_top"]

ColumnLike = str | Column


def build_top(
    df: DataFrame,
    n: int,
    partition_by: Sequence[ColumnLike],
    order_by: Sequence[ColumnLike],
    output_mode: str,
    *,
    ties: str = "first",
    rank: bool = True,
) -> ProjectedPlan:
    """Plan of the first `n` rows of each partition.

    Raises
    ------
    InvalidRequestError
        There is nothing to order by, the output mode is not one of these, or a column's type is not held by state.
    pyspark.errors.AnalysisException
        An unknown column.
    """
    check_output_mode("topN" if rank else "keepLast", output_mode, ("update",))
    if not order_by:
        raise InvalidRequestError("name at least one column to order by")
    expressions, child = _partition(df, partition_by)
    keys = [key_of(expression, f"k{place}") for place, expression in enumerate(expressions)]
    attributes = analysed(df).output
    rows = RowColumns.stored(attributes, keys, "c")
    fields, columns, order = _order(df, order_by, attributes, rows)
    leaves = [one.alias(leaf.name) for key in keys for leaf, one in zip(key.leaves, key.columns, strict=True)]
    delay_ms, time = event_time(attributes)
    hashed = [one for key in keys for one in key.columns]
    prepared = child.frame().select(
        *leaves,
        *rows.selected,
        *columns,
        *event_time_column(time),
        (F.hash(*hashed) if hashed else F.lit(0)).alias(HASH_COLUMN),
    )
    types = {item.name: item for item in prepared.schema.fields}
    names = [leaf.name for key in keys for leaf in key.leaves]
    shown = ViewComponent.of_keys(keys, attributes)
    rows.add_to_view(shown)
    if rank:
        shown.value(RANK_COLUMN, column(RANK_COLUMN))
    schema = top_schema(
        [leaf_field(types[name]) for name in names],
        rows.fields,
        n,
        order,
        order_columns=[leaf_field(types[name]) for name in fields],
        ties=ties,
        rank=rank,
        expiry=next((key.expiry for key in keys if key.expiry is not None), None),
        delay_ms=delay_ms,
    )
    schema = replace(schema, shown={"": shown.to_json()})
    emitted = [types[name] for name in (*names, *(field.name for field in rows.fields))]
    results = rows.results
    if rank:
        emitted.append(T.StructField(RANK_COLUMN, T.IntegerType()))
        results = (*results, Result(F.col(RANK_COLUMN), _rank(df)))
    return ProjectedPlan((prepared,), schema, T.StructType(emitted), results, appends=False)


def _rank(df: DataFrame) -> Expression:
    """A column that no other plan has."""
    return analysed(df.select(F.lit(1).cast("int").alias(RANK_COLUMN))).output[0].nullable_attribute()


def _partition(df: DataFrame, partition_by: Sequence[ColumnLike]) -> tuple[list[Expression], Plan]:
    """What rows are partitioned by, and the plan that has it: Spark makes windows of time below a grouping."""
    if not partition_by:
        return [], analysed(df)
    node = analysed(df.groupBy(*partition_by).agg(F.count(F.lit(1))))
    expressions = node.grouping
    if any(expression.is_session for expression in expressions):
        raise InvalidRequestError(
            "rows are not partitioned by session windows, which change as rows come; use F.window"
        )
    return expressions, node.child


def _order(
    df: DataFrame, order_by: Sequence[ColumnLike], attributes: Sequence[Expression], rows: RowColumns
) -> tuple[list[str], list[Column], list[dict[str, Any]]]:
    """Names and columns of what is ordered by and is no column of the row, and the order (``store_actors.engine.ordering``)."""
    node = analysed(df.orderBy(*order_by))
    while node.kind != "Sort":
        node = node.child
    names: list[str] = []
    columns: list[Column] = []
    order: list[dict[str, Any]] = []
    for place, item in enumerate(node.sorting):
        key = key_of(item.expression, f"o{place}", normalised=False)
        if len(key.leaves) != 1 or is_nested(key.leaves[0].type):
            raise InvalidRequestError(
                "rows are ordered by simple columns; name the fields of a struct, or the elements of an array",
                column=item.sql,
            )
        own = (leaf for one, leaf in zip(attributes, rows.leaves, strict=True) if one.matches(item.expression))
        name = next(own, None)
        if name is None:
            name = key.leaves[0].name
            names.append(name)
            columns.append(key.columns[0].alias(name))
        order.append({"column": name, "descending": item.descending, "nulls_first": item.nulls_first})
    return names, columns, order

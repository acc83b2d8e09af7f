"""Plans of ``topN`` and ``keepLast``, which plain Spark streaming does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.type_names import is_nested
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.event_time import watermark_delay_ms
from spark_jobs.plan.keys import key_of, leaf_field
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.plan.operator_plan import check_output_mode
from spark_jobs.plan.row_columns import ProjectedPlan, Result, RowColumns
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.view_components import ViewComponent, column
from spark_jobs.worker.exchange import HASH_COLUMN
from store_actors.operators.top_schema import RANK_COLUMN, top_schema

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
    """Plan the first `n` rows of each partition.

    Raises
    ------
    InvalidRequestError
        There is no column to order by, the output mode is not supported, or state cannot store a column's type.
    pyspark.errors.AnalysisException
        An unknown column.
    """
    check_output_mode("topN" if rank else "keepLast", output_mode, ("update",))
    if not order_by:
        raise RefusedQueryError("name at least one column to order by")
    expressions, child = _partition(df, partition_by)
    keys = [key_of(expression, f"k{index}") for index, expression in enumerate(expressions)]
    attributes = analysed(df).output
    rows = RowColumns.stored(attributes, keys, "c")
    fields, columns, order = _order(df, order_by, attributes, rows)
    leaves = [value.alias(leaf.name) for key in keys for leaf, value in zip(key.leaves, key.columns, strict=True)]
    delay_ms = watermark_delay_ms(attributes)
    hashed = [value for key in keys for value in key.columns]
    prepared = child.frame().select(
        *leaves,
        *rows.selected,
        *columns,
        (F.hash(*hashed) if hashed else F.lit(0)).alias(HASH_COLUMN),
    )
    types = {item.name: item for item in prepared.schema.fields}
    names = [leaf.name for key in keys for leaf in key.leaves]
    component = ViewComponent.of_keys(keys, attributes)
    rows.add_to_view(component)
    if rank:
        component.value(RANK_COLUMN, column(RANK_COLUMN))
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
    schema = structs.replace(schema, shown={"": component.to_json()})
    emitted = [types[name] for name in (*names, *(field.name for field in rows.fields))]
    results = rows.results
    if rank:
        emitted.append(T.StructField(RANK_COLUMN, T.IntegerType()))
        results = (*results, Result(F.col(RANK_COLUMN), _rank(df)))
    return ProjectedPlan((prepared,), schema, T.StructType(emitted), results, appends=False)


def _rank(df: DataFrame) -> Expression:
    """Return a column for the rank with an id of its own."""
    return analysed(df.select(F.lit(1).cast("int").alias(RANK_COLUMN))).output[0].nullable_attribute()


def _partition(df: DataFrame, partition_by: Sequence[ColumnLike]) -> tuple[list[Expression], Plan]:
    """Return the partitioning expressions, and the plan that has their columns: Spark computes time windows below a grouping."""
    if not partition_by:
        return [], analysed(df)
    node = analysed(df.groupBy(*partition_by).agg(F.count(F.lit(1))))
    expressions = node.grouping
    if any(expression.is_session for expression in expressions):
        raise RefusedQueryError("rows are not partitioned by session windows, which change as rows come; use F.window")
    return expressions, node.child


def _order(
    df: DataFrame, order_by: Sequence[ColumnLike], attributes: Sequence[Expression], rows: RowColumns
) -> tuple[list[str], list[Column], list[dict[str, Any]]]:
    """Return names and columns of ordering expressions that the row lacks, and the order (``store_actors.engine.ordering``)."""
    node = analysed(df.orderBy(*order_by))
    while node.kind != "Sort":
        node = node.child
    names: list[str] = []
    columns: list[Column] = []
    order: list[dict[str, Any]] = []
    for index, item in enumerate(node.sorting):
        key = key_of(item.expression, f"o{index}", normalised=False)
        if len(key.leaves) != 1 or is_nested(key.leaves[0].type):
            raise RefusedQueryError(
                "rows are ordered by simple columns; name the fields of a struct, or the elements of an array",
                column=item.sql,
            )
        equal = (
            leaf for attribute, leaf in zip(attributes, rows.leaves, strict=True) if attribute.matches(item.expression)
        )
        name = next(equal, None)
        if name is None:
            name = key.leaves[0].name
            names.append(name)
            columns.append(key.columns[0].alias(name))
        order.append({"column": name, "descending": item.descending, "nulls_first": item.nulls_first})
    return names, columns, order

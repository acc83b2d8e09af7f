"""Operators that keep rows: ``dropDuplicates``, ``dropDuplicatesWithinWatermark`` and ``limit``; ``topN`` and ``keepLast``, which plain
Spark streaming does not have. From Spark's analysis to plans of the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.type_names import is_nested
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.event_time import event_time, late_column, several_event_times, watermark_delay_ms, watermark_time
from spark_jobs.plan.keys import Key, key_of, leaf_field
from spark_jobs.plan.logical import Plan, analysed
from spark_jobs.plan.operator_plan import check_output_mode
from spark_jobs.plan.row_columns import ProjectedPlan, Result, RowColumns
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.storable import is_changed
from spark_jobs.plan.view_components import ViewComponent, column
from spark_jobs.worker.exchange import HASH_COLUMN
from store_actors.operators.top_schema import RANK_COLUMN, top_schema

_EXPIRES = Field("expires", "timestamp")
#: The time by which a row is late, where the watermark column is not a key.
_LATE = Field("late", "timestamp")
_COUNT = Field("count", "int64")
ColumnLike = str | Column


def build_deduplicate(marked: DataFrame, output_mode: str, *, within_watermark: bool) -> ProjectedPlan:
    """Plan Spark's ``df.dropDuplicates(..)``, or of ``df.dropDuplicatesWithinWatermark(..)``.

    Raises
    ------
    InvalidRequestError
        There are no columns, or no watermark to be within; the output mode is complete; or state cannot store a key's type.
    """
    name = "dropDuplicatesWithinWatermark" if within_watermark else "dropDuplicates"
    check_output_mode(name, output_mode, ("append", "update"))
    node = analysed(marked)
    if not node.keys:
        raise RefusedQueryError(
            f"{name} of no columns is nothing that Spark runs on a stream; leave the columns out for all of them, or use limit(1) for "
            "the first row"
        )
    attributes = node.child.output
    timed, several = attributes, several_event_times(attributes, marked.sparkSession)
    of_keys = [key for key in node.keys if key.watermark_delay_ms is not None]
    if several and len(of_keys) == 1 and not within_watermark:
        # Spark leaves out what nothing reads after it. So where it runs the query, the key's is the only event time.
        timed, several = of_keys, None
    if several:
        raise RefusedQueryError(several)
    delay_ms, time = watermark_delay_ms(timed), event_time(timed)
    if within_watermark and (delay_ms is None or time is None):
        raise RefusedQueryError(
            "dropDuplicatesWithinWatermark needs a watermark; call withWatermark on the event-time column first"
        )
    normalised = SPARK.NORMALISES_DUPLICATES
    keys = [key_of(expression, f"k{index}", normalised=normalised) for index, expression in enumerate(node.keys)]
    leaves = [value.alias(leaf.name) for key in keys for leaf, value in zip(key.leaves, key.columns, strict=True)]
    # A row is emitted as it came.
    restoring = [key for key in keys if not (normalised and is_changed(key.expression.type, normalised=True))]
    rows = RowColumns.passing(attributes, restoring)
    selected = [*leaves, *rows.selected]
    expiry = next((key.expiry for key in keys if key.expiry is not None), None)
    if within_watermark:
        assert time is not None
        assert delay_ms is not None
        expiry = _EXPIRES.name
        # A row that would expire after the largest possible time never expires.
        ends = F.coalesce(F.try_add(F.unix_micros(time), F.lit(delay_ms * 1000).cast("long")), F.lit(2**63 - 1))
        selected.append(F.when(time.isNotNull(), F.timestamp_micros(ends)).alias(expiry))
    late = None if within_watermark else _late_by(timed, keys)
    if late is not None:
        selected.append(watermark_time(late).alias(_LATE.name))
    hashed = F.hash(*(value for key in keys for value in key.columns)).alias(HASH_COLUMN)
    prepared = node.child.frame().select(*selected, hashed)
    types = {item.name: item for item in prepared.schema.fields}
    component = ViewComponent.of_keys(keys, attributes)
    if within_watermark:
        component.extra(_EXPIRES.name, column(_EXPIRES.name))
    names_of_keys = [leaf.name for key in keys for leaf in key.leaves]
    schema = StateSchema(
        keys=tuple(leaf_field(types[name]) for name in names_of_keys),
        inputs=(*rows.fields, *([_EXPIRES] if within_watermark else []), *([] if late is None else [_LATE])),
        accumulators=(Accumulator(AccumulatorKind.VALUE, (), (_EXPIRES,)),) if within_watermark else (),
        expiry_key=expiry,
        delay_ms=delay_ms,
        output_mode="append",
        operator=OperatorKind.DEDUPLICATE,
        options=_options(delay_ms if within_watermark else None, late),
        shown={"": component.to_json()},
    )
    emitted = T.StructType([types[name] for name in (*names_of_keys, *(field.name for field in rows.fields))])
    late_columns = {}
    if late is not None and not any(key.expression.matches(late) for key in keys):
        late_columns[_LATE.name] = (f"c{attributes.index(late)}",)
    return ProjectedPlan(
        inputs=(prepared,),
        schema=schema,
        emitted=emitted,
        late_columns=late_columns,
        # Since Spark 4.3 all of a stream's columns may be null behind an operator.
        results=tuple(replace(result, attribute=own) for result, own in zip(rows.results, node.output, strict=True)),
        keys=tuple(keys),
    )


def _late_by(attributes: Sequence[Expression], keys: Sequence[Key]) -> Expression | None:
    """Return the input column by which rows are late, unless it is a key: as Spark, the first with a watermark."""
    late = late_column(attributes)
    first_key = next((key for key in keys if key.expiry is not None), None)
    is_key = late is None or (first_key is not None and first_key.expression.matches(late))
    return None if is_key else late


def _options(within_ms: int | None, late: Expression | None) -> dict[str, Any]:
    options: dict[str, Any] = {} if within_ms is None else {"late_us": within_ms * 1000}
    return options if late is None else {**options, "late": _LATE.name}


def build_limit(df: DataFrame, count: int, output_mode: str) -> ProjectedPlan:
    """Plan ``df.limit(count)``.

    Raises
    ------
    InvalidRequestError
        The output mode is not append, as in Spark.
    pyspark.errors.AnalysisException
        The count is negative.
    """
    check_output_mode("limit", output_mode, ("append",))
    attributes = analysed(df.limit(count)).output
    rows = RowColumns.passing(attributes, ())
    prepared = df.select(*rows.selected, F.lit(0).alias(HASH_COLUMN))
    types = {item.name: item for item in prepared.schema.fields}
    component = ViewComponent()
    component.extra(_COUNT.name, column(_COUNT.name))
    schema = StateSchema(
        keys=(),
        inputs=rows.fields,
        accumulators=(Accumulator(AccumulatorKind.VALUE, (), (_COUNT,)),),
        expiry_key=None,
        delay_ms=watermark_delay_ms(attributes),
        output_mode="append",
        operator=OperatorKind.LIMIT,
        options={"n": count},
        shown={"": component.to_json()},
    )
    emitted = T.StructType([types[field.name] for field in rows.fields])
    return ProjectedPlan(inputs=(prepared,), schema=schema, emitted=emitted, results=rows.results)


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
    check_output_mode("keepLast" if ties == "last" else "topN", output_mode, ("update",))
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
    return ProjectedPlan(
        inputs=(prepared,), schema=schema, emitted=T.StructType(emitted), appends=False, results=results
    )


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

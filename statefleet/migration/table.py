"""A state from a table of its keys and values: the columns that the query's results, and readers of live state, show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field, OperatorKind
from spark_jobs.functions.group_plan import GroupStatePlan
from spark_jobs.functions.groups import EXISTS, TIMEOUT
from spark_jobs.operators.aggregate import AggregatePlan
from spark_jobs.plan.aggregate_functions import AggregateExpression
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.keys import Key
from spark_jobs.plan.logical import quoted
from spark_jobs.plan.operator_plan import OperatorPlan
from spark_jobs.plan.row_columns import ProjectedPlan
from spark_jobs.plan.state_types import spark_field
from spark_jobs.plan.storable import stored
from spark_jobs.worker.exchange import HASH_COLUMN
from statefleet.migration.columns import hashed, key_columns, keys_over

__all__ = ["check_keys", "table_rows"]


def _same(value: Column) -> list[Column]:
    return [value]


def _count(value: Column) -> list[Column]:
    return [F.coalesce(value, F.lit(0).cast("long"))]


def _set(value: Column) -> list[Column]:
    return [value, value.isNotNull()]


def _list(value: Column) -> list[Column]:
    return [F.coalesce(value, F.array())]


#: State fields of the functions whose state follows from their result.
_HELD: Mapping[str, Callable[[Column], list[Column]]] = {
    "Count": _count,
    "Sum": _same,
    "Min": _same,
    "Max": _same,
    "Product": _same,
    "BitAndAgg": _same,
    "BitOrAgg": _same,
    "BitXorAgg": _same,
    "First": _set,
    "Last": _set,
    "CollectList": _list,
    "CollectSet": _list,
}


def table_rows(plan: OperatorPlan, table: DataFrame) -> DataFrame:
    """Rows of a table in the columns of an operator's state.

    Raises
    ------
    InvalidRequestError
        The operator, or one of its aggregates, has a state that does not follow from what is shown of it; or the table lacks a column,
        has one of another type, or lacks a key.
    """
    if isinstance(plan, AggregatePlan) and plan.schema.operator is OperatorKind.AGGREGATE:
        return _groups(plan, table)
    if isinstance(plan, GroupStatePlan):
        return _function_state(plan, table)
    if isinstance(plan, ProjectedPlan) and plan.schema.operator is OperatorKind.DEDUPLICATE:
        return _keys_seen(plan, table)
    raise InvalidRequestError(
        "the state of this operator is not made of a table; nothing was written; that of aggregations by keys and windows, of "
        "dropDuplicates and of functions with state is",
        operator=str(plan.schema.operator),
    )


def check_keys(rows: DataFrame, keys: Sequence[Field]) -> None:
    """Refuse rows of which two have the same key.

    Raises
    ------
    InvalidRequestError
        There are such; shows one.
    """
    counted = rows.groupBy(*(one.name for one in keys)).agg(F.count("*").alias(HASH_COLUMN))
    twice = counted.where(F.col(HASH_COLUMN) > 1).drop(HASH_COLUMN).limit(1).collect()
    if twice:
        raise InvalidRequestError(
            "a state has one row for each key, and two rows of the table have the same; nothing was written; group the table by its "
            "keys first",
            key=twice[0].asDict(),
        )


def _groups(plan: AggregatePlan, table: DataFrame) -> DataFrame:
    node = plan.analysed
    shown = [(output.name, output.unaliased) for output in node.aggregates]
    names = [_shown_as(shown, key.expression) for key in plan.keys]
    given = _keyed(table, names, plan.keys)
    leaves = keys_over(given, plan.keys, names)
    selected = key_columns(leaves)
    for number, aggregate in enumerate(plan.uses):
        name = _shown_as(shown, aggregate)
        column = _typed(given, [(name, aggregate.type)])[quoted(name)]
        selected += _state(plan, number, aggregate, column)
    return given.select(*selected, hashed(leaves))


def _state(plan: AggregatePlan, number: int, aggregate: AggregateExpression, value: Column) -> list[Column]:
    function = aggregate.function
    fields = [one for accumulator in plan.accumulators(number) for one in accumulator.state]
    make = _HELD.get(function.kind)
    if make is None:
        raise InvalidRequestError(
            f"what {function.sql_name} holds does not follow from its result, so no table tells it; nothing was written; import the "
            "checkpoint, or have the query hold what it is made of (of an average a sum and a count)",
            aggregate=aggregate.sql,
        )
    columns = make(stored(value, aggregate.type))
    if len(fields) > len(columns):
        # A sum that says by a field of its own that there is no value yet.
        zero = F.lit(0).cast(spark_field(fields[0]).dataType)
        columns = [F.coalesce(columns[0], zero), columns[0].isNull()]
    if function.kind in ("First", "Last") and not function.ignores_nulls and aggregate.where is None:
        # There is a row in each group, and a null is a value.
        columns[1] = F.lit(True)
    return [column.alias(one.name) for column, one in zip(columns, fields, strict=True)]


def _keys_seen(plan: ProjectedPlan, table: DataFrame) -> DataFrame:
    ends = [one.name for one in plan.schema.state_fields]
    names = [key.expression.name for key in plan.keys]
    given = _typed(_keyed(table, names, plan.keys), [(name, T.TimestampType()) for name in ends])
    leaves = keys_over(given, plan.keys, names, normalised=False)
    return given.select(*key_columns(leaves), *(F.col(name) for name in ends), hashed(leaves))


def _function_state(plan: GroupStatePlan, table: DataFrame) -> DataFrame:
    names = [name for name, _ in plan.view.keys]
    given = _typed(_keyed(table, names, plan.keys), [(one.name, one.dataType) for one in plan.state.fields])
    leaves = keys_over(given, plan.keys, names)
    held = [
        F.col(quoted(one.name)).alias(field.name)
        for one, field in zip(plan.state.fields, plan.columns.fields, strict=True)
    ]
    timeout = F.lit(None).cast("long").alias(TIMEOUT.name)
    return given.select(*key_columns(leaves), *held, F.lit(True).alias(EXISTS.name), timeout, hashed(leaves))


def _shown_as(shown: Sequence[tuple[str, Expression]], wanted: Expression) -> str:
    """Name under which the results of a query show an expression as it is."""
    name = next((name for name, one in shown if one.matches(wanted)), None)
    if name is None:
        raise InvalidRequestError(
            "the query shows this only inside of another expression, from which it does not follow; nothing was written; give it a "
            "column of its own in agg",
            expression=wanted.sql,
        )
    return name


def _keyed(table: DataFrame, names: Sequence[str], keys: Sequence[Key]) -> DataFrame:
    """A table that has these keys, none of them null that is never null in the query."""
    named = list(zip(names, (key.expression for key in keys), strict=True))
    given = _typed(table, [(name, one.type) for name, one in named])
    missing = [F.col(quoted(name)).isNull() for name, one in named if not one.nullable]
    if missing and given.where(reduce(lambda one, other: one | other, missing)).limit(1).collect():
        raise InvalidRequestError(
            "a key of the table is null that is never null in the query; nothing was written; leave these rows out",
            keys=list(names),
        )
    return given


def _typed(table: DataFrame, columns: Sequence[tuple[str, T.DataType]]) -> DataFrame:
    """A table that has these columns."""
    there = {one.name: one.dataType.simpleString() for one in table.schema.fields}
    wrong = {name: kind.simpleString() for name, kind in columns if there.get(name) != kind.simpleString()}
    if wrong:
        raise InvalidRequestError(
            "the table lacks columns of the state, or has them in other types; nothing was written; cast or rename them",
            wanted=wrong,
            columns=there,
        )
    return table

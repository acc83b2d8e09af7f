"""A state from a table of its keys and values: the columns of the query's results, and of live state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

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
from spark_jobs.plan.storable import spark_field, stored
from spark_jobs.worker.exchange import HASH_COLUMN
from statefleet.migration.columns import hashed, key_columns, keys_over

#: Functions whose state is their result.
_RESULTS = ("Sum", "Min", "Max", "Product", "BitAndAgg", "BitOrAgg", "BitXorAgg")


def table_rows(plan: OperatorPlan, table: DataFrame) -> DataFrame:
    """Return the rows of a table in the columns of an operator's state.

    Raises
    ------
    InvalidRequestError
        The state of the operator, or of one of its aggregates, does not follow from its results; or the table lacks a column, has one
        of another type, or lacks a key.
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
    """Check that no two rows have the same key.

    Raises
    ------
    InvalidRequestError
        Two rows have the same key; the error has it.
    """
    counts = rows.groupBy(*(key.name for key in keys)).agg(F.count("*").alias(HASH_COLUMN))
    twice = counts.where(F.col(HASH_COLUMN) > 1).drop(HASH_COLUMN).limit(1).collect()
    if twice:
        raise InvalidRequestError(
            "a state has one row for each key, and two rows of the table have the same; nothing was written; group the table by its "
            "keys first",
            key=twice[0].asDict(),
        )


def _groups(plan: AggregatePlan, table: DataFrame) -> DataFrame:
    node = plan.analysed
    results = [(output.name, output.unaliased) for output in node.aggregates]
    names = [_result_name(results, key.expression) for key in plan.keys]
    keyed = _keyed(table, names, plan.keys)
    leaves = keys_over(keyed, plan.keys, names)
    selected = key_columns(leaves)
    for number, aggregate in enumerate(plan.uses):
        name = _result_name(results, aggregate)
        column = _typed(keyed, [(name, aggregate.type)])[quoted(name)]
        selected += _state(plan, number, aggregate, column)
    return keyed.select(*selected, hashed(leaves))


def _state(plan: AggregatePlan, number: int, aggregate: AggregateExpression, value: Column) -> list[Column]:
    function = aggregate.function
    fields = [state for accumulator in plan.accumulators(number) for state in accumulator.state]
    result = stored(value, aggregate.type)
    if function.kind in _RESULTS:
        columns = [result]
    elif function.kind == "Count":
        columns = [F.coalesce(result, F.lit(0).cast("long"))]
    elif function.kind in ("First", "Last"):
        # Unless nulls are left out, there is a row in each group, and a null is a value.
        is_set = result.isNotNull() if function.ignores_nulls or aggregate.where is not None else F.lit(True)
        columns = [result, is_set]
    elif function.kind in ("CollectList", "CollectSet"):
        columns = [F.coalesce(result, F.array())]
    else:
        raise InvalidRequestError(
            f"what {function.sql_name} holds does not follow from its result, so no table tells it; nothing was written; import the "
            "checkpoint, or have the query hold what it is made of (of an average a sum and a count)",
            aggregate=aggregate.sql,
        )
    if len(fields) > len(columns):
        # A sum with a field for whether it has no value yet.
        zero = F.lit(0).cast(spark_field(fields[0]).dataType)
        columns = [F.coalesce(columns[0], zero), columns[0].isNull()]
    return [column.alias(state.name) for column, state in zip(columns, fields, strict=True)]


def _keys_seen(plan: ProjectedPlan, table: DataFrame) -> DataFrame:
    ends = [state.name for state in plan.schema.state_fields]
    names = [key.expression.name for key in plan.keys]
    keyed = _typed(_keyed(table, names, plan.keys), [(name, T.TimestampType()) for name in ends])
    leaves = keys_over(keyed, plan.keys, names, normalised=False)
    return keyed.select(*key_columns(leaves), *(F.col(name) for name in ends), hashed(leaves))


def _function_state(plan: GroupStatePlan, table: DataFrame) -> DataFrame:
    names = [name for name, _ in plan.program.view.keys]
    keyed = _typed(_keyed(table, names, plan.keys), [(part.name, part.dataType) for part in plan.state.fields])
    leaves = keys_over(keyed, plan.keys, names)
    state_columns = [
        F.col(quoted(part.name)).alias(field.name)
        for part, field in zip(plan.state.fields, plan.program.columns.fields, strict=True)
    ]
    timeout = F.lit(None).cast("long").alias(TIMEOUT.name)
    return keyed.select(*key_columns(leaves), *state_columns, F.lit(True).alias(EXISTS.name), timeout, hashed(leaves))


def _result_name(results: Sequence[tuple[str, Expression]], expression: Expression) -> str:
    name = next((name for name, result in results if result.matches(expression)), None)
    if name is None:
        raise InvalidRequestError(
            "the query shows this only inside of another expression, from which it does not follow; nothing was written; give it a "
            "column of its own in agg",
            expression=expression.sql,
        )
    return name


def _keyed(table: DataFrame, names: Sequence[str], keys: Sequence[Key]) -> DataFrame:
    """Return the table, checked: it has the keys, and none is null that is never null in the query."""
    named = list(zip(names, (key.expression for key in keys), strict=True))
    typed = _typed(table, [(name, key.type) for name, key in named])
    is_null = [F.col(quoted(name)).isNull() for name, key in named if not key.nullable]
    if is_null and typed.where(reduce(or_, is_null)).limit(1).collect():
        raise InvalidRequestError(
            "a key of the table is null that is never null in the query; nothing was written; leave these rows out",
            keys=list(names),
        )
    return typed


def _typed(table: DataFrame, columns: Sequence[tuple[str, T.DataType]]) -> DataFrame:
    """Return the table, checked: it has the columns in their types."""
    present = {column.name: column.dataType.simpleString() for column in table.schema.fields}
    wrong = {name: kind.simpleString() for name, kind in columns if present.get(name) != kind.simpleString()}
    if wrong:
        raise InvalidRequestError(
            "the table lacks columns of the state, or has them in other types; nothing was written; cast or rename them",
            wanted=wrong,
            columns=present,
        )
    return table

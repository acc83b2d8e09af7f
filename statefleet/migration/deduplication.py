"""State of Spark's own ``dropDuplicates``, ``dropDuplicatesWithinWatermark`` and ``limit``, in the columns of the fleet's state."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.plan.checkpoint_state import StoreSchema, state_rows
from spark_jobs.plan.row_columns import ProjectedPlan
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, key_name, keys_over, named_columns, store_of


def deduplication_rows(plan: ProjectedPlan, operator: SparkOperator) -> DataFrame:
    """Return the keys of a Spark operator, in the columns of the plan's state.

    Raises
    ------
    StateMismatchError
        The operator is another one, or has other keys.
    """
    store = store_of(operator)
    keys = [key.expression for key in plan.keys]
    check_types(operator, "columns", store.schema.keys, [(key_name(key), key.type) for key in keys])
    ends = [state.name for state in plan.schema.state_fields]
    # Spark before 3.3.1 described the value as the columns of its input; what it stored was a null, as it is now (SPARK-39650).
    is_of_input = not ends and _has_columns(store.schema.values, store.schema.keys)
    # Within a watermark, the time when a key expires; else null.
    kind: T.DataType = T.LongType() if ends or is_of_input else T.NullType()
    value = T.StructType(named_columns("value", [(kind, True)]))
    if is_of_input:
        store = replace(store, schema=StoreSchema(store.schema.keys, value))
    else:
        check_types(operator, "values", store.schema.values, [(None, kind)])
    columns = [*named_columns("key", [(key.type, key.nullable) for key in keys]), *value.fields]
    rows = state_rows(operator.spark, store, T.StructType(columns))
    if is_of_input:
        # An aggregation whose values contain its keys is described alike, and no value of it begins with a null.
        rows = rows.where(F.when(F.col("value0").isNull(), True).otherwise(_other_operator(operator)))
    leaves = keys_over(rows, plan.keys, [f"key{index}" for index in range(len(keys))], normalised=False)
    selected = [*key_columns(leaves), *(F.timestamp_micros("value0").alias(name) for name in ends)]
    return rows.select(*selected, hashed(leaves))


def _has_columns(existing: T.StructType, columns: T.StructType) -> bool:
    named = {column.name: column.dataType for column in existing.fields}
    return all(named.get(column.name) == column.dataType for column in columns.fields)


def _other_operator(operator: SparkOperator) -> Column:
    error = f"the state {operator.folder} has values, which a deduplication has not: it is of another operator"
    return F.raise_error(F.lit(error)).cast("boolean")


def limit_rows(plan: ProjectedPlan, operator: SparkOperator) -> DataFrame:
    """Return the number of rows that a Spark operator has let through, in the column of the plan's state.

    Raises
    ------
    StateMismatchError
        The operator is another one.
    """
    store = store_of(operator, has_keys=False)
    check_types(operator, "columns", store.schema.keys, [(None, T.NullType())])
    check_types(operator, "values", store.schema.values, [(None, T.LongType())])
    columns = [*named_columns("key", [(T.NullType(), True)]), *named_columns("value", [(T.LongType(), True)])]
    (count,) = plan.schema.state_fields
    rows = state_rows(operator.spark, store, T.StructType(columns))
    return rows.select(F.col("value0").alias(count.name), hashed(()))

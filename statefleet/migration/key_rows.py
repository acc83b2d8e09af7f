"""State of Spark's own operators that keep a value for each key, in the columns of the fleet's state.

They are ``dropDuplicates``, ``dropDuplicatesWithinWatermark``, ``limit``, and a user's function (``applyInPandasWithState``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.errors import StateMismatchError
from spark_jobs.functions.group_plan import GroupStatePlan
from spark_jobs.functions.groups import EXISTS, TIMEOUT
from spark_jobs.functions.state_batch import FURTHEST_MS, NO_TIMEOUT
from spark_jobs.plan.checkpoint_state import SparkStore, StoreSchema, state_rows
from spark_jobs.plan.keys import Key
from spark_jobs.plan.row_columns import ProjectedPlan
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, key_name, keys_over, named_columns, store_of


def _keyed_rows(
    operator: SparkOperator,
    store: SparkStore,
    keys: Sequence[Key],
    values: Sequence[T.StructField],
    *,
    normalised: bool,
) -> tuple[DataFrame, list[Key]]:
    """Return the rows of a store, with columns of the given values, and the keys over them."""
    kinds = [(key.expression.type, key.expression.nullable) for key in keys]
    rows = state_rows(operator.spark, store, T.StructType([*named_columns("key", kinds), *values]))
    return rows, keys_over(rows, keys, [f"key{index}" for index in range(len(keys))], normalised=normalised)


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
    rows, leaves = _keyed_rows(operator, store, plan.keys, value.fields, normalised=False)
    if is_of_input:
        # An aggregation whose values contain its keys is described alike, and no value of it begins with a null.
        rows = rows.where(F.when(F.col("value0").isNull(), True).otherwise(_other_operator(operator)))
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


def function_rows(plan: GroupStatePlan, operator: SparkOperator) -> DataFrame:
    """Return the state and timeouts of a Spark operator by key, in the columns of the plan's store.

    Raises
    ------
    StateMismatchError
        The operator is another one, or has other keys, or state of another type or format.
    """
    store = store_of(operator)
    if store.schema.values.names[: len(plan.state.names)] == plan.state.names:
        raise StateMismatchError(
            "the checkpoint's function began with Spark before 2.4, which kept its state in another format (1) than later ones, and "
            "that is not imported; nothing was written; begin with a new checkpoint, or give the state as rows to fleet.import_table",
            checkpoint=operator.checkpoint.folder.uri,
            operator=operator.number,
        )
    keys = [key.expression for key in plan.keys]
    check_types(operator, "grouping columns", store.schema.keys, [(key_name(key), key.type) for key in keys])
    timeout_columns: list[tuple[str | None, T.DataType]] = [("timeoutTimestamp", T.LongType())]
    if plan.program.timeout_conf == GroupStateTimeout.NoTimeout:
        timeout_columns = []
    check_types(operator, "state columns", store.schema.values, [("groupState", plan.state), *timeout_columns])
    timeouts = named_columns("timeout", [(kind, True) for _, kind in timeout_columns])
    values = [T.StructField("state", plan.state), *timeouts]
    rows, leaves = _keyed_rows(operator, store, plan.keys, values, normalised=True)
    state_columns = [
        F.col("state").getField(part.name).alias(field.name)
        for part, field in zip(plan.state.fields, plan.program.columns.fields, strict=True)
    ]
    timeout = F.lit(None).cast("long")
    if timeout_columns:
        timeout = F.when(F.col("timeout0") != NO_TIMEOUT, F.least("timeout0", F.lit(FURTHEST_MS)) * 1000)
    return rows.select(
        *key_columns(leaves),
        *state_columns,
        F.col("state").isNotNull().alias(EXISTS.name),
        timeout.alias(TIMEOUT.name),
        hashed(leaves),
    )

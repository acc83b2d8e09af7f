"""State of Spark's own ``dropDuplicates``, ``dropDuplicatesWithinWatermark`` and ``limit``, in the columns of the fleet's state."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.plan.checkpoint_state import state_rows
from spark_jobs.plan.row_columns import ProjectedPlan
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, key_name, keys_over, named_columns, store_of

__all__ = ["deduplication_rows", "limit_rows"]


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
    # Within a watermark, the time when a key expires; else null.
    kind: T.DataType = T.LongType() if ends else T.NullType()
    check_types(operator, "values", store.schema.values, [(None, kind)])
    columns = [
        *named_columns("key", [(key.type, key.nullable) for key in keys]),
        *named_columns("value", [(kind, True)]),
    ]
    rows = state_rows(operator.spark, store, T.StructType(columns))
    leaves = keys_over(rows, plan.keys, [f"key{index}" for index in range(len(keys))], normalised=False)
    selected = [*key_columns(leaves), *(F.timestamp_micros("value0").alias(name) for name in ends)]
    return rows.select(*selected, hashed(leaves))


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

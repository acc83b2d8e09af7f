"""State of a user's function under Spark (``applyInPandasWithState``), as the fleet holds it."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from spark_jobs.functions.group_plan import GroupStatePlan
from spark_jobs.functions.groups import EXISTS, TIMEOUT
from spark_jobs.functions.state_batch import FURTHEST_MS, NO_TIMEOUT
from spark_jobs.plan.checkpoint_state import state_rows
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, key_name, keys_over, named_columns, store_of

__all__ = ["function_rows"]


def function_rows(plan: GroupStatePlan, operator: SparkOperator) -> DataFrame:
    """State and timeouts of an operator of Spark's by key, in the columns of the plan's store.

    Raises
    ------
    StateMismatchError
        It is another operator, or has other keys, or state of another type.
    """
    store = store_of(operator)
    keys = [one.expression for one in plan.keys]
    check_types(operator, "grouping columns", store.schema.keys, [(key_name(one), one.type) for one in keys])
    timed: list[tuple[str | None, T.DataType]] = [("timeoutTimestamp", T.LongType())]
    if plan.timeout_conf == GroupStateTimeout.NoTimeout:
        timed = []
    check_types(operator, "state", store.schema.values, [("groupState", plan.state), *timed])
    columns = [
        *named_columns("key", [(one.type, one.nullable) for one in keys]),
        T.StructField("state", plan.state),
        *named_columns("timeout", [(kind, True) for _, kind in timed]),
    ]
    rows = state_rows(operator.spark, store, T.StructType(columns))
    leaves = keys_over(rows, plan.keys, [f"key{place}" for place in range(len(keys))])
    held = [
        F.col("state").getField(one.name).alias(field.name)
        for one, field in zip(plan.state.fields, plan.columns.fields, strict=True)
    ]
    timeout = F.lit(None).cast("long")
    if timed:
        timeout = F.when(F.col("timeout0") != NO_TIMEOUT, F.least("timeout0", F.lit(FURTHEST_MS)) * 1000)
    return rows.select(
        *key_columns(leaves),
        *held,
        F.col("state").isNotNull().alias(EXISTS.name),
        timeout.alias(TIMEOUT.name),
        hashed(leaves),
    )

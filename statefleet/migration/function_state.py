"""State of a user's function in Spark (``applyInPandasWithState``), in the columns of the fleet's state."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.errors import StateMismatchError
from spark_jobs.functions.group_plan import GroupStatePlan
from spark_jobs.functions.groups import EXISTS, TIMEOUT
from spark_jobs.functions.state_batch import FURTHEST_MS, NO_TIMEOUT
from spark_jobs.plan.checkpoint_state import state_rows
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, key_name, keys_over, named_columns, store_of


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
    columns = [
        *named_columns("key", [(key.type, key.nullable) for key in keys]),
        T.StructField("state", plan.state),
        *named_columns("timeout", [(kind, True) for _, kind in timeout_columns]),
    ]
    rows = state_rows(operator.spark, store, T.StructType(columns))
    leaves = keys_over(rows, plan.keys, [f"key{index}" for index in range(len(keys))])
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

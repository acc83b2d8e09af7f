"""``applyInPandasWithState`` and ``applyInArrowWithState``, analysed by Spark, as the fleet runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import GroupedData, SparkSession
from pyspark.sql import types as T
from pyspark.sql.streaming.state import GroupStateTimeout

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.state_metadata import StateMetadata
from spark_jobs.functions.grouped_input import GroupedInput, function_mode, pandas_settings, struct_type
from spark_jobs.functions.groups import EXISTS, TIMEOUT, StateColumns
from spark_jobs.functions.user_state_task import (
    KEY_INDEX,
    ArrowCalls,
    Calls,
    GroupStateProgram,
    UserStateTask,
)
from spark_jobs.plan.keys import Key
from spark_jobs.plan.operator_plan import OperatorPlan, ReduceTask
from spark_jobs.plan.spark_errors import InvalidArgumentError, InvalidTypeError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.view_components import ViewComponent, column

_TIMEOUTS = (GroupStateTimeout.NoTimeout, GroupStateTimeout.ProcessingTimeTimeout, GroupStateTimeout.EventTimeTimeout)


@dataclass(frozen=True)
class GroupFunction:
    """A user's function with its types, as given to ``applyIn...WithState``."""

    function: Callable[..., Any]
    output: T.StructType | str
    state: T.StructType | str
    output_mode: str
    timeout_conf: str
    #: Whether it is called for many keys at once.
    arrow: bool


@dataclass(frozen=True, kw_only=True)
class GroupStatePlan(OperatorPlan):
    """A function with state as an operator's plan, which makes its tasks."""

    program: GroupStateProgram
    keys: tuple[Key, ...]
    state: T.StructType

    def reduce_task(self, schema: StateSchema, metadata: StateMetadata) -> ReduceTask:
        timeout_conf = self.program.timeout_conf
        return UserStateTask(
            program=self.program,
            # Spark drops late rows if timeouts are of event time, else none.
            drops_late_rows=timeout_conf == GroupStateTimeout.EventTimeTimeout,
            due_per_ms=1000 if timeout_conf == GroupStateTimeout.ProcessingTimeTimeout else None,
            schema=schema,
            metadata=metadata,
        )


def build_group_state(grouped: GroupedData, definition: GroupFunction, stateful_mode: str | None) -> GroupStatePlan:
    """Plan ``df.groupBy(..).applyInPandasWithState(...)`` or its Arrow form; `stateful_mode` is the output mode that ``fleet.stateful``
    was given, if it was.

    Raises InvalidRequestError if the output mode, the timeouts or a type is not supported, or timeouts need a watermark that is not
    there.
    """
    mode = function_mode(definition.output_mode, stateful_mode)
    if not callable(definition.function):
        raise InvalidTypeError("the function is called for each key", given=type(definition.function).__name__)
    if definition.timeout_conf not in _TIMEOUTS:
        raise InvalidArgumentError(f"timeoutConf is one of {', '.join(_TIMEOUTS)}", timeoutConf=definition.timeout_conf)
    output, state = struct_type(definition.output, "outputStructType"), struct_type(definition.state, "stateStructType")
    columns = StateColumns(SPARK.arrow_schema(state))
    given_rows = GroupedInput.of(
        grouped,
        late_times=definition.timeout_conf == GroupStateTimeout.EventTimeTimeout,
        reserved=(KEY_INDEX,) if definition.arrow else (),
    )
    store = columns.group_store(given_rows.keys)
    view = ViewComponent(store=store)
    given_rows.view.show_keys(view)
    for name, tree in columns.shown_trees():
        view.value(name, tree, of="state")
    view.extra(EXISTS.name, column(EXISTS.name))
    view.extra("timeout", {"op": "timestamp", "unit": "us", "args": [column(TIMEOUT.name)]})
    schema = StateSchema(
        keys=given_rows.keys,
        inputs=given_rows.inputs,
        accumulators=tuple(_accumulator(field) for field in (*columns.fields, EXISTS, TIMEOUT)),
        expiry_key=None,
        delay_ms=given_rows.delay_ms,
        output_mode=mode,
        operator=OperatorKind.GROUP_STATE,
        options={"timeout_conf": definition.timeout_conf},
        shown={"": view.to_json()},
    )
    calls = _calls(given_rows.frame.sparkSession, definition, output, state)
    # As in Spark, nothing stateful can follow timeouts of event time: what they emit may be late for it.
    appends = mode == "append" and definition.timeout_conf != GroupStateTimeout.EventTimeTimeout
    return GroupStatePlan(
        inputs=(given_rows.frame,),
        schema=schema,
        emitted=output,
        appends=appends,
        program=GroupStateProgram(
            calls, given_rows.view, columns, (store,), definition.timeout_conf, given_rows.delay_ms is not None
        ),
        keys=given_rows.grouping,
        state=state,
    )


def _accumulator(field: Field) -> Accumulator:
    # A renamed column, or one of another nested type, is another column.
    return Accumulator(AccumulatorKind.VALUE, (), (field,), meaning=field.name)


def _calls(spark: SparkSession, definition: GroupFunction, output: T.StructType, state: T.StructType) -> Calls:
    if definition.arrow:
        return ArrowCalls(definition.function, SPARK.arrow_schema(output))
    # pandas is loaded where it is used.
    from spark_jobs.functions.frames import PandasCalls, PandasForm

    return PandasCalls(definition.function, state, PandasForm(output, **pandas_settings(spark)))

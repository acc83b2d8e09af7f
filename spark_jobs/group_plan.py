"""``applyInPandasWithState`` and ``applyInArrowWithState``, analysed by Spark, as the fleet runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import _parse_datatype_string

from coordinator.errors import InvalidRequestError
from coordinator.model import StateMetadata
from spark_jobs.catalyst import Expression, class_name, column_of, data_type, frame_of, scala_list, watermark_delay_ms
from spark_jobs.exchange import HASH_COLUMN, TIME_COLUMN
from spark_jobs.group_rows import EXISTS, TIMEOUT, StateColumns
from spark_jobs.group_task import EVENT_TIME_FIELD, KEY_INDEX, ArrowCalls, Calls, GroupStateTask, GroupView
from spark_jobs.keys import Key, key_of, leaf_field
from spark_jobs.operator import ReduceTask
from spark_jobs.watermark import event_time, event_time_column
from spark_jobs.worker import FleetAddress
from store_actors.schema import Accumulator, AccumulatorKind, Field, OperatorKind, StateSchema, payload_type

__all__ = ["GroupFunction", "GroupStatePlan", "build_group_state"]

_TIMEOUTS = (GroupStateTimeout.NoTimeout, GroupStateTimeout.ProcessingTimeTimeout, GroupStateTimeout.EventTimeTimeout)


@dataclass(frozen=True)
class GroupFunction:
    """A user's function with its types, as given to ``applyIn...WithState``.

    Attributes
    ----------
    arrow
        Whether it is called for many keys at once.
    """

    function: Callable[..., Any]
    output: T.StructType | str
    state: T.StructType | str
    output_mode: str
    timeout_conf: str
    arrow: bool


@dataclass(frozen=True)
class GroupStatePlan:
    """See :class:`~spark_jobs.operator.OperatorPlan` and :class:`~spark_jobs.operator.TaskMaker`."""

    inputs: tuple[DataFrame, ...]
    schema: StateSchema
    appends: bool
    output: T.StructType
    calls: Calls
    view: GroupView
    columns: StateColumns
    timeout_conf: str
    has_watermark: bool

    def row_type(self) -> T.StructType:
        """Spark's form of the rows that the function emits."""
        return self.output

    def finish(self, emitted: DataFrame) -> DataFrame:
        """What the function emits is the result."""
        return emitted

    def reduce_task(self, schema: StateSchema, metadata: StateMetadata, address: FleetAddress) -> ReduceTask:
        """Runs the function in Spark's worker."""
        return GroupStateTask(
            self.calls, self.view, self.columns, self.timeout_conf, self.has_watermark, schema, metadata, address
        )


def build_group_state(df: DataFrame, keys: Sequence[Any], given: GroupFunction, stateful_mode: str) -> GroupStatePlan:
    """Plan of ``df.groupBy(*keys).applyInPandasWithState(...)`` or its Arrow form.

    Parameters
    ----------
    stateful_mode
        Output mode that ``fleet.stateful`` was given.

    Raises
    ------
    InvalidRequestError
        The output mode, the timeouts or a type is not supported, or timeouts need a watermark that is not there.
    pyspark.errors.AnalysisException
        Spark itself refuses it: an unknown column.
    """
    spark = df.sparkSession
    mode = _mode(given, stateful_mode)
    output, state = _struct(given.output, "outputStructType"), _struct(given.state, "stateStructType")
    columns = StateColumns(to_arrow_schema(state))
    grouped = df.groupBy(*keys).agg(F.count(F.lit(1)))
    node = grouped._jdf.queryExecution().analyzed()
    key_names = grouped.columns[:-1]
    if class_name(node) != "Aggregate" or not key_names:
        raise InvalidRequestError("group by the columns of a key first; for one state of everything, by a constant")
    below = node.child()
    wanted = {one.exprId().id() for one in scala_list(df._jdf.queryExecution().analyzed().output())}
    attributes = [one for one in scala_list(below.output()) if one.exprId().id() in wanted]
    plan_keys = [key_of(spark, one, f"k{place}") for place, one in enumerate(scala_list(node.groupingExpressions()))]
    payload = _Payload.of(spark, attributes, plan_keys)
    _check_names(key_names, payload, arrow=given.arrow)
    delay_ms, time = event_time(spark, attributes)
    selected = [*payload.selected]
    if given.timeout_conf == GroupStateTimeout.EventTimeTimeout:
        selected.append(_late_time(spark, attributes).alias(EVENT_TIME_FIELD.name))
        payload.fields.append(EVENT_TIME_FIELD)
    leaves = [
        column.alias(leaf.name) for key in plan_keys for leaf, column in zip(key.leaves, key.columns, strict=True)
    ]
    hashed = F.hash(*(column for key in plan_keys for column in key.columns)).alias(HASH_COLUMN)
    now = F.unix_millis(F.current_timestamp()).alias(TIME_COLUMN)
    prepared = frame_of(spark, below).select(*leaves, *selected, *event_time_column(time), now, hashed)
    types = {item.name: item for item in prepared.schema.fields}
    schema = StateSchema(
        keys=tuple(leaf_field(types[leaf.name]) for key in plan_keys for leaf in key.leaves),
        inputs=tuple(payload.fields),
        accumulators=tuple(_accumulator(field) for field in (*columns.fields, EXISTS, TIMEOUT)),
        expiry_key=None,
        delay_ms=delay_ms,
        output_mode=mode,
        operator=OperatorKind.GROUP_STATE,
        options={"timeout_conf": given.timeout_conf},
    )
    view = GroupView(tuple(zip(key_names, (key.tree for key in plan_keys), strict=True)), tuple(payload.names))
    calls = _calls(spark, given, output, state)
    # As in Spark, nothing stateful can follow timeouts of event time: what they emit may be late for it.
    appends = mode == "append" and given.timeout_conf != GroupStateTimeout.EventTimeTimeout
    return GroupStatePlan(
        (prepared,), schema, appends, output, calls, view, columns, given.timeout_conf, delay_ms is not None
    )


def _mode(given: GroupFunction, stateful_mode: str) -> str:
    mode = given.output_mode.lower()
    if mode not in ("append", "update"):
        raise InvalidRequestError("the output mode of a function is append or update", outputMode=given.output_mode)
    if stateful_mode != mode and stateful_mode != "update":
        raise InvalidRequestError(
            "the output modes of fleet.stateful and of its function differ", stateful=stateful_mode, function=mode
        )
    if given.timeout_conf not in _TIMEOUTS:
        raise InvalidRequestError(f"timeoutConf is one of {', '.join(_TIMEOUTS)}", timeoutConf=given.timeout_conf)
    return mode


def _struct(given: T.StructType | str, what: str) -> T.StructType:
    kind = _parse_datatype_string(given) if isinstance(given, str) else given
    if not isinstance(kind, T.StructType) or not kind.fields:
        raise InvalidRequestError(f"{what} is a struct of at least one column", got=given)
    if len(set(kind.names)) < len(kind.names):
        raise InvalidRequestError(f"columns of {what} have distinct names", columns=kind.names)
    for item in kind.fields:
        try:
            to_arrow_type(item.dataType)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{what} has a column of a type that Arrow does not carry; cast it",
                column=item.name,
                type=item.dataType.simpleString(),
            ) from error
    return kind


@dataclass
class _Payload:
    """The DataFrame's columns: those that are keys are made of these again, the others pass as they are."""

    fields: list[Field]
    selected: list[Column]
    names: list[tuple[str, str]]

    @classmethod
    def of(cls, spark: SparkSession, attributes: Sequence[Expression], keys: Sequence[Key]) -> _Payload:
        payload = cls([], [], [])
        for place, attribute in enumerate(attributes):
            kind = data_type(attribute)
            name = f"c{place}"
            held = None
            if not isinstance(kind, T.FloatType | T.DoubleType):
                # Floating-point keys are normalised; rows keep their own bits.
                held = next((key.tree.leaf for key in keys if key.expression.semanticEquals(attribute)), None)
            if held is None:
                payload.fields.append(Field(name, payload_type(to_arrow_type(kind)), attribute.nullable()))
                payload.selected.append(column_of(spark, attribute).alias(name))
            payload.names.append((attribute.name(), held or name))
        return payload


def _check_names(key_names: Sequence[str], payload: _Payload, *, arrow: bool) -> None:
    names = [name for name, _ in payload.names]
    if len(set(names)) < len(names):
        raise InvalidRequestError(
            "columns of one name cannot be told apart by the function; rename them", columns=names
        )
    if arrow and KEY_INDEX in names:
        raise InvalidRequestError(
            f"the function is given its rows with a column {KEY_INDEX} of their keys; rename yours"
        )
    if len(set(key_names)) < len(key_names):
        raise InvalidRequestError("grouping columns have distinct names; use alias", columns=list(key_names))


def _late_time(spark: SparkSession, attributes: Sequence[Expression]) -> Column:
    """Event time of a row (of a window, its end), in microseconds: the first column with a watermark, as in Spark."""
    marked = next((one for one in attributes if watermark_delay_ms(one) is not None), None)
    if marked is None:
        raise InvalidRequestError(
            "event-time timeouts need a watermark, and its column among those that reach the function; call withWatermark "
            "before fleet.stateful"
        )
    column = column_of(spark, marked)
    time = column.getField("end") if isinstance(data_type(marked), T.StructType) else column
    return F.unix_micros(time.cast("timestamp"))


def _accumulator(field: Field) -> Accumulator:
    # A renamed column, or one of another nested type, is another column.
    return Accumulator(AccumulatorKind.VALUE, (), (field,), meaning=field.name)


def _calls(spark: SparkSession, given: GroupFunction, output: T.StructType, state: T.StructType) -> Calls:
    if given.arrow:
        return ArrowCalls(given.function, to_arrow_schema(output))
    # pandas is loaded where it is used.
    from spark_jobs.group_pandas import PandasCalls

    conf = spark.conf
    return PandasCalls(
        given.function,
        output,
        state,
        timezone=_setting(conf.get("spark.sql.session.timeZone")),
        safe=conf.get("spark.sql.execution.pandas.convertToArrowArraySafely", "false") == "true",
        by_name=conf.get("spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName", "true") == "true",
        max_rows=_max_rows(_setting(conf.get("spark.sql.execution.arrow.maxRecordsPerBatch", "10000"))),
    )


def _setting(value: str | None) -> str:
    assert value is not None, "Spark gives these settings a default"
    return value


def _max_rows(setting: str) -> int:
    # Zero or less is no limit, as in Spark.
    return int(setting) if int(setting) > 0 else (1 << 31) - 1

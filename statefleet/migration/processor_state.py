"""State of a processor in Spark (``transformWithState``), in the rows of the fleet's stores; Spark 4's own reader of state reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator.model.errors import StateMismatchError
from spark_jobs.functions.groups import StateColumns
from spark_jobs.plan.logical import quoted
from spark_jobs.transform.plan import TransformPlan
from spark_jobs.transform.variables import (
    BEGIN,
    DUE,
    END,
    EXPIRY,
    HEAD,
    PLACE,
    TIMER,
    TimeMode,
    Variable,
    VariableKind,
    processor_stores,
)
from spark_jobs.worker.exchange import HASH_COLUMN
from spark_jobs.worker.import_task import STORE_COLUMN, row_column
from statefleet.migration.checkpoint import SparkOperator
from statefleet.migration.columns import check_types, hashed, key_columns, keys_over
from statefleet.migration.state_reader import KEY, VALUE, key_parts, operator_properties, read_state, struct_of
from store_actors.messages.requests import StoreSpec

#: A variable's kind by the name that Spark's metadata has for it.
_KINDS = {f"{kind.name.title()}State": kind for kind in VariableKind}
_TIMERS = "TimerState"
_TIME_MODES = {"NoTime": TimeMode.NONE, "ProcessingTime": TimeMode.PROCESSING_TIME, "EventTime": TimeMode.EVENT_TIME}
#: Columns of Spark's reader with the values of a key, by the kind of the variable.
_VALUES = {VariableKind.VALUE: VALUE, VariableKind.LIST: "list_value", VariableKind.MAP: "map_value"}
#: The column with a row of a store.
_ROW = "row"
#: Fields of a value with a time to live.
_LIVING, _EXPIRES = "value", "ttlExpirationMs"


def processor_rows(plan: TransformPlan, operator: SparkOperator) -> DataFrame:
    """Return a Spark operator's timers and state variables as :class:`~spark_jobs.worker.import_task.StoresImportTask` takes them.

    Raises
    ------
    InvalidRequestError
        The session's Spark has no reader of such state.
    StateMismatchError
        The operator is another one, or has other keys or variables, or variables of other types.
    CorruptStateError
        Partitions or descriptions of the state are missing or damaged.
    """
    _check_operator(plan, operator)
    reader = _Reader(plan, operator)
    timers, *stores = processor_stores(plan.program.variables, plan.schema.keys)
    parts = [
        reader.variable_rows(variable, spec) for variable, spec in zip(plan.program.variables, stores, strict=True)
    ]
    if plan.program.time_mode is not TimeMode.NONE:
        parts.insert(0, reader.timer_rows(timers))
    first = len(stores) + 1 - len(parts)
    numbered = [
        rows.select(F.lit(number).alias(STORE_COLUMN), F.col(_ROW).alias(row_column(number)), HASH_COLUMN)
        for number, rows in enumerate(parts, first)
    ]
    return reduce(lambda rows, more: rows.unionByName(more, allowMissingColumns=True), numbered)


def _check_operator(plan: TransformPlan, operator: SparkOperator) -> None:
    """Check that a Spark operator is a processor with the same variables and time mode."""
    checkpoint = operator.checkpoint.folder.uri
    facts = operator_properties(operator)
    variables = [item for item in facts.get("stateVariables", ()) if item["stateVariableType"] != _TIMERS]
    existing = sorted(
        (item["stateName"], _KINDS[item["stateVariableType"]].value, bool(item["ttlEnabled"])) for item in variables
    )
    asked = sorted(
        (variable.name, variable.kind.value, variable.ttl_ms is not None) for variable in plan.program.variables
    )
    modes = _TIME_MODES.get(facts.get("timeMode", "")), plan.program.time_mode
    if existing != asked or modes[0] != modes[1]:
        raise StateMismatchError(
            "the checkpoint's operator is no processor, or one of another time mode or with other state variables than the query's; "
            "nothing was written; build the query as the one was that made the checkpoint",
            checkpoint=checkpoint,
            operator=operator.number,
            existing=_described(existing, modes[0]),
            asked=_described(asked, modes[1]),
        )


def _described(variables: Sequence[tuple[str, str, bool]], time_mode: TimeMode | None) -> str:
    kinds = [f"{kind} {name}{' with a time to live' if lives else ''}" for name, kind, lives in variables]
    return "; ".join(["no processor" if time_mode is None else f"time mode {time_mode}", *kinds])


@dataclass(frozen=True)
class _Reader:
    plan: TransformPlan
    operator: SparkOperator

    def timer_rows(self, spec: StoreSpec) -> DataFrame:
        rows = self._read({"readRegisteredTimers": "true"})
        time = F.col("expiration_timestamp_ms")
        return self._rows(rows, spec, {TIMER.name: time, DUE.name: time})

    def variable_rows(self, variable: Variable, spec: StoreSpec) -> DataFrame:
        rows = self._read({"stateVarName": variable.name, "flattenCollectionTypes": "false"})
        values = _VALUES[variable.kind]
        self._check_values(variable, rows.schema[values].dataType)
        if variable.kind is VariableKind.VALUE:
            return self._rows(rows, spec, _value_columns(variable, F.col(values)))
        elements = F.map_entries(values) if variable.kind is VariableKind.MAP else F.col(values)
        rows = rows.withColumn("elements", elements)
        kind = rows.schema["elements"].dataType
        assert isinstance(kind, T.ArrayType), "a list, or the entries of a map"
        # The head comes before the elements, as one that is null.
        head = F.array(F.lit(None).cast(kind.elementType))
        rows = rows.select("*", F.posexplode(F.concat(head, "elements")).alias("number", "element"))
        is_head, element = F.col("element").isNull(), F.col("element")
        columns = {
            PLACE.name: F.col("number").cast("long") + HEAD,
            BEGIN.name: F.when(is_head, F.lit(0).cast("long")),
            END.name: F.when(is_head, F.size("elements").cast("long")),
        }
        if variable.kind is VariableKind.MAP:
            columns |= _fields(variable.key_columns, variable.user_key, element.getField("key"))
            element = element.getField("value")
        columns |= _value_columns(variable, element)
        if variable.ttl_ms is not None:
            path = f"value.{_EXPIRES}" if variable.kind is VariableKind.MAP else _EXPIRES
            last = F.array_max(F.col(f"elements.{path}"))
            columns[EXPIRY.name] = F.when(is_head, last).otherwise(columns[EXPIRY.name])
        return self._rows(rows, spec, columns)

    def _read(self, options: Mapping[str, str]) -> DataFrame:
        """Return rows of Spark's reader, whose keys are those of the query."""
        rows = read_state(self.operator, options)
        keys = [(None, item.dataType) for item in self.plan.rows.key_type.fields]
        check_types(self.operator, "grouping columns", struct_of(rows, KEY), keys)
        return rows

    def _check_values(self, variable: Variable, values: T.DataType) -> None:
        element = values.elementType if isinstance(values, T.ArrayType) else values
        if isinstance(values, T.MapType):
            assert variable.user_key is not None, "it is a map"
            self._check_columns(f"key columns of state variable {variable.name}", values.keyType, variable.user_key)
            element = values.valueType
        if variable.ttl_ms is not None:
            assert isinstance(element, T.StructType), "a value with its end"
            element = element[_LIVING].dataType
        self._check_columns(f"columns of state variable {variable.name}", element, variable.values)

    def _check_columns(self, columns: str, existing: T.DataType, asked: T.StructType) -> None:
        assert isinstance(existing, T.StructType), "variables have columns"
        check_types(self.operator, columns, existing, [(item.name, item.dataType) for item in asked.fields])

    def _rows(self, rows: DataFrame, spec: StoreSpec, columns: Mapping[str, Column]) -> DataFrame:
        """Return rows of a store as structs, with the hash of their keys."""
        grouping = self.plan.rows.grouping
        names = [f"{KEY}{index}" for index in range(len(grouping))]
        parts = [part.alias(name) for part, name in zip(key_parts(rows), names, strict=True)]
        others = [field.name for field in (*spec.keys, *spec.values) if field.name in columns]
        flat = rows.select(*parts, *(columns[name].alias(name) for name in others))
        leaves = keys_over(flat, grouping, names)
        return flat.select(
            F.struct(*key_columns(leaves), *(quoted(name) for name in others)).alias(_ROW), hashed(leaves)
        )


def _value_columns(variable: Variable, value: Column) -> dict[str, Column]:
    """Return the columns of a store for a value of Spark's reader."""
    if variable.ttl_ms is None:
        return _fields(variable.columns, variable.values, value)
    expiry = {EXPIRY.name: value.getField(_EXPIRES)}
    return _fields(variable.columns, variable.values, value.getField(_LIVING)) | expiry


def _fields(columns: StateColumns, kind: T.StructType | None, value: Column) -> dict[str, Column]:
    assert kind is not None, "columns have a type"
    return {field.name: value.getField(part.name) for part, field in zip(kind.fields, columns.fields, strict=True)}

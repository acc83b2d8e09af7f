"""Rows and keys of ``df.groupBy(...)`` for a user's function, as Spark analyses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.types import _parse_datatype_string

from coordinator.model.schema import Field
from coordinator.model.type_names import payload_type
from spark_jobs.functions.user_program import EVENT_TIME_FIELD
from spark_jobs.functions.user_state_task import GroupView
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.event_time import late_column, several_event_times, watermark_delay_ms
from spark_jobs.plan.keys import Key, key_of, leaf_field
from spark_jobs.plan.logical import analysed
from spark_jobs.plan.spark_errors import InvalidArgumentError, InvalidTypeError, RefusedQueryError
from spark_jobs.plan.spark_version import SPARK
from spark_jobs.plan.storable import REMEDIES, has_duplicate_names, is_changed, type_parts
from spark_jobs.worker.exchange import HASH_COLUMN


@dataclass(frozen=True)
class GroupedInput:
    """The input of an operator whose state is the user's."""

    #: Rows with key leaves, payload and hash.
    frame: DataFrame
    keys: tuple[Field, ...]
    inputs: tuple[Field, ...]
    view: GroupView
    key_type: T.StructType
    row_type: T.StructType
    #: Watermark delay; None without a watermark.
    delay_ms: int | None
    grouping: tuple[Key, ...]

    @classmethod
    def of(cls, grouped: GroupedData, *, late_times: bool, reserved: Sequence[str] = ()) -> GroupedInput:
        """Return the input for ``df.groupBy(...)``; with `late_times`, rows include the event time by which they are late.

        Raises InvalidRequestError if there are no grouping columns, columns have the same name or a `reserved` one, or there is not
        event time for `late_times`.
        """
        df: DataFrame = grouped._df
        counted = grouped.agg(F.count(F.lit(1)))
        node = analysed(counted)
        key_names = counted.columns[:-1]
        if node.kind != "Aggregate" or not key_names:
            raise RefusedQueryError("group by the columns of a key first; for one state of everything, by a constant")
        if len(node.grouping) > len(key_names):
            # It groups by the number of the grouping set as well, which is not a column.
            raise RefusedQueryError(
                "a function has one state for each key: group by the columns of a key; rollup and cube are for agg"
            )
        if any(expression.is_session for expression in node.grouping):
            # Spark does not have such a column here.
            raise RefusedQueryError(
                "a function's keys are no session windows, which change as rows come; keep the session in the function's state, and "
                "end it by a timeout"
            )
        below = node.child
        ids = {attribute.id for attribute in analysed(df).output}
        attributes = [attribute for attribute in below.output if attribute.id in ids]
        if several := several_event_times(attributes, df.sparkSession):
            raise RefusedQueryError(several)
        keys = [key_of(expression, f"k{index}") for index, expression in enumerate(node.grouping)]
        _check_names(key_names, attributes, reserved)
        payload = _Payload.of(attributes, keys)
        if late_times:
            payload.selected.append(_late_time(attributes).alias(EVENT_TIME_FIELD.name))
            payload.fields.append(EVENT_TIME_FIELD)
        leaves = [column.alias(leaf.name) for key in keys for leaf, column in zip(key.leaves, key.columns, strict=True)]
        hashed = F.hash(*(column for key in keys for column in key.columns)).alias(HASH_COLUMN)
        selected = [*leaves, *payload.selected, hashed]
        prepared = below.frame().select(*selected)
        types = {item.name: item for item in prepared.schema.fields}
        return cls(
            prepared,
            tuple(leaf_field(types[leaf.name]) for key in keys for leaf in key.leaves),
            tuple(payload.fields),
            GroupView(tuple(zip(key_names, (key.tree for key in keys), strict=True)), tuple(payload.names)),
            T.StructType(counted.schema.fields[:-1]),
            df.schema,
            watermark_delay_ms(attributes),
            tuple(keys),
        )


def struct_type(definition: T.DataType | str, subject: str) -> T.StructType:
    """Return a struct that the user defined by Spark's type or in DDL.

    Raises
    ------
    InvalidRequestError
        It is not a struct, has no columns or two of the same name, or has a type that Arrow lacks.
    """
    kind = _parse_datatype_string(definition) if isinstance(definition, str) else definition
    if not isinstance(kind, T.StructType) or not kind.fields:
        raise InvalidTypeError(f"{subject} is a struct of at least one column", got=definition)
    if len(set(kind.names)) < len(kind.names):
        raise RefusedQueryError(f"columns of {subject} have distinct names", columns=kind.names)
    for item in kind.fields:
        _check_values(item.dataType, f"{subject}: {item.name}")
        try:
            SPARK.arrow_type(item.dataType)
        except (TypeError, ValueError) as error:
            raise RefusedQueryError(
                f"{subject} has a column of a type that Arrow does not carry; cast it",
                column=item.name,
                type=item.dataType.simpleString(),
            ) from error
        if has_duplicate_names(item.dataType):
            raise RefusedQueryError(
                f"{subject} has a struct with fields of one name; give them names of their own",
                column=item.name,
                type=item.dataType.simpleString(),
            )
    return kind


@dataclass
class _Payload:
    """The DataFrame's columns: columns that are keys are restored from the keys, and the others are passed unchanged."""

    fields: list[Field]
    selected: list[Column]
    names: list[tuple[str, str]]

    @classmethod
    def of(cls, attributes: Sequence[Expression], keys: Sequence[Key]) -> _Payload:
        payload = cls([], [], [])
        for index, attribute in enumerate(attributes):
            kind = attribute.type
            name = f"c{index}"
            leaf = None
            if not is_changed(kind, normalised=True):
                # Floating-point keys are normalised, but rows keep their own bits.
                leaf = next((key.tree.leaf for key in keys if key.expression.matches(attribute)), None)
            if leaf is None:
                payload.fields.append(Field(name, payload_type(SPARK.arrow_type(kind)), attribute.nullable))
                payload.selected.append(attribute.column().alias(name))
            payload.names.append((attribute.name, leaf or name))
        return payload


def _check_values(kind: T.DataType, subject: str) -> None:
    """Refuse values that are objects of PySpark's own to a function, which the fleet does not convert."""
    for part in type_parts(kind):
        if part.typeName() in REMEDIES:
            raise RefusedQueryError(
                f"values of this type do not go to or from a function with state; {REMEDIES[part.typeName()]}",
                column=subject,
                type=part.simpleString(),
            )


def _check_names(key_names: Sequence[str], attributes: Sequence[Expression], reserved: Sequence[str]) -> None:
    names = [attribute.name for attribute in attributes]
    if len(set(names)) < len(names):
        raise RefusedQueryError("columns of one name cannot be told apart by the function; rename them", columns=names)
    for attribute in attributes:
        _check_values(attribute.type, attribute.name)
        if has_duplicate_names(attribute.type):
            raise RefusedQueryError(
                "fields of one name cannot be told apart by the function; give them names of their own, or select those that it needs",
                column=attribute.name,
                type=attribute.type.simpleString(),
            )
    for name in set(reserved) & set(names):
        raise RefusedQueryError(f"the function is given its rows with a column {name} of its own; rename yours")
    if len(set(key_names)) < len(key_names):
        raise RefusedQueryError("grouping columns have distinct names; use alias", columns=list(key_names))


def _late_time(attributes: Sequence[Expression]) -> Column:
    """Return the event time of a row (of a window, its end), in microseconds: the first column with a watermark, as in Spark."""
    marked = late_column(attributes)
    if marked is None:
        raise RefusedQueryError(
            "event-time timeouts need a watermark, and its column among those that reach the function; call withWatermark "
            "before fleet.stateful"
        )
    column = marked.column()
    time = column.getField("end") if isinstance(marked.type, T.StructType) else column
    return F.unix_micros(time.cast("timestamp"))


def function_mode(output_mode: str, stateful_mode: str | None) -> str:
    """Return the output mode of a user's function, which has to be that of ``fleet.stateful``, if that has one.

    Raises
    ------
    InvalidRequestError
        The mode is neither append nor update, or the two differ.
    """
    mode = str(output_mode).lower()
    if mode not in ("append", "update"):
        raise InvalidArgumentError("the output mode of a function is append or update", outputMode=output_mode)
    if stateful_mode not in (None, mode):
        raise RefusedQueryError(
            "the output modes of fleet.stateful and of its function differ", stateful=stateful_mode, function=mode
        )
    return mode


def pandas_settings(spark: SparkSession) -> dict[str, Any]:
    """Return a session's settings for conversions between Arrow and pandas (:class:`~spark_jobs.functions.frames.PandasForm`)."""
    conf = spark.conf
    # Zero or less means no limit, as in Spark.
    max_rows = int(conf.get("spark.sql.execution.arrow.maxRecordsPerBatch", "10000") or 0)
    return {
        "timezone": conf.get("spark.sql.session.timeZone"),
        "safe": conf.get("spark.sql.execution.pandas.convertToArrowArraySafely", "false") == "true",
        "by_name": conf.get("spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName", "true") == "true",
        "max_rows": max_rows if max_rows > 0 else (1 << 31) - 1,
    }

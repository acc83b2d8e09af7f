"""Spark types and the type names of a state's schema, both ways."""

from __future__ import annotations

from pyspark.sql import types as T

from coordinator.errors import InvalidRequestError
from store_actors.schema import Field

__all__ = ["spark_field", "type_name"]

_NAMES: dict[type[T.DataType], str] = {
    T.BooleanType: "bool",
    T.ByteType: "int8",
    T.ShortType: "int16",
    T.IntegerType: "int32",
    T.LongType: "int64",
    T.FloatType: "float32",
    T.DoubleType: "float64",
    T.StringType: "string",
    T.BinaryType: "binary",
    T.DateType: "date32",
    T.TimestampType: "timestamp",
    T.TimestampNTZType: "timestamp_ntz",
    T.DayTimeIntervalType: "duration",
}
_TYPES = {name: kind for kind, name in _NAMES.items()}


def type_name(data_type: T.DataType, what: str) -> str:
    """State type of a Spark type.

    Raises
    ------
    InvalidRequestError
        No state holds such values; `what` (a column, in SQL) is named.
    """
    if isinstance(data_type, T.DecimalType):
        return f"decimal({data_type.precision},{data_type.scale})"
    name = _NAMES.get(type(data_type))
    if name is None:
        raise InvalidRequestError(
            "a fleet's state holds atomic types (numbers, decimals, strings, binaries, booleans, dates, timestamps, day-time "
            "intervals); cast the column, or take the fields that you need out of it",
            column=what,
            type=data_type.simpleString(),
        )
    return name


def spark_field(field: Field) -> T.StructField:
    """Spark's form of a state field."""
    if field.type.startswith("decimal("):
        precision, scale = field.type[len("decimal(") : -1].split(",")
        data_type: T.DataType = T.DecimalType(int(precision), int(scale))
    else:
        data_type = _TYPES[field.type]()
    return T.StructField(field.name, data_type, field.nullable)

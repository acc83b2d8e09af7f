"""Conversion between Spark types and the type names of a state's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from coordinator.model.schema import Field
from coordinator.model.type_names import (
    bins_type,
    counts_type,
    list_type,
    spark_type,
    string_to_type,
    type_to_string,
    words_type,
)
from spark_jobs.plan.spark_errors import RefusedQueryError
from spark_jobs.plan.storable import check_compared

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
#: By the names of types of Spark 4, what to do with their columns.
REMEDIES = {
    "variant": "take the fields that you need by variant_get, or the text by to_json",
    "geometry": "take its bytes by st_asbinary",
    "geography": "take its bytes by st_asbinary",
    "time": "take its microseconds by time_to_micros",
}
#: Prefix of a column's metadata that is about its query (watermark, window) and not about its type.
_QUERY_METADATA = "spark."


def state_field(
    name: str,
    data_type: T.DataType,
    nullable: bool = True,
    *,
    subject: str = "",
    metadata: Mapping[str, Any] | None = None,
    nested: bool = False,
) -> Field:
    """Return the field of a state's schema for a Spark type, with Spark's type beside it where the state's does not imply it.

    Parameters
    ----------
    subject
        The column in SQL, for the error; by default `name`.
    metadata
        Metadata of Spark's column (such as the declared type of a char or varchar).
    nested
        Whether arrays, maps and structs are accepted, stored as one value.

    Raises
    ------
    InvalidRequestError
        State cannot store such values.
    """
    kind = _type_name(data_type, subject or name, nested=nested)
    return _field(name, kind, data_type, nullable, metadata or {})


def list_field(name: str, element: T.DataType, *, subject: str) -> Field:
    """Return the field of a list that grows with its group; see :func:`state_field`."""
    return _field(
        name, list_type(_type_name(element, subject, nested=True)), T.ArrayType(element, containsNull=False), False, {}
    )


def counts_field(name: str, value: T.DataType, *, subject: str) -> Field:
    """Return the field of values with their counts; see :func:`list_field`."""
    return Field(name, counts_type(_type_name(value, subject, nested=True)), nullable=False)


def bins_field(name: str, centre: T.DataType, *, subject: str) -> Field:
    """Return the field of the bins of a histogram, null for no rows; `centre` is the type of a bin's centre."""
    bin_type = T.StructType([T.StructField("x", centre), T.StructField("y", T.DoubleType())])
    return _field(name, bins_type(_type_name(centre, subject)), T.ArrayType(bin_type), nullable=True, metadata={})


def words_field(name: str, slots: int) -> Field:
    """Return the field of a state of a number of 64-bit slots, never null."""
    return Field(name, words_type(slots), nullable=False)


def _field(name: str, kind: str, data_type: T.DataType, nullable: bool, metadata: Mapping[str, Any]) -> Field:
    kept = {key: value for key, value in metadata.items() if not key.startswith(_QUERY_METADATA)}
    column = {"type": data_type.jsonValue(), "metadata": kept}
    is_implied = column == {"type": spark_type(kind), "metadata": {}}
    spark = None if is_implied else json.dumps(column, sort_keys=True)
    return Field(name, kind, nullable, spark)


def _type_name(data_type: T.DataType, subject: str, *, nested: bool = False) -> str:
    check_compared(data_type, subject)
    if nested and isinstance(data_type, T.ArrayType | T.MapType | T.StructType):
        return _nested_name(data_type, subject)
    if isinstance(data_type, T.DecimalType):
        return f"decimal({data_type.precision},{data_type.scale})"
    name = _NAMES.get(type(data_type))
    if name is None:
        raise RefusedQueryError(
            "a fleet's state holds numbers, decimals, strings, binaries, booleans, dates, timestamps and intervals, as keys and values "
            "of rows also arrays, maps and structs of these; " + _remedy(data_type),
            column=subject,
            type=data_type.simpleString(),
        )
    return name


def _remedy(data_type: T.DataType) -> str:
    if isinstance(data_type, T.UserDefinedType):
        return "cast the column, or take the fields that you need out of it; of ML vectors, use pyspark.ml.functions.vector_to_array"
    remedy = REMEDIES.get(data_type.typeName())
    if remedy is not None:
        return remedy
    return "cast the column, or take the fields that you need out of it"


def spark_field(field: Field) -> T.StructField:
    """Return Spark's field for a state field, without its metadata: Spark sets that of a result."""
    return T.StructField.fromJson({**field.spark_json(), "metadata": {}})


def _nested_name(data_type: T.ArrayType | T.MapType | T.StructType, subject: str) -> str:
    def nested_field(name: str, inner: T.DataType) -> pa.Field:
        # Always nullable: below a null struct, Spark's Arrow data has nulls also in fields that are never null.
        return pa.field(name, string_to_type(_type_name(inner, subject, nested=True)))

    if isinstance(data_type, T.ArrayType):
        kind: pa.DataType = pa.list_(nested_field("element", data_type.elementType))
    elif isinstance(data_type, T.MapType):
        kind = pa.map_(
            nested_field("key", data_type.keyType).with_nullable(False), nested_field("value", data_type.valueType)
        )
    elif not data_type.fields:
        raise RefusedQueryError("a struct without fields holds nothing; leave it out", column=subject)
    else:
        kind = pa.struct([nested_field(inner.name, inner.dataType) for inner in data_type.fields])
    return type_to_string(kind)

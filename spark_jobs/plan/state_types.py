"""Spark types and the type names of a state's schema, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from coordinator.model.errors import InvalidRequestError
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

__all__ = [
    "bins_field",
    "counts_field",
    "list_field",
    "spark_field",
    "state_field",
    "words_field",
]

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
#: Metadata of a column that is about the query it stands in (watermark, window), not about its type.
_OF_THE_QUERY = "spark."


def state_field(
    name: str,
    data_type: T.DataType,
    nullable: bool = True,
    *,
    what: str = "",
    metadata: Mapping[str, Any] | None = None,
    nested: bool = False,
) -> Field:
    """Field of a state's schema for a Spark type, with what of Spark's the state's own type does not tell.

    Parameters
    ----------
    what
        The column, in SQL, for the error; `name` without it.
    metadata
        Metadata of Spark's column (such as the declared type of a char or varchar).
    nested
        Whether arrays, maps and structs are held, as one value.

    Raises
    ------
    InvalidRequestError
        No state holds such values.
    """
    kind = _type_name(data_type, what or name, nested=nested)
    return _told(name, kind, data_type, nullable, metadata or {})


def list_field(name: str, element: T.DataType, *, what: str) -> Field:
    """Field of a list that grows with its group; see :func:`state_field`."""
    return _told(
        name, list_type(_type_name(element, what, nested=True)), T.ArrayType(element, containsNull=False), False, {}
    )


def counts_field(name: str, value: T.DataType, *, what: str) -> Field:
    """Field of values that are counted; see :func:`list_field`."""
    return Field(name, counts_type(_type_name(value, what, nested=True)), nullable=False)


def bins_field(name: str, place: T.DataType, *, what: str) -> Field:
    """Field of the bins of a histogram, null of no rows."""
    bin_type = T.StructType([T.StructField("x", place), T.StructField("y", T.DoubleType())])
    return _told(name, bins_type(_type_name(place, what)), T.ArrayType(bin_type), nullable=True, metadata={})


def words_field(name: str, words: int) -> Field:
    """Field of a state of so many 64-bit words, never null."""
    return Field(name, words_type(words), nullable=False)


def _told(name: str, kind: str, data_type: T.DataType, nullable: bool, metadata: Mapping[str, Any]) -> Field:
    kept = {key: value for key, value in metadata.items() if not key.startswith(_OF_THE_QUERY)}
    told = {"type": data_type.jsonValue(), "metadata": kept}
    spark = None if told == {"type": spark_type(kind), "metadata": {}} else json.dumps(told, sort_keys=True)
    return Field(name, kind, nullable, spark)


def _type_name(data_type: T.DataType, what: str, *, nested: bool = False) -> str:
    if nested and isinstance(data_type, T.ArrayType | T.MapType | T.StructType):
        return _nested_name(data_type, what)
    if isinstance(data_type, T.DecimalType):
        return f"decimal({data_type.precision},{data_type.scale})"
    name = _NAMES.get(type(data_type))
    if name is None:
        raise InvalidRequestError(
            "a fleet's state holds numbers, decimals, strings, binaries, booleans, dates, timestamps and intervals, as keys and values "
            "of rows also arrays, maps and structs of these; " + _remedy(data_type),
            column=what,
            type=data_type.simpleString(),
        )
    return name


def _remedy(data_type: T.DataType) -> str:
    if isinstance(data_type, T.UserDefinedType):
        return "cast the column, or take the fields that you need out of it; of ML vectors, use pyspark.ml.functions.vector_to_array"
    return "cast the column, or take the fields that you need out of it"


def spark_field(field: Field) -> T.StructField:
    """Spark's form of a state field. Its metadata stays behind: that of a result is for Spark to say."""
    told = field.spark_json()
    return T.StructField.fromJson({**told, "metadata": {}})


def _nested_name(data_type: T.ArrayType | T.MapType | T.StructType, what: str) -> str:
    def held(name: str, part: T.DataType) -> pa.Field:
        # Whatever Spark says: below a null struct, its Arrow data has nulls where none can be.
        return pa.field(name, string_to_type(_type_name(part, what, nested=True)))

    if isinstance(data_type, T.ArrayType):
        kind: pa.DataType = pa.list_(held("element", data_type.elementType))
    elif isinstance(data_type, T.MapType):
        kind = pa.map_(held("key", data_type.keyType).with_nullable(False), held("value", data_type.valueType))
    elif not data_type.fields:
        raise InvalidRequestError("a struct without fields holds nothing; leave it out", column=what)
    else:
        kind = pa.struct([held(one.name, one.dataType) for one in data_type.fields])
    return type_to_string(kind)

"""Values that Arrow cannot carry to Python, stored as other values; and floating-point numbers as Spark groups them.

Year-month intervals are stored as their months, nulls without a type (``void``) as booleans, and strings of a collation as plain
strings of the same bytes; they are never compared (:func:`check_compared`). Fields of a struct that have the same name are renamed,
except for the first. All of that also holds within arrays, maps and structs. Spark itself converts the values, in columns before and
after the fleet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
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
from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.spark_errors import RefusedQueryError

_MONTHS = T.YearMonthIntervalType(T.YearMonthIntervalType.MONTH, T.YearMonthIntervalType.MONTH)
_FLOATS = (T.FloatType, T.DoubleType)
#: The collation by which strings are equal if their bytes are, the only one of Spark 3.5.
_BINARY = "UTF8_BINARY"
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


def type_parts(kind: T.DataType) -> Iterator[T.DataType]:
    """Yield a type and all types within it."""
    yield kind
    if isinstance(kind, T.ArrayType):
        yield from type_parts(kind.elementType)
    elif isinstance(kind, T.MapType):
        yield from type_parts(kind.keyType)
        yield from type_parts(kind.valueType)
    elif isinstance(kind, T.StructType):
        for field in kind.fields:
            yield from type_parts(field.dataType)


def collation_of(kind: T.DataType) -> str | None:
    """Return a collation anywhere in a type by which strings of different bytes may be equal; None if there is none."""
    names = (getattr(part, "collation", _BINARY) for part in type_parts(kind) if isinstance(part, T.StringType))
    return next((name for name in names if name != _BINARY), None)


def has_map(kind: T.DataType) -> bool:
    """Return whether there is a map anywhere in a type."""
    return any(isinstance(part, T.MapType) for part in type_parts(kind))


def check_compared(kind: T.DataType, subject: str) -> None:
    """Refuse values that the fleet would compare by their bytes, and Spark by a collation.

    Raises
    ------
    InvalidRequestError
        Strings of the type have such a collation.
    """
    collation = collation_of(kind)
    if collation is not None:
        raise RefusedQueryError(
            "strings of this collation may be equal although their bytes differ, and the fleet compares, groups and hashes strings by "
            "their bytes; use collate(.., 'UTF8_BINARY'), or a column that is the same for equal strings, such as lower(..)",
            column=subject,
            collation=collation,
        )


def stored_type(kind: T.DataType) -> T.DataType:
    """Return the type in which values of a type are stored; all that is inside of it is nullable, as fields below a null struct are."""
    if isinstance(kind, T.YearMonthIntervalType):
        return T.IntegerType()
    if isinstance(kind, T.NullType):
        return T.BooleanType()
    if isinstance(kind, T.StringType):
        return T.StringType()
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(stored_type(kind.elementType))
    if isinstance(kind, T.MapType):
        return T.MapType(stored_type(kind.keyType), stored_type(kind.valueType))
    if isinstance(kind, T.StructType):
        fields = zip(_stored_names(kind), kind.fields, strict=True)
        return T.StructType([T.StructField(name, stored_type(field.dataType)) for name, field in fields])
    return kind


def is_changed(kind: T.DataType, *, normalised: bool) -> bool:
    """Return whether values of a type are stored as other values."""
    converted: tuple[type[T.DataType], ...] = (T.YearMonthIntervalType, T.NullType, *(_FLOATS if normalised else ()))
    return (
        any(isinstance(part, converted) for part in type_parts(kind))
        or collation_of(kind) is not None
        or has_duplicate_names(kind)
    )


def has_duplicate_names(kind: T.DataType) -> bool:
    """Return whether a struct anywhere in a type has two fields of the same name."""
    return any(isinstance(part, T.StructType) and _stored_names(part) != part.names for part in type_parts(kind))


def _stored_names(kind: T.StructType) -> list[str]:
    """Return distinct names for a struct's fields, as Arrow needs them."""
    names: list[str] = []
    for index, name in enumerate(kind.names):
        names.append(name if name not in names else f"{name}:{index}")
    return names


def stored(column: Column, kind: T.DataType, *, nullable: bool = True, normalised: bool = False) -> Column:
    """Return a column as it is stored; with `normalised`, floating-point numbers as Spark groups them (a single NaN, 0.0 for -0.0)."""
    return _element(column, kind, partial(_stored, normalised=normalised), may_be_null=nullable)


def restored(column: Column, kind: T.DataType, *, nullable: bool = True) -> Column:
    """Return a column restored from :func:`stored`; inner values that are never null by the type are marked so for Spark."""
    return _element(column, kind, _restored, may_be_null=nullable)


def _stored(column: Column, kind: T.DataType, *, normalised: bool) -> Column:
    if not is_changed(kind, normalised=normalised):
        return column
    if isinstance(kind, T.YearMonthIntervalType):
        # Spark casts only intervals of months to a number.
        return column.cast(_MONTHS).cast("int")
    if isinstance(kind, T.NullType):
        return column.cast("boolean")
    if isinstance(kind, T.StringType):
        return _collated(column, _BINARY)
    if isinstance(kind, _FLOATS):
        return Expression.of(column).normalised().column()
    return _rebuilt(column, kind, partial(_stored, normalised=normalised))


def _restored(column: Column, kind: T.DataType) -> Column:
    if stored_type(kind) == kind:
        return column
    if isinstance(kind, T.YearMonthIntervalType):
        return column.cast(_MONTHS).cast(kind)
    if isinstance(kind, T.NullType):
        return F.lit(None)
    if isinstance(kind, T.StringType):
        return _collated(column, collation_of(kind) or _BINARY)
    return _rebuilt(column, kind, _restored, follows_type=True)


def _collated(column: Column, collation: str) -> Column:
    return F.call_function("collate", column, F.lit(collation))


def _rebuilt(
    column: Column, kind: T.DataType, convert: Callable[[Column, T.DataType], Column], *, follows_type: bool = False
) -> Column:
    """Return an array, map or struct whose inner values (column and type) are each converted.

    With `follows_type`, inner values that are never null by the type are marked so for Spark, and fields get the type's metadata.
    """

    def element(inner: Column, inner_kind: T.DataType, *, may_be_null: bool) -> Column:
        converted = _element(inner, inner_kind, convert, may_be_null=may_be_null)
        return (
            Expression.of(converted).known(nullable=False).column() if follows_type and not may_be_null else converted
        )

    if isinstance(kind, T.ArrayType):
        inner, may_be_null = kind.elementType, kind.containsNull
        return F.transform(column, lambda value: element(value, inner, may_be_null=may_be_null))
    if isinstance(kind, T.MapType):
        keys, values, may_be_null = kind.keyType, kind.valueType, kind.valueContainsNull
        column = F.transform_values(column, lambda _, value: element(value, values, may_be_null=may_be_null))
        return F.transform_keys(column, lambda key, _: element(key, keys, may_be_null=False))
    assert isinstance(kind, T.StructType)
    struct, columns = Expression.of(column), []
    for index, (name, field) in enumerate(zip(_stored_names(kind), kind.fields, strict=True)):
        converted = element(struct.field(index, field.name).column(), field.dataType, may_be_null=field.nullable)
        columns.append(converted.alias(field.name, metadata=field.metadata) if follows_type else converted.alias(name))
    return F.struct(*columns)


def _element(
    column: Column, kind: T.DataType, convert: Callable[[Column, T.DataType], Column], *, may_be_null: bool
) -> Column:
    converted = convert(column, kind)
    # A struct that is rebuilt from the fields of a null struct is not null; a value that is never null by its type stays so.
    is_rebuilt = isinstance(kind, T.StructType) and converted is not column
    return F.when(column.isNotNull(), converted) if is_rebuilt and may_be_null else converted


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

    `subject` is the column in SQL, for the error, by default `name`; `metadata` is that of Spark's column (such as the declared type of
    a char or varchar). With `nested`, arrays, maps and structs are accepted, stored as one value. Raises InvalidRequestError if state
    cannot store such values.
    """
    kind = _type_name(data_type, subject or name, nested=nested)
    return _field(name, kind, data_type, nullable, metadata or {})


def list_field(name: str, element: T.DataType, *, subject: str) -> Field:
    """Return the field of a list that grows with its group; see :func:`state_field`."""
    return _field(
        name, list_type(_type_name(element, subject, nested=True)), T.ArrayType(element, containsNull=False), False, {}
    )


def counts_field(value: T.DataType, *, subject: str) -> Field:
    """Return the field ``values`` of values with their counts; see :func:`list_field`."""
    return Field("values", counts_type(_type_name(value, subject, nested=True)), nullable=False)


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
    otherwise = "cast the column, or take the fields that you need out of it"
    if isinstance(data_type, T.UserDefinedType):
        return f"{otherwise}; of ML vectors, use pyspark.ml.functions.vector_to_array"
    return REMEDIES.get(data_type.typeName(), otherwise)


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

"""Values that Arrow cannot carry to Python, stored as other values; and floating-point numbers as Spark groups them.

Year-month intervals are stored as their months, nulls without a type (``void``) as booleans, and strings of a collation as plain
strings of the same bytes; they are never compared (:func:`check_compared`). Fields of a struct that have the same name are renamed,
except for the first. All of that also holds within arrays, maps and structs. Spark itself converts the values, in columns before and
after the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.plan.catalyst import Expression
from spark_jobs.plan.spark_errors import RefusedQueryError

_MONTHS = T.YearMonthIntervalType(T.YearMonthIntervalType.MONTH, T.YearMonthIntervalType.MONTH)
_FLOATS = (T.FloatType, T.DoubleType)
#: The collation by which strings are equal if their bytes are, the only one of Spark 3.5.
_BINARY = "UTF8_BINARY"


def _parts(kind: T.DataType) -> Iterator[T.DataType]:
    """Yield a type and all types within it."""
    yield kind
    if isinstance(kind, T.ArrayType):
        yield from _parts(kind.elementType)
    elif isinstance(kind, T.MapType):
        yield from _parts(kind.keyType)
        yield from _parts(kind.valueType)
    elif isinstance(kind, T.StructType):
        for field in kind.fields:
            yield from _parts(field.dataType)


def collation_of(kind: T.DataType) -> str | None:
    """Return a collation anywhere in a type by which strings of different bytes may be equal; None if there is none."""
    names = (getattr(part, "collation", _BINARY) for part in _parts(kind) if isinstance(part, T.StringType))
    return next((name for name in names if name != _BINARY), None)


def has_map(kind: T.DataType) -> bool:
    """Return whether there is a map anywhere in a type."""
    return any(isinstance(part, T.MapType) for part in _parts(kind))


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
        any(isinstance(part, converted) for part in _parts(kind))
        or collation_of(kind) is not None
        or has_duplicate_names(kind)
    )


def has_duplicate_names(kind: T.DataType) -> bool:
    """Return whether a struct anywhere in a type has two fields of the same name."""
    return any(isinstance(part, T.StructType) and _stored_names(part) != part.names for part in _parts(kind))


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

    Parameters
    ----------
    follows_type
        Whether inner values that are never null by the type are marked so for Spark, and fields get the type's metadata.
    """

    def element(inner: Column, inner_kind: T.DataType, *, may_be_null: bool) -> Column:
        converted = _element(inner, inner_kind, convert, may_be_null=may_be_null)
        return Expression.of(converted).known_not_null().column() if follows_type and not may_be_null else converted

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

"""Values that Arrow does not carry to Python, as others that it does; and floating-point numbers as Spark groups them.

Year-month intervals are held as their months, nulls without a type (``void``) as booleans, and of fields of a struct that have one name
the later ones have another, wherever in an array, map or struct they stand. Spark itself makes the one of the other, in columns before
and after the fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_jobs.plan.catalyst import Expression

__all__ = ["has_alike_fields", "is_changed", "restored", "stored", "stored_type"]

_MONTHS = T.YearMonthIntervalType(T.YearMonthIntervalType.MONTH, T.YearMonthIntervalType.MONTH)
_FLOATS = (T.FloatType, T.DoubleType)


def stored_type(kind: T.DataType) -> T.DataType:
    """Type in which values of a type are held: whatever can be null inside of it, as fields are below a struct that is."""
    if isinstance(kind, T.YearMonthIntervalType):
        return T.IntegerType()
    if isinstance(kind, T.NullType):
        return T.BooleanType()
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(stored_type(kind.elementType))
    if isinstance(kind, T.MapType):
        return T.MapType(stored_type(kind.keyType), stored_type(kind.valueType))
    if isinstance(kind, T.StructType):
        fields = zip(_stored_names(kind), kind.fields, strict=True)
        return T.StructType([T.StructField(name, stored_type(one.dataType)) for name, one in fields])
    return kind


def is_changed(kind: T.DataType, *, normalised: bool) -> bool:
    """Whether values of a type are held as others."""
    if isinstance(kind, T.ArrayType):
        return is_changed(kind.elementType, normalised=normalised)
    if isinstance(kind, T.MapType):
        return any(is_changed(one, normalised=normalised) for one in (kind.keyType, kind.valueType))
    if isinstance(kind, T.StructType):
        return has_alike_fields(kind) or any(is_changed(one.dataType, normalised=normalised) for one in kind.fields)
    return isinstance(kind, T.YearMonthIntervalType | T.NullType) or (normalised and isinstance(kind, _FLOATS))


def has_alike_fields(kind: T.DataType) -> bool:
    """Whether a struct, wherever in a type it stands, has two fields of one name."""
    if isinstance(kind, T.ArrayType):
        return has_alike_fields(kind.elementType)
    if isinstance(kind, T.MapType):
        return has_alike_fields(kind.keyType) or has_alike_fields(kind.valueType)
    if isinstance(kind, T.StructType):
        return _stored_names(kind) != kind.names or any(has_alike_fields(one.dataType) for one in kind.fields)
    return False


def _stored_names(kind: T.StructType) -> list[str]:
    """Names of a struct's fields, of which Arrow has no two alike."""
    names: list[str] = []
    for place, name in enumerate(kind.names):
        names.append(name if name not in names else f"{name}:{place}")
    return names


def stored(column: Column, kind: T.DataType, *, nullable: bool = True, normalised: bool = False) -> Column:
    """A column of a type as it is held; floating-point numbers as Spark groups them (one NaN, and -0.0 is 0.0), if `normalised`."""
    return _element(column, kind, partial(_stored, normalised=normalised), may_be_null=nullable)


def restored(column: Column, kind: T.DataType, *, nullable: bool = True) -> Column:
    """A column of a type again, of what :func:`stored` made of it; parts that are never null, says the type, are known not to be."""
    return _element(column, kind, _restored, may_be_null=nullable)


def _stored(column: Column, kind: T.DataType, *, normalised: bool) -> Column:
    if not is_changed(kind, normalised=normalised):
        return column
    if isinstance(kind, T.YearMonthIntervalType):
        # Only months become a number.
        return column.cast(_MONTHS).cast("int")
    if isinstance(kind, T.NullType):
        return column.cast("boolean")
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
    return _rebuilt(column, kind, _restored, tells=True)


def _rebuilt(
    column: Column, kind: T.DataType, part: Callable[[Column, T.DataType], Column], *, tells: bool = False
) -> Column:
    """An array, map or struct whose parts (column and type) are each made anew.

    Parameters
    ----------
    tells
        Whether what the type says is never null is made known not to be, and fields have its metadata.
    """

    def element(one: Column, its: T.DataType, *, may_be_null: bool) -> Column:
        made = _element(one, its, part, may_be_null=may_be_null)
        return Expression.of(made).known_not_null().column() if tells and not may_be_null else made

    if isinstance(kind, T.ArrayType):
        inner, may_be_null = kind.elementType, kind.containsNull
        return F.transform(column, lambda one: element(one, inner, may_be_null=may_be_null))
    if isinstance(kind, T.MapType):
        keys, values, may_be_null = kind.keyType, kind.valueType, kind.valueContainsNull
        column = F.transform_values(column, lambda _, one: element(one, values, may_be_null=may_be_null))
        return F.transform_keys(column, lambda one, _: element(one, keys, may_be_null=False))
    assert isinstance(kind, T.StructType)
    whole, parts = Expression.of(column), []
    for place, (name, one) in enumerate(zip(_stored_names(kind), kind.fields, strict=True)):
        made = element(whole.field(place, one.name).column(), one.dataType, may_be_null=one.nullable)
        parts.append(made.alias(one.name, metadata=one.metadata) if tells else made.alias(name))
    return F.struct(*parts)


def _element(
    column: Column, kind: T.DataType, part: Callable[[Column, T.DataType], Column], *, may_be_null: bool
) -> Column:
    made = part(column, kind)
    # A struct that is made of the fields of none is one; what is not null by its type stays so.
    is_made = isinstance(kind, T.StructType) and made is not column
    return F.when(column.isNotNull(), made) if is_made and may_be_null else made

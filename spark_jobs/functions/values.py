"""Conversion of values between Arrow and Python, as Spark does it for a user's functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime
from math import isinf
from numbers import Integral, Real
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql import types as T

from spark_jobs.plan.spark_errors import StateCallError

_LARGEST_FLOAT = 3.4028234663852886e38
#: Types whose values are converted; values of all others are the same in Arrow and in Python.
_CONVERTED = (T.TimestampType, T.ArrayType, T.MapType, T.StructType)

#: A tuple of Arrow's Python values; users may get other values (:class:`RowValues`).
Raw: TypeAlias = tuple[Any, ...]


def to_python(value: Any, kind: T.DataType) -> Any:
    """Return a value of Arrow as Spark passes it to Python: times in the worker's own zone, structs as rows, maps as dicts."""
    if value is None:
        return None
    if isinstance(kind, T.TimestampType):
        return value.astimezone().replace(tzinfo=None)
    if isinstance(kind, T.ArrayType):
        return [to_python(element, kind.elementType) for element in value]
    if isinstance(kind, T.MapType):
        return {to_python(key, kind.keyType): to_python(item, kind.valueType) for key, item in value}
    if isinstance(kind, T.StructType):
        return T.Row(**{item.name: to_python(value[item.name], item.dataType) for item in kind.fields})
    return value


def to_arrow(value: Any, kind: T.DataType) -> Any:
    """Return a Python value as one that Arrow converts to the type."""
    if value is None:
        return None
    if isinstance(kind, T.TimestampType):
        # A time without a zone is in the worker's own zone, as in Spark.
        return value.astimezone() if isinstance(value, datetime) else value
    if isinstance(kind, T.ArrayType):
        return [to_arrow(element, kind.elementType) for element in value]
    if isinstance(kind, T.MapType):
        return [(to_arrow(key, kind.keyType), to_arrow(item, kind.valueType)) for key, item in value.items()]
    if isinstance(kind, T.StructType):
        values = value if isinstance(value, dict) else dict(zip(kind.names, value, strict=True))
        return {item.name: to_arrow(values.get(item.name), item.dataType) for item in kind.fields}
    return value


#: Number of bits of integer types.
_BITS = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}


def _fits(value: Any, kind: T.DataType) -> bool:
    """Return whether a value fits a type without a change; values that Arrow refuses itself count as fitting.

    Arrow silently truncates 1.5 to 1, and a timestamp to its date.
    """
    if value is None:
        return True
    if isinstance(kind, T.IntegralType):
        half = 1 << (_BITS[type(kind)] - 1)
        return not isinstance(value, bool) and isinstance(value, Integral) and -half <= int(value) < half
    if isinstance(kind, T.FloatType):
        return isinstance(value, Real) and (isinf(value) or not abs(float(value)) > _LARGEST_FLOAT)
    if isinstance(kind, T.StringType):
        return isinstance(value, str)
    if isinstance(kind, T.DateType):
        return isinstance(value, date) and not isinstance(value, datetime)
    if isinstance(kind, T.ArrayType):
        return all(_fits(item, kind.elementType) for item in value)
    if isinstance(kind, T.MapType):
        return all(_fits(key, kind.keyType) and _fits(item, kind.valueType) for key, item in value)
    if isinstance(kind, T.StructType):
        return all(_fits(value[item.name], item.dataType) for item in kind.fields)
    return True


class RowValues:
    """Conversion of tuples of a struct's columns between Python and Arrow; `subject` is the name of the tuples in errors.

    If it `needs_names`, the field names of a Row have to be the columns. If not, the values of a Row with other names are taken in
    order.
    """

    def __init__(self, kind: T.StructType, subject: str, *, needs_names: bool = False) -> None:
        self.kind, self._what, self._needs_names = kind, subject, needs_names
        self._types = [item.dataType for item in kind.fields]
        self._names = sorted(kind.names)
        self._row = T.Row(*kind.names)
        #: Whether tuples are the same in Python and in Arrow.
        self._is_plain = not any(isinstance(kind, _CONVERTED) for kind in self._types)

    def shown(self, raw: Raw) -> tuple[Any, ...]:
        """Return a tuple of Arrow's values as the user gets it."""
        if self._is_plain:
            return raw
        return tuple([to_python(value, kind) for value, kind in zip(raw, self._types, strict=True)])

    def row(self, raw: Raw) -> T.Row:
        """Return a tuple of Arrow's values as a Row of the columns."""
        return self._row(*self.shown(raw))

    def raw(self, user_values: Any) -> Raw:
        """Return Arrow's values of a user's tuple, Row or list; later changes of nested values have no effect.

        The fields of a Row are taken by name, in any order.

        Raises
        ------
        InvalidRequestError
            The number of values is not that of the columns, names differ, or a value does not fit its type.
        """
        values = self._ordered(user_values)
        if values is None or len(values) != len(self._types):
            raise StateCallError(
                f"{self._what} takes a tuple with one value for each of its columns; nothing was changed",
                columns=self.kind.names,
                got=user_values,
            )
        try:
            if not self._is_plain:
                values = tuple([to_arrow(value, kind) for value, kind in zip(values, self._types, strict=True)])
            fitting = [_fits(value, kind) for value, kind in zip(values, self._types, strict=True)]
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise StateCallError(
                f"{self._what} has columns of other types ({error}); nothing was changed",
                type=self.kind.simpleString(),
                got=user_values,
            ) from error
        if not all(fitting):
            item = self.kind.fields[fitting.index(False)]
            raise StateCallError(
                f"{self._what} was given a value that does not fit its column, and would have become another one; nothing was changed; "
                "cast it",
                column=item.name,
                type=item.dataType.simpleString(),
                got=user_values,
            )
        return values

    def _ordered(self, user_values: Any) -> Raw | None:
        """Return the values in the order of the columns; None for anything but a tuple."""
        names = getattr(user_values, "__fields__", None) if isinstance(user_values, T.Row) else None
        if names is None or list(names) == self.kind.names:
            return tuple(user_values) if isinstance(user_values, tuple | list) else None
        if sorted(names) == self._names and len(set(names)) == len(names):
            return tuple([user_values[names.index(name)] for name in self.kind.names])
        if self._needs_names:
            raise StateCallError(
                f"{self._what} was given a Row whose fields are not its columns; nothing was changed; name them as the columns, or "
                "give a tuple in their order",
                columns=self.kind.names,
                fields=list(names),
            )
        return tuple(user_values)

    def tuples(self, arrays: Iterable[pa.Array]) -> list[Raw]:
        """Return the rows of Arrow columns as tuples of Arrow's values."""
        return list(zip(*(array.to_pylist() for array in arrays), strict=True))

    def arrays(self, rows: Sequence[Raw], types: Sequence[pa.DataType]) -> list[pa.Array]:
        """Return rows as Arrow columns.

        Raises
        ------
        InvalidRequestError
            A value does not fit its column.
        """
        columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [[] for _ in types]
        return [
            self._array(values, kind, name) for values, kind, name in zip(columns, types, self.kind.names, strict=True)
        ]

    def _array(self, values: Sequence[Any], kind: pa.DataType, name: str) -> pa.Array:
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise StateCallError(
                f"{self._what} was given a value that does not fit its column ({error}); the batch changed nothing; cast it",
                column=name,
                type=kind,
            ) from error

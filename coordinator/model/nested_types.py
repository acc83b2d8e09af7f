"""Names of nested types in a state's schema: ``array<int32>``, ``map<string,int64 not null>``, ``struct<"a":int32,"b":string>``.

Elements, values and fields may be null unless they are ``not null``. The names of other types are those of
:mod:`coordinator.model.type_names`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

_STARTS = ("array<", "map<", "struct<")
_ATOMIC = re.compile(r"decimal\(\d+,\d+\)|\w+")
_NOT_NULL = " not null"
#: The name of a struct's field, a string of JSON.
_FIELD_NAME = re.compile(r'"(?:[^"\\]|\\.)*"')

#: Arrow type of an atomic type's name, and the name of a type.
TypeOf = Callable[[str], pa.DataType]
NameOf = Callable[[pa.DataType], str]


def is_nested(name: str) -> bool:
    """Return whether a name is one of :func:`nested_name`."""
    return name.startswith(_STARTS)


def has_map(name: str) -> bool:
    """Return whether a type's name is a map, or one of a type with maps in it."""
    return is_nested(name) and "map<" in _FIELD_NAME.sub("", name)


def nested_name(data_type: pa.DataType, name_of: NameOf) -> str | None:
    """Return the name of an array, map or struct; None for any other type.

    Parameters
    ----------
    name_of
        Names any type, and raises ValueError for one that no state can hold.
    """

    def held(field: pa.Field) -> str:
        return name_of(field.type) + ("" if field.nullable else _NOT_NULL)

    if pa.types.is_map(data_type):
        return f"map<{name_of(data_type.key_type)},{held(data_type.item_field)}>"
    if pa.types.is_list(data_type):
        return f"array<{held(data_type.value_field)}>"
    if pa.types.is_struct(data_type):
        fields = (data_type.field(index) for index in range(data_type.num_fields))
        return f"struct<{','.join(f'{json.dumps(field.name)}:{held(field)}' for field in fields)}>"
    return None


class _Reader:
    def __init__(self, name: str, atomic: TypeOf) -> None:
        self._name, self._position, self._atomic = name, 0, atomic

    def _has(self, text: str) -> bool:
        matches = self._name.startswith(text, self._position)
        self._position += len(text) if matches else 0
        return matches

    def type(self) -> pa.DataType:
        if self._has("array<"):
            return self._closed(pa.list_(self._field("element")))
        if self._has("map<"):
            key = pa.field("key", self.type(), nullable=False)
            self._has(",")
            return self._closed(pa.map_(key, self._field("value")))
        if self._has("struct<"):
            fields = []
            while not self._has(">"):
                self._has(",")
                name, end = json.JSONDecoder().raw_decode(self._name, self._position)
                self._position = end + 1  # and the colon
                fields.append(self._field(name))
            return pa.struct(fields)
        match = _ATOMIC.match(self._name, self._position)
        if match is None:
            raise ValueError(f"no name of a type: {self._name}")
        self._position = match.end()
        return self._atomic(match.group())

    def _field(self, name: str) -> pa.Field:
        data_type = self.type()
        return pa.field(name, data_type, nullable=not self._has(_NOT_NULL))

    def _closed(self, data_type: pa.DataType) -> pa.DataType:
        if not self._has(">"):
            raise ValueError(f"no name of a type: {self._name}")
        return data_type


def nested_type(name: str, atomic: TypeOf) -> pa.DataType:
    """Return the Arrow type of a name of :func:`nested_name`.

    Raises
    ------
    ValueError
        It is not such a name.
    """
    return _Reader(name, atomic).type()


def nested_spark_type(data_type: pa.DataType, spark_of: Callable[[pa.DataType], Any]) -> Any:
    """Return Spark's form, as in the JSON of its schemas, of an array, map or struct; None for any other type."""
    if pa.types.is_map(data_type):
        return {
            "type": "map",
            "keyType": spark_of(data_type.key_type),
            "valueType": spark_of(data_type.item_type),
            "valueContainsNull": data_type.item_field.nullable,
        }
    if pa.types.is_list(data_type):
        field = data_type.value_field
        return {"type": "array", "elementType": spark_of(field.type), "containsNull": field.nullable}
    if pa.types.is_struct(data_type):
        fields = (data_type.field(index) for index in range(data_type.num_fields))
        return {
            "type": "struct",
            "fields": [
                {"name": item.name, "type": spark_of(item.type), "nullable": item.nullable, "metadata": {}}
                for item in fields
            ],
        }
    return None

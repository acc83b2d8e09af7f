"""Names of Arrow types, as a state's schema has them, and what such a type is to Arrow and to Spark.

Nested types are named ``array<int32>``, ``map<string,int64 not null>``, ``struct<"a":int32,"b":string>``. Elements, values and fields
may be null unless they are ``not null``.

Beside the types of a user's columns there are those that only accumulators have: lists and counted values, which grow with their
group, histograms, and states of a fixed number of words.
"""

from __future__ import annotations

import base64
import json
import re
from functools import cache
from typing import Any

import pyarrow as pa

_SIMPLE: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "duration": pa.duration("us"),
}

#: Types that hold every value of another one.
_WIDER = {
    "int8": ("int16", "int32", "int64", "float32", "float64"),
    "int16": ("int32", "int64", "float32", "float64"),
    "int32": ("int64", "float64"),
    "float32": ("float64",),
}

_NESTED = ("array<", "map<", "struct<")
_ATOMIC = re.compile(r"decimal\(\d+,\d+\)|\w+")
_NOT_NULL = " not null"
#: The name of a struct's field, a string of JSON.
_FIELD_NAME = re.compile(r'"(?:[^"\\]|\\.)*"')
#: Before the name of an element's type.
_LIST = "list<"
#: Before the type of values that are counted.
_COUNTS = "counts<"
#: Before the type of the centres of a histogram's bins.
_BINS = "bins<"
#: Before the number of 64-bit words of a state that has a fixed number of them.
_WORDS = "words<"
#: Before the Arrow form of a type that only passes.
_ARROW = "arrow:"


def type_to_string(data_type: pa.DataType) -> str:
    """Return the name of an Arrow type in a state's schema; the time zone of a timestamp is dropped, its instant is UTC.

    Raises
    ------
    ValueError
        No state can hold the type.
    """
    if pa.types.is_map(data_type):
        return f"map<{type_to_string(data_type.key_type)},{_held(data_type.item_field)}>"
    if pa.types.is_list(data_type):
        return f"array<{_held(data_type.value_field)}>"
    if pa.types.is_struct(data_type):
        return f"struct<{','.join(f'{json.dumps(field.name)}:{_held(field)}' for field in data_type)}>"
    return _atomic_name(data_type)


def _held(field: pa.Field) -> str:
    return type_to_string(field.type) + ("" if field.nullable else _NOT_NULL)


def _atomic_name(data_type: pa.DataType) -> str:
    if pa.types.is_decimal128(data_type):
        return f"decimal({data_type.precision},{data_type.scale})"
    if pa.types.is_timestamp(data_type):
        return "timestamp" if data_type.tz is not None else "timestamp_ntz"
    for name, simple in _SIMPLE.items():
        if data_type == simple:
            return name
    raise ValueError(f"no state can hold the Arrow type {data_type}")


def is_nested(name: str) -> bool:
    """Return whether a name is that of an array, a map or a struct."""
    return name.startswith(_NESTED)


def has_map(name: str) -> bool:
    """Return whether a type's name is a map, or one of a type with maps in it."""
    return is_nested(name) and "map<" in _FIELD_NAME.sub("", name)


def list_type(element: str) -> str:
    """Return the name of the type of a list that grows with its group; no element is null. Only accumulators have it."""
    return f"{_LIST}{element}>"


def counts_type(value: str) -> str:
    """Return the name of the type of values of a type with their counts. Only accumulators have it, no column of a user's."""
    return f"{_COUNTS}{value}>"


def is_growing(name: str) -> bool:
    """Return whether a type's name is one of :func:`list_type` or :func:`counts_type`."""
    return name.startswith((_LIST, _COUNTS))


def is_counted(name: str) -> bool:
    """Return whether a type's name is one of :func:`counts_type`."""
    return name.startswith(_COUNTS)


def bins_type(centre: str) -> str:
    """Return the name of the type of a histogram that is emitted; `centre` names the type of its bins' centres."""
    return f"{_BINS}{centre}>"


def words_type(words: int) -> str:
    """Return the name of the type of a state of `words` 64-bit words. Only accumulators have it, no column of a user's."""
    return f"{_WORDS}{words}>"


def payload_type(data_type: pa.DataType) -> str:
    """Return the name of the type of a column that only passes an operator; it may be of any type."""
    try:
        return _atomic_name(data_type)
    except ValueError:
        return _ARROW + base64.b64encode(pa.schema([pa.field("", data_type)]).serialize().to_pybytes()).decode()


@cache
def string_to_type(name: str) -> pa.DataType:
    """Return the Arrow type of a name made by a function of this module, from :func:`type_to_string` to :func:`words_type`."""
    if name.startswith(_LIST):
        return pa.list_(pa.field("element", string_to_type(name[len(_LIST) : -1]), nullable=False))
    if name.startswith(_COUNTS):
        value = pa.field("value", string_to_type(name[len(_COUNTS) : -1]), nullable=False)
        counted = pa.struct([value, pa.field("count", pa.int64(), nullable=False)])
        return pa.list_(pa.field("element", counted, nullable=False))
    if name.startswith(_BINS):
        bin_type = pa.struct([pa.field("x", string_to_type(name[len(_BINS) : -1])), pa.field("y", pa.float64())])
        return pa.list_(pa.field("element", bin_type))
    if name.startswith(_WORDS):
        return pa.binary(8 * int(name[len(_WORDS) : -1]))
    if name.startswith("decimal("):
        precision, scale = name[len("decimal(") : -1].split(",")
        return pa.decimal128(int(precision), int(scale))
    if name.startswith(_ARROW):
        serialized = base64.b64decode(name.removeprefix(_ARROW))
        return pa.ipc.read_schema(pa.py_buffer(serialized)).field(0).type
    return _NestedReader(name).type() if is_nested(name) else _SIMPLE[name]


class _NestedReader:
    """Reads the name of a nested type, part by part; raises ValueError where it is no such name."""

    def __init__(self, name: str) -> None:
        self._name, self._position = name, 0

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
        return string_to_type(match.group())

    def _field(self, name: str) -> pa.Field:
        data_type = self.type()
        return pa.field(name, data_type, nullable=not self._has(_NOT_NULL))

    def _closed(self, data_type: pa.DataType) -> pa.DataType:
        if not self._has(">"):
            raise ValueError(f"no name of a type: {self._name}")
        return data_type


def is_wider(before: str, after: str) -> bool:
    """Return whether the type named `after` holds every value of the one named `before`, exactly; of lists, that of their elements."""
    if before.startswith(_LIST) and after.startswith(_LIST):
        return is_wider(before[len(_LIST) : -1], after[len(_LIST) : -1])
    if before.startswith("decimal(") and after.startswith("decimal("):
        (precision, scale), (wider_precision, wider_scale) = (name[8:-1].split(",") for name in (before, after))
        return int(wider_precision) >= int(precision) and wider_scale == scale
    return before == after or after in _WIDER.get(before, ())


#: Names in the JSON of Spark's schemas; decimals are written alike.
_SPARK = {
    "bool": "boolean",
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "float32": "float",
    "float64": "double",
    "date32": "date",
    "duration": "interval day to second",
}


def spark_type(name: str) -> str | dict[str, Any]:
    """Return Spark's form, as in the JSON of its schemas, of a type that a field of a state has."""
    if name.startswith(_LIST):
        return {"type": "array", "elementType": spark_type(name[len(_LIST) : -1]), "containsNull": False}
    if name.startswith(_COUNTS):
        fields = [_part("value", name[len(_COUNTS) : -1], nullable=False), _part("count", "int64", nullable=False)]
        return {"type": "array", "elementType": {"type": "struct", "fields": fields}, "containsNull": False}
    if name.startswith(_BINS):
        fields = [_part("x", name[len(_BINS) : -1], nullable=True), _part("y", "float64", nullable=True)]
        return {"type": "array", "elementType": {"type": "struct", "fields": fields}, "containsNull": True}
    if name.startswith(_WORDS):
        return "binary"
    if is_nested(name):
        return _nested_spark_type(string_to_type(name))
    return _SPARK.get(name, name)


def _nested_spark_type(data_type: pa.DataType) -> dict[str, Any]:
    def spark_of(inner: pa.DataType) -> str | dict[str, Any]:
        return spark_type(type_to_string(inner))

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
    fields = [
        {"name": item.name, "type": spark_of(item.type), "nullable": item.nullable, "metadata": {}}
        for item in data_type
    ]
    return {"type": "struct", "fields": fields}


def _part(name: str, kind: str, *, nullable: bool) -> dict[str, Any]:
    return {"name": name, "nullable": nullable, "type": spark_type(kind), "metadata": {}}

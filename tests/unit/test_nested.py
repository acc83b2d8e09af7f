"""Arrays, maps and structs as bytes: decoding, equality, order, and names of their types."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from pyspark.sql import types as T

from coordinator.model.type_names import has_map, spark_type, string_to_type, type_to_string
from spark_jobs.plan.spark_version import SPARK
from store_actors.engine.nested_kernels import PartKind, compare_nested
from store_actors.engine.words import decode_nested, encode_nested, nested_keys, parts_of
from tests.unit.nested_values import NESTED, arrays, identity

COLUMNS = NESTED.flatmap(arrays)


def packed(array: pa.Array) -> pa.BinaryArray:
    return nested_keys(array).cast(pa.binary())


@given(array=COLUMNS)
@settings(max_examples=300, deadline=None)
def test_values_come_back_as_they_were(array: pa.Array) -> None:
    back = decode_nested(packed(array), array.type)
    back.validate(full=True)
    assert back.type == array.type
    assert identity(back.to_pylist()) == identity(array.to_pylist())


@given(array=COLUMNS)
@settings(max_examples=300, deadline=None)
def test_values_are_equal_if_their_bytes_are(array: pa.Array) -> None:
    values = [identity(value) for value in array.to_pylist()]
    data = packed(array).to_pylist()
    for left, left_bytes in zip(values, data, strict=True):
        for right, right_bytes in zip(values, data, strict=True):
            assert (left == right) == (left_bytes == right_bytes)


def test_values_under_a_null_make_no_difference() -> None:
    """Arrow keeps the values of a list or string that was made null."""
    strings = pa.array(["hidden", "b"]).filter(pa.array([True, True]))
    bitmap = pa.py_buffer(b"\x02")
    hiding = pa.Array.from_buffers(pa.string(), 2, [bitmap, *strings.buffers()[1:]])
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), hiding)
    nulls = pa.Array.from_buffers(lists.type, 2, [bitmap, lists.buffers()[1]], children=[hiding])
    assert packed(lists).to_pylist() == packed(pa.array([[None, "b"], []])).to_pylist()
    assert packed(nulls).to_pylist() == packed(pa.array([None, []], pa.list_(pa.string()))).to_pylist()
    data, ends = encode_nested(nulls)
    plain, plain_ends = encode_nested(pa.array([None, []], pa.list_(pa.string())))
    assert (data == plain).all()
    assert (ends == plain_ends).all()


@given(kind=NESTED)
@settings(max_examples=200, deadline=None)
def test_a_type_round_trips_through_its_name(kind: pa.DataType) -> None:
    name = type_to_string(kind)
    assert string_to_type(name) == kind
    assert type_to_string(string_to_type(name)) == name
    spark_schema = T.StructType.fromJson(
        {"type": "struct", "fields": [{"name": "c", "type": spark_type(name), "nullable": True, "metadata": {}}]}
    )
    assert SPARK.arrow_type(spark_schema["c"].dataType) == kind


def test_names_of_types_are_readable_and_stable() -> None:
    kind = pa.struct(
        [
            pa.field("a,b", pa.list_(pa.field("element", pa.decimal128(5, 2), nullable=False))),
            pa.field(
                "map<", pa.map_(pa.string(), pa.list_(pa.field("element", pa.timestamp("us", "CET")))), nullable=False
            ),
        ]
    )
    name = type_to_string(kind)
    assert name == 'struct<"a,b":array<decimal(5,2) not null>,"map<":map<string,array<timestamp>> not null>'
    assert has_map(name)
    assert not has_map('struct<"map<\\"":array<int8>>')
    assert not has_map("string")
    assert json.loads(json.dumps(name)) == name
    for wrong in ("array<int8", "array<>", "map<int8,"):
        with pytest.raises((ValueError, KeyError)):
            string_to_type(wrong)


SMALLER_AND_LARGER = {
    PartKind.INTEGER: (pa.int16(), -1, 0),
    PartKind.FLOAT: (pa.float64(), -0.5, 0.25),
    PartKind.TEXT: (pa.string(), "a", "ab"),
    PartKind.LIST: (pa.list_(pa.int32()), [1], [1, 0]),
    PartKind.STRUCT: (pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": 1, "b": "x"}, {"a": 1, "b": "y"}),
}


def compare(data_type: pa.DataType, values: list[Any], parts: list[tuple[int, int]]) -> int:
    """Return the order of the first of two values and the second."""
    data, offsets = encode_nested(pa.array(values, data_type))
    return int(compare_nested(data, offsets, 0, 1, np.array(parts, np.int64), 0))


@pytest.mark.parametrize("kind", PartKind)
def test_each_kind_is_compared_by_value(kind: PartKind) -> None:
    data_type, smaller, larger = SMALLER_AND_LARGER[kind]
    parts = parts_of(data_type)
    assert parts[0][0] & 7 == kind
    assert compare(data_type, [smaller, larger], parts) < 0
    assert compare(data_type, [larger, smaller], parts) > 0
    assert compare(data_type, [larger, larger], parts) == 0
    assert compare(data_type, [None, smaller], parts) < 0


@pytest.mark.parametrize("kind", [5, 6, 7])
def test_an_unknown_kind_raises(kind: int) -> None:
    assert kind not in list(PartKind)
    struct = pa.struct([("a", pa.int32())])
    within = [(2 << 3 | PartKind.STRUCT, 1), (1 << 3 | kind, 4)]
    for data_type, values, parts in ((pa.int32(), [1, 2], within[1:]), (struct, [{"a": 1}, {"a": 2}], within)):
        with pytest.raises(ValueError, match="no part of a type has this kind"):
            compare(data_type, values, parts)

"""Kinds of the parts of nested types: each is compared by value, and one that is unknown raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from store_actors.engine.nested_kernels import PartKind, compare_nested
from store_actors.engine.words import encode_nested, parts_of

SMALLER_AND_LARGER = {
    PartKind.INTEGER: (pa.int16(), -1, 0),
    PartKind.FLOAT: (pa.float64(), -0.5, 0.25),
    PartKind.TEXT: (pa.string(), "a", "ab"),
    PartKind.LIST: (pa.list_(pa.int32()), [1], [1, 0]),
    PartKind.STRUCT: (pa.struct([("a", pa.int8()), ("b", pa.string())]), {"a": 1, "b": "x"}, {"a": 1, "b": "y"}),
}
UNKNOWN = (5, 6, 7)


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


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_kind_raises(kind: int) -> None:
    assert kind not in list(PartKind)
    with pytest.raises(ValueError, match="no part of a type has this kind"):
        compare(pa.int32(), [1, 2], [(1 << 3 | kind, 4)])


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_kind_within_a_struct_raises(kind: int) -> None:
    struct = pa.struct([("a", pa.int32())])
    with pytest.raises(ValueError, match="no part of a type has this kind"):
        compare(struct, [{"a": 1}, {"a": 2}], [(2 << 3 | PartKind.STRUCT, 1), (1 << 3 | kind, 4)])

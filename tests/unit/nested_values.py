"""Hypothesis strategies of column types and of their values."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

ATOMIC = [
    pa.bool_(),
    pa.int8(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", tz="UTC"),
    pa.duration("us"),
    pa.decimal128(38, 4),
]


def _containers(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    keys = st.sampled_from([pa.int8(), pa.string()])
    fields = st.lists(st.tuples(inner, st.booleans()), min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda kind, null: pa.list_(pa.field("element", kind, null)), inner, st.booleans()),
        st.builds(
            lambda key, kind, null: pa.map_(pa.field("key", key, nullable=False), pa.field("value", kind, null)),
            keys,
            inner,
            st.booleans(),
        ),
        fields.map(
            lambda kinds: pa.struct([pa.field(f'f "{i}",', kind, null) for i, (kind, null) in enumerate(kinds)])
        ),
    )


#: Arrays, maps and structs of atomic types and of each other.
NESTED = _containers(st.recursive(st.sampled_from(ATOMIC), _containers, max_leaves=4))


def values(kind: pa.DataType, *, nullable: bool = True) -> st.SearchStrategy[Any]:
    """Return a strategy of few values of a type, so that equal values meet."""
    non_null = _values(kind)
    return st.one_of(st.none(), non_null) if nullable else non_null


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_map(kind):
        items = values(kind.item_type, nullable=kind.item_field.nullable)
        return st.lists(
            st.tuples(values(kind.key_type, nullable=False), items), max_size=2, unique_by=lambda item: item[0]
        )
    if pa.types.is_list(kind):
        return st.lists(values(kind.value_type, nullable=kind.value_field.nullable), max_size=3)
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return st.fixed_dictionaries({field.name: values(field.type, nullable=field.nullable) for field in fields})
    if pa.types.is_decimal(kind):
        return st.sampled_from(
            [Decimal("0.0000"), Decimal("1000000000000000000000000000000000.0000"), Decimal("-1.5000")]
        )
    samples: dict[pa.DataType, list[Any]] = {
        pa.bool_(): [False, True],
        pa.string(): ["", "a", "ä", "longer than a word"],
        pa.binary(): [b"", b"\0", b"\0\0"],
        pa.date32(): [date(1970, 1, 1), date(2024, 2, 29)],
        pa.duration("us"): [timedelta(0), timedelta(days=-1, microseconds=1)],
    }
    if pa.types.is_timestamp(kind):
        return st.sampled_from([datetime(1970, 1, 1, tzinfo=UTC), datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC)])
    if pa.types.is_floating(kind):
        return st.sampled_from([0.0, -0.0, 1.5, float("inf"), float("nan")])
    return st.sampled_from(samples.get(kind, [0, 1, -1, 127]))


def identity(value: Any) -> str:
    """Return a text that two values share if they are the same: floats by their sign too, NaN equal to NaN, times by their instant."""
    if isinstance(value, dict):
        return repr(sorted((name, identity(field)) for name, field in value.items()))
    if isinstance(value, list | tuple):
        return repr([identity(element) for element in value])
    if isinstance(value, datetime):
        return repr(value.astimezone(UTC).isoformat())
    return repr(value)


def arrays(kind: pa.DataType, *, max_size: int = 8) -> st.SearchStrategy[pa.Array]:
    """Return a strategy of columns of a type, also slices of longer columns."""

    def cut(elements: list[Any], before: int) -> pa.Array:
        return pa.array(elements, kind)[min(before, len(elements)) :]

    return st.builds(cut, st.lists(values(kind), max_size=max_size), st.integers(0, 2))

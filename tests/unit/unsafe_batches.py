"""Rows of all types that are sent in Spark's own format."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
from hypothesis import strategies as st

_INTEGERS = {
    pa.int8(): 7,
    pa.int16(): 15,
    pa.int32(): 31,
    pa.int64(): 63,
    pa.date32(): 20,
    pa.timestamp("us", "UTC"): 60,
}
_VALUES: dict[pa.DataType, st.SearchStrategy[object]] = {
    **{kind: st.integers(-(2**bits), 2**bits - 1) for kind, bits in _INTEGERS.items()},
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.decimal128(18, 2): st.integers(1 - 10**18, 10**18 - 1).map(lambda value: Decimal(value).scaleb(-2)),
    pa.string(): st.text(max_size=20),
    pa.binary(): st.binary(max_size=20),
}


def _column(kind: pa.DataType, values: list[object]) -> pa.Array:
    whole = pa.int32() if pa.types.is_date32(kind) else pa.int64() if pa.types.is_timestamp(kind) else kind
    return pa.array(values, whole).cast(kind)


@st.composite
def batches_of_all_types(draw: st.DrawFn) -> pa.RecordBatch:
    """Draw rows of some of the types that Spark's format has in one word, or as texts."""
    kinds = draw(st.lists(st.sampled_from(list(_VALUES)), min_size=1, max_size=5))
    kinds += draw(st.sampled_from([[], [pa.int64()] * 66]))
    size = draw(st.integers(1, 20))
    columns = [_column(kind, draw(st.lists(st.none() | _VALUES[kind], min_size=size, max_size=size))) for kind in kinds]
    return pa.RecordBatch.from_arrays(columns, names=[f"c{number}" for number in range(len(kinds))])

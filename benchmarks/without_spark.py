"""Keys as text, and the schema of counts and sums: what benchmarks without Spark need, too."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema

#: Counts and sums by an integer key.
COUNT_AND_SUM = StateSchema(
    keys=(Field("k", "int64"),),
    inputs=(Field("v", "int64"),),
    accumulators=(
        Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),
        Accumulator(AccumulatorKind.SUM_INT, ("v",), (Field("total", "int64"),)),
    ),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)
_DASHES = (8, 13, 18, 23)


def uuids(count: int) -> pa.Array:
    """Return random UUIDs as text, the same for the same number."""
    digits = np.frombuffer(np.random.default_rng(count).bytes(16 * count).hex().encode(), "S1").reshape(count, 32)
    text = np.full((count, 36), b"-", "S1")
    text[:, [place for place in range(36) if place not in _DASHES]] = digits
    offsets = pa.py_buffer(np.arange(0, 36 * count + 1, 36, dtype=np.int32))
    return pa.StringArray.from_buffers(count, offsets, pa.py_buffer(text.tobytes()))

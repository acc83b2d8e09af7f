"""The state of the benchmarks that run without Spark."""

from __future__ import annotations

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

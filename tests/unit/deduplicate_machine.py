"""State machine of a deduplication shard, and its rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from coordinator.model.type_names import payload_type
from store_actors.messages.requests import ShardInput
from store_actors.operators.deduplicate import DeduplicateShard
from tests.unit.shard_machine import OperatorMachine

DELAY_S = 3
NESTED = pa.list_(pa.struct([("x", pa.int32())]))
EXPIRES = Field("expires", "timestamp")
WITHIN = StateSchema(
    keys=(Field("k", "string"),),
    inputs=(Field("payload", payload_type(NESTED)), EXPIRES),
    accumulators=(Accumulator(AccumulatorKind.VALUE, (), (EXPIRES,)),),
    expiry_key="expires",
    delay_ms=DELAY_S * 1000,
    output_mode="append",
    operator=OperatorKind.DEDUPLICATE,
    options={"late_us": DELAY_S * 1_000_000},
)


ROW = st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.none() | st.integers(0, 12), st.integers(0, 99))
Row = tuple[str | None, int | None, int]
#: Keys with the second at which each expires, and the watermark in seconds.
DeduplicateModel = tuple[dict[str | None, int], int]


def input_of(rows: list[Row]) -> ShardInput:
    columns = [
        pa.array([key for key, _, _ in rows], pa.string()),
        pa.array([[{"x": value}] for _, _, value in rows], NESTED),
        pa.array(
            [None if time is None else (time + DELAY_S) * 1_000_000 for _, time, _ in rows],
            pa.timestamp("us", tz="UTC"),
        ),
    ]
    return ShardInput.of_raw(WITHIN, pa.record_batch(columns, schema=WITHIN.raw_schema()))


class DeduplicateMachine(OperatorMachine[DeduplicateModel]):
    def __init__(self) -> None:
        super().__init__()
        self.begin(({}, 0))

    def new_shard(self) -> DeduplicateShard:
        return DeduplicateShard(WITHIN)

    def no_rows(self) -> ShardInput:
        return input_of([])

    def _after(self, rows: list[Row], watermark: int) -> tuple[DeduplicateModel, list[Any], int, int]:
        """Return the next model, the (key, value) pairs that are emitted, and the numbers of late and of removed rows."""
        state, late_by = self.newest
        state, first, late = dict(state), [], 0
        for key, time, value in rows:
            if time is not None and time <= late_by:
                late += 1
            elif key not in state:
                state[key] = (time or 0) + DELAY_S
                first.append((key, value))
        retained = {key: expires for key, expires in state.items() if expires > watermark}
        return (retained, watermark), first, late, len(state) - len(retained)

    @precondition(lambda self: self.pending is None)
    @rule(rows=st.lists(ROW, max_size=12), forward=st.integers(0, 4))
    def apply(self, rows: list[Row], forward: int) -> None:
        watermark = self.newest[1] + forward
        model, first, late, removed = self._after(rows, watermark)
        change = self.apply_input(input_of(rows), watermark * 1000)
        emitted = [(row["k"], row["payload"][0]["x"]) for row in self.shard.output(change.delta).to_pylist()]
        assert emitted == first
        assert (change.rows_in, change.rows_late) == (len(rows), late)
        assert (change.rows_updated, change.rows_removed) == (len(first), removed)
        self.applied(change, model)

    def check(self, model: DeduplicateModel) -> None:
        state, watermark = model
        rows = self.shard.snapshot()
        expires = [value // 1_000_000 for value in rows.column("expires").cast(pa.int64()).to_pylist()]
        assert dict(zip(rows.column("k").to_pylist(), expires, strict=True)) == state
        assert len(self.shard) == len(state)
        assert self.pending is not None or self.watermark_ms == watermark * 1000

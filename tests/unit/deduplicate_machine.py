"""State machine of a deduplication shard, and its rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from coordinator.model.schema import Accumulator, AccumulatorKind, Field, OperatorKind, StateSchema
from coordinator.model.type_names import payload_type
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change
from store_actors.messages import ShardInput
from store_actors.operators.deduplicate import DeduplicateShard
from tests.unit.compacting import CompactingMachine

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
State = dict[str | None, int]


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


class DeduplicateMachine(CompactingMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shard = DeduplicateShard(WITHIN)
        #: version -> (keys with the second at which they expire, watermark in seconds)
        self.versions: dict[int, tuple[State, int]] = {0: ({}, 0)}
        self.changes: dict[int, tuple[int, Change]] = {}
        self.pending: tuple[Change, State, int] | None = None

    def _after(self, rows: list[Row], watermark: int) -> tuple[State, list[Any], int, int]:
        state, late_by = self.versions[self.shard.version]
        state, first, late = dict(state), [], 0
        for key, time, value in rows:
            if time is not None and time <= late_by:
                late += 1
            elif key not in state:
                state[key] = (time or 0) + DELAY_S
                first.append((key, value))
        left = {key: expires for key, expires in state.items() if expires > watermark}
        return left, first, late, len(state) - len(left)

    @precondition(lambda self: self.pending is None)
    @rule(rows=st.lists(ROW, max_size=12), forward=st.integers(0, 4))
    def apply(self, rows: list[Row], forward: int) -> None:
        base = self.shard.version
        watermark = self.versions[base][1] + forward
        left, first, late, removed = self._after(rows, watermark)
        change = self.shard.apply(input_of(rows), watermark * 1000, base + 1)
        emitted = [(row["k"], row["payload"][0]["x"]) for row in self.shard.output(change.delta).to_pylist()]
        assert emitted == first
        assert (change.rows_in, change.rows_late) == (len(rows), late)
        assert (change.rows_updated, change.rows_removed) == (len(first), removed)
        self.pending = (change, left, watermark)

    @precondition(lambda self: self.pending is not None)
    @rule(commits=st.booleans())
    def end(self, commits: bool) -> None:
        assert self.pending is not None
        change, left, watermark = self.pending
        self.pending = None
        if commits:
            base = self.shard.version
            self.shard.commit()
            self.versions[change.version], self.changes[change.version] = (left, watermark), (base, change)
        else:
            self.shard.abort()
        self.check()

    @precondition(lambda self: self.pending is None)
    @rule(back=st.integers(0, 3))
    def rollback(self, back: int) -> None:
        version = max(0, self.shard.version - back)
        reachable = version in self.shard.retained()
        assert self.shard.rollback(version) == reachable
        self.check()

    @precondition(lambda self: self.pending is None)
    @rule(by_snapshot=st.booleans())
    def reload(self, by_snapshot: bool) -> None:
        version, fresh = self.shard.version, DeduplicateShard(WITHIN)
        if by_snapshot:
            rows = self.shard.snapshot()
            kinds = pa.array([UPDATED] * len(rows), pa.int8())
            fresh.load(rows.append_column(CHANGE_COLUMN, kinds), version, self.shard.watermark_ms)
        else:
            chain, at = [], version
            while at:
                chain.append(self.changes[at][1])
                at = self.changes[at][0]
            for change in reversed(chain):
                fresh.load(change.delta, change.version, change.watermark_ms)
        self.shard = fresh
        self.check()

    def check(self) -> None:
        state, watermark = self.versions[self.shard.version]
        rows = self.shard.snapshot()
        expires = [value // 1_000_000 for value in rows.column("expires").cast(pa.int64()).to_pylist()]
        assert dict(zip(rows.column("k").to_pylist(), expires, strict=True)) == state
        assert len(self.shard) == len(state)
        assert self.shard.version == 0 or self.shard.watermark_ms == watermark * 1000

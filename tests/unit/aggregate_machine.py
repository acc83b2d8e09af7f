"""State machine of an aggregate shard, and its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from store_actors.engine.table import GroupTable
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard, output_of
from tests.unit.operator_machine import OperatorMachine

SECOND = 1_000_000
SCHEMA = StateSchema(
    keys=(Field("end", "timestamp"), Field("user", "string")),
    inputs=(Field("amount", "int64"), Field("label", "string")),
    accumulators=(
        Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),
        Accumulator(AccumulatorKind.SUM_INT, ("amount",), (Field("total", "int64"),)),
        Accumulator(AccumulatorKind.MAX, ("label",), (Field("top", "string"),)),
    ),
    expiry_key="end",
    delay_ms=2000,
    output_mode="update",
)


ROW = st.tuples(
    st.one_of(st.none(), st.integers(0, 30)),
    st.one_of(st.none(), st.sampled_from(["", "a", "b", "ab", "ä"])),
    st.one_of(st.none(), st.integers(-(2**62), 2**62)),
    st.one_of(st.none(), st.text(max_size=3)),
)


Key = tuple[int | None, str | None]
Groups = dict[Key, tuple[int, int | None, str | None]]


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    ends, users, amounts, labels = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pa.record_batch(
        [
            pa.array([None if end is None else end * SECOND for end in ends], pa.timestamp("us", tz="UTC")),
            pa.array(users, pa.string()),
            pa.array(amounts, pa.int64()),
            pa.array(labels, pa.string()),
        ],
        schema=SCHEMA.raw_schema(),
    )


def input_of(*raw: pa.RecordBatch, combined: Sequence[pa.RecordBatch] = ()) -> ShardInput:
    """A shard's input of which some batches were each partially aggregated by a map task."""
    partial = [SCHEMA.row_schema().empty_table()]
    for batch in combined:
        table = GroupTable(SCHEMA)
        table.accumulate(table.encode(batch), 1)
        partial.append(table.decode(table.rows[table.live()]))
    raw_input = ShardInput.of_raw(SCHEMA, *raw)
    return ShardInput(
        (raw_input.raw, pa.concat_tables(partial)), raw_input.rows_read + sum(batch.num_rows for batch in combined)
    )


def groups_of(table: pa.Table) -> Groups:
    groups: Groups = {}
    ends = table.column("end").cast(pa.int64()).to_pylist()
    for end, row in zip(ends, table.to_pylist(), strict=True):
        key = (None if end is None else end // SECOND, row["user"])
        assert key not in groups, "a group appears twice"
        groups[key] = (row["n"], row["total"], row["top"])
    return groups


def wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


class AggregateModel:
    def __init__(self, groups: Groups, watermark_ms: int) -> None:
        self.groups, self.watermark_ms = groups, watermark_ms

    def after(self, rows: list[tuple[Any, ...]], max_event_ms: int | None) -> tuple[AggregateModel, Groups, Groups]:
        """(next version, updated groups, closed groups)"""
        groups, touched = dict(self.groups), set()
        for end, user, amount, label in rows:
            if end is not None and end * 1000 <= self.watermark_ms:
                continue
            n, total, top = groups.get((end, user), (0, None, None))
            if amount is not None:
                total = amount if total is None else wrap(total + amount)
            if label is not None and (top is None or label.encode() > top.encode()):
                top = label
            groups[end, user] = (n + 1, total, top)
            touched.add((end, user))
        watermark = self.watermark_ms
        if max_event_ms is not None:
            watermark = max(watermark, max_event_ms - 2000)
        closed = {key: row for key, row in groups.items() if key[0] is not None and key[0] * 1000 <= watermark}
        updated = {key: groups[key] for key in touched}
        open_groups = {key: row for key, row in groups.items() if key not in closed}
        return AggregateModel(open_groups, watermark), updated, closed

    def late(self, rows: list[tuple[Any, ...]]) -> int:
        """Groups of late rows, each of which Spark adds up to one before it counts."""
        return len({row[:2] for row in rows if row[0] is not None and row[0] * 1000 <= self.watermark_ms})


class AggregateMachine(OperatorMachine[AggregateModel]):
    def __init__(self) -> None:
        super().__init__()
        self.begin(AggregateModel({}, 0))

    def new_shard(self) -> AggregateShard:
        return AggregateShard(SCHEMA)

    def no_rows(self) -> ShardInput:
        return input_of()

    @precondition(lambda self: self.pending is None)
    @rule(
        rows=st.lists(ROW, max_size=25),
        parts=st.integers(1, 3),
        combined=st.integers(0, 3),
        event=st.one_of(st.none(), st.integers(0, 30)),
    )
    def apply(self, rows: list[tuple[Any, ...]], parts: int, combined: int, event: int | None) -> None:
        model, updated, closed = self.newest.after(rows, None if event is None else event * 1000)
        batches = [batch_of(rows[part::parts]) for part in range(parts)]
        change = self.apply_input(input_of(*batches[combined:], combined=batches[:combined]), model.watermark_ms)
        assert (change.rows_in, change.rows_late) == (len(rows), self.newest.late(rows))
        assert (change.rows_updated, change.rows_removed) == (len(updated), len(closed))
        assert groups_of(output_of(change.delta, "update")) == updated
        assert groups_of(output_of(change.delta, "append")) == closed
        self.applied(change, model)

    def check(self, model: AggregateModel) -> None:
        assert groups_of(self.shard.snapshot()) == model.groups
        assert len(self.shard) == len(model.groups)

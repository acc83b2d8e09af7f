"""State machine of an aggregate shard, and its rows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.model.type_names import list_type
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard, output_of
from tests.unit import accumulator_inputs
from tests.unit.shard_machine import OperatorMachine

K = AccumulatorKind
SECOND = 1_000_000


def collected(kind: AccumulatorKind, column: str, type_name: str, name: str) -> Accumulator:
    return Accumulator(kind, (column,), (Field(name, list_type(type_name), False),))


def distinct(values: Sequence[Any]) -> list[Any]:
    """Return the first of equal values, in order. No NaN equals another NaN."""
    firsts: list[Any] = []
    for value in values:
        if (isinstance(value, float) and math.isnan(value)) or value not in firsts:
            firsts.append(value)
    return firsts


def exact(values: Sequence[Any]) -> list[Any]:
    """Return values that differ also where Python's do not: -0.0 and 0.0."""
    return [repr(value) if isinstance(value, float) else value for value in values]


SCHEMA = StateSchema(
    keys=(Field("end", "timestamp"), Field("user", "string")),
    inputs=(Field("word", "string"), Field("amount", "decimal(20,2)"), Field("x", "float64")),
    accumulators=(
        collected(K.COLLECT_LIST, "word", "string", "words"),
        Accumulator(K.MAX, ("word",), (Field("top", "string"),)),
        collected(K.COLLECT_SET, "word", "string", "word_set"),
        collected(K.COLLECT_SET, "amount", "decimal(20,2)", "amounts"),
        collected(K.COLLECT_SET, "x", "float64", "xs"),
    ),
    expiry_key="end",
    delay_ms=2000,
    output_mode="update",
)


Row = tuple[int | None, str | None, str | None, Decimal | None, float | None]
Key = tuple[int | None, str | None]
Groups = dict[Key, list[Row]]


def rows_of(seed: int, size: int) -> list[Row]:
    """Return rows of few groups, so that lists get long."""
    chance = random.Random(seed)
    return [
        (
            chance.choice([2, 2, 4, 4, 6, None]),
            chance.choice([*"aab", "", None]),
            chance.choice([None, "", "ä", *(f"w{n}" for n in range(40))]),
            chance.choice([None, *(Decimal(n) * 10**16 for n in range(-20, 20))]),
            chance.choice([None, math.nan, -0.0, *(n / 2 for n in range(-9, 9))]),
        )
        for _ in range(size)
    ]


#: The rows of a batch in parts, each as a map task sends it.
PARTS = st.lists(st.builds(rows_of, st.integers(0, 2**32), st.integers(0, 60)), max_size=3)


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    in_micros = [(None if end is None else end * SECOND, *others) for end, *others in rows]
    return accumulator_inputs.batch_of(SCHEMA, in_micros)


def input_of(*raw: Sequence[Row], combined: Sequence[Sequence[Row]] = ()) -> ShardInput:
    """A shard's input of which some parts were each partially aggregated by a map task."""
    partial = [SCHEMA.row_schema().empty_table()]
    partial += [accumulator_inputs.combined_by_a_task(SCHEMA, batch_of(rows)) for rows in combined]
    uncombined = ShardInput.of_raw(SCHEMA, *map(batch_of, raw))
    return ShardInput((uncombined.raw, pa.concat_tables(partial)), sum(map(len, (*raw, *combined))))


def is_over(key: Sequence[Any], watermark_ms: int) -> bool:
    return key[0] is not None and key[0] * 1000 <= watermark_ms


def expected_groups(groups: Groups) -> dict[Key, tuple[Any, ...]]:
    def of(rows: list[Row], index: int) -> list[Any]:
        return [row[index] for row in rows if row[index] is not None]

    return {
        key: (
            of(rows, 2),
            max(of(rows, 2), key=str.encode, default=None),
            distinct(of(rows, 2)),
            distinct(of(rows, 3)),
            exact(distinct(of(rows, 4))),
        )
        for key, rows in groups.items()
    }


def groups_of(table: pa.Table) -> dict[Key, tuple[Any, ...]]:
    ends = table.column("end").cast(pa.int64()).to_pylist()
    groups = {
        (None if end is None else end // SECOND, row["user"]): (
            row["words"], row["top"], row["word_set"], row["amounts"], exact(row["xs"]),
        )
        for end, row in zip(ends, table.to_pylist(), strict=True)
    }  # fmt: skip
    assert len(groups) == table.num_rows, "a group appears twice"
    return groups


class AggregateMachine(OperatorMachine[Groups]):
    """A shard against the rows of its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.begin({})

    def new_shard(self) -> AggregateShard:
        return AggregateShard(SCHEMA)

    def no_rows(self) -> ShardInput:
        return input_of()

    @precondition(lambda self: self.pending is None)
    @rule(
        raw=PARTS,
        combined=PARTS,
        forward=st.sampled_from([0, 0, 0, 1]),
        then=st.sampled_from(["commit", "commit", "abort", "wait"]),
    )
    def apply(self, raw: list[list[Row]], combined: list[list[Row]], forward: int, then: str) -> None:
        before, rows = self.watermark_ms, [row for part in (*raw, *combined) for row in part]
        groups = {key: list(of_key) for key, of_key in self.newest.items()}
        for row in rows:
            if not is_over(row, before):
                groups.setdefault(row[:2], []).append(row)
        touched = {row[:2] for row in rows if not is_over(row, before)}
        watermark = before + 1000 * forward
        change = self.apply_input(input_of(*raw, combined=combined), watermark)
        closed = {key: of_key for key, of_key in groups.items() if is_over(key, watermark)}
        # Spark adds the rows of a group up to one before it counts those that are late.
        late = {row[:2] for row in rows if is_over(row, before)}
        assert (change.rows_updated, change.rows_removed, change.rows_late) == (len(touched), len(closed), len(late))
        assert groups_of(output_of(change.delta, "update")) == expected_groups({key: groups[key] for key in touched})
        assert groups_of(output_of(change.delta, "append")) == expected_groups(closed)
        self.applied(change, {key: of_key for key, of_key in groups.items() if key not in closed})
        self.equals_model()
        if then == "commit":
            self.commit()
        elif then == "abort":
            self.abort()

    def check(self, model: Groups) -> None:
        assert groups_of(self.shard.snapshot()) == expected_groups(model)
        assert len(self.shard) == len(model)

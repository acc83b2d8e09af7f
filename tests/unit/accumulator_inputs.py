"""Inputs of accumulators side by side, what each is expected to come to for the rows of one group, and what a shard comes to."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import strategies as st
from msgspec import structs

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.operators.aggregate_results import results_of

Rows = list[tuple[Any, ...]]
combined_or_not = pytest.mark.parametrize("combined", [False, True])
#: Values of every type that an accumulator takes.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int8": st.integers(-128, 127),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0])),
    "float64": st.one_of(st.floats(), st.sampled_from([0.0, -0.0])),
    "string": st.text(max_size=6),
    "binary": st.binary(max_size=6),
    "date32": st.dates(dt.date(1900, 1, 1), dt.date(2200, 1, 1)),
    "timestamp": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC)),
    "timestamp_ntz": st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1)),
    "duration": st.timedeltas(dt.timedelta(days=-1000), dt.timedelta(days=1000)),
    "decimal(7,2)": st.decimals(Decimal("-99999.99"), Decimal("99999.99"), places=2),
    "decimal(38,0)": st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal),
}


@dataclass(frozen=True)
class Given:
    """The rows of one group by part, and whether each part is combined by a table of its own before it is merged."""

    parts: list[Rows]
    combined: bool

    @property
    def rows(self) -> Rows:
        return [row for part in self.parts for row in part]

    @property
    def values(self) -> list[Any]:
        """The first column without its nulls."""
        return [value for value, *_ in self.rows if value is not None]

    def totals(self) -> Iterator[int]:
        """Yield each sum on the way, of which none may leave its type: those of each part, too, if it is combined."""
        total = 0
        for part in self.parts:
            inner = 0
            for value, *_ in part:
                inner += int(value or 0)
                yield inner if self.combined else total + inner
            total += inner
            yield total


class Such:
    """Equals what `holds` is true of."""

    def __init__(self, holds: Callable[[Any], object]) -> None:
        self._holds = holds

    def __eq__(self, value: object) -> bool:
        return bool(self._holds(value))

    __hash__ = None  # type: ignore[assignment]


#: What an accumulator emits of its rows: a value, or a tuple of the values of all that it emits.
Expected = Callable[[Given], Any]


@dataclass(frozen=True)
class Inputs:
    """Accumulators over the same columns, side by side.

    Attributes
    ----------
    types, values
        The columns' types, and strategies of their values.
    accumulators
        Each with what it emits. Names of their fields are those of their places.
    examples
        How many examples are tried.
    """

    types: list[str]
    values: list[st.SearchStrategy[Any]]
    accumulators: list[tuple[Accumulator, Expected]]
    examples: int = 25

    @property
    def schema(self) -> StateSchema:
        def named(fields: Sequence[Field], place: int) -> tuple[Field, ...]:
            return tuple(structs.replace(field, name=f"a{place}_{number}") for number, field in enumerate(fields))

        placed = (
            structs.replace(item, state=named(item.state, place), result=named(item.result, place))
            for place, (item, _) in enumerate(self.accumulators)
        )
        return schema_of(*placed, types=self.types)

    @property
    def parts(self) -> st.SearchStrategy[list[Rows]]:
        """Parts of rows with a key before the values."""
        row = st.tuples(st.integers(0, 1), *(st.one_of(st.none(), values) for values in self.values))
        return st.lists(st.lists(row, min_size=1, max_size=10), min_size=1, max_size=3)


def of(
    kind: AccumulatorKind,
    state: Sequence[str],
    expected: Expected,
    *,
    inputs: int = 1,
    result: Sequence[str] = (),
    **options: Any,
) -> tuple[Accumulator, Expected]:
    """An accumulator whose state and result have these types, of which those with ``!`` are never null."""
    states, results = (
        tuple(Field("", name.removesuffix("!"), not name.endswith("!")) for name in names) for names in (state, result)
    )
    columns = tuple(f"v{number}" for number in range(inputs))
    return Accumulator(kind, columns, states, result=results, options=options), expected


# -- shards -----------------------------------------------------------------------------------------------------------


def schema_of(*accumulators: Accumulator, types: list[str], key: str = "int64") -> StateSchema:
    inputs = tuple(Field(f"v{number}", name) for number, name in enumerate(types))
    return StateSchema((Field("k", key),), inputs, accumulators, None, None, "update")


def batch_of(schema: StateSchema, rows: Rows) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema.raw_schema())
    return pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, schema.raw_schema(), strict=True)],
        schema=schema.raw_schema(),
    )


def combined_by_a_task(schema: StateSchema, batch: pa.RecordBatch) -> pa.Table:
    """Return the groups of rows that a map task combines."""
    groups = GroupTable(schema)
    groups.accumulate(groups.encode(batch), 1)
    return groups.decode(groups.rows[groups.live()])


def input_of(schema: StateSchema, rows: Rows, *, combined: bool) -> ShardInput:
    """Return rows as a shard gets them: as they are, or combined by a map task."""
    batch = batch_of(schema, rows)
    if not combined:
        return ShardInput.of_raw(schema, batch)
    return ShardInput((schema.raw_schema().empty_table(), combined_by_a_task(schema, batch)), len(rows))


def aggregated(schema: StateSchema, parts: list[Rows], *, combined: bool) -> AggregateShard:
    """Return a shard after all parts: each is undone and repeated, and after each second one the shard is loaded again."""
    shard = AggregateShard(schema)
    for number, part in enumerate(parts, start=1):
        rows = input_of(schema, part, combined=combined)
        shard.apply(rows, 0, number)
        shard.abort()
        shard.apply(rows, 0, number)
        shard.commit()
        if number % 2 == 0:
            snapshot = shard.snapshot()
            shard = AggregateShard(schema)
            shard.load(snapshot.append_column(CHANGE_COLUMN, pa.array([0] * snapshot.num_rows, pa.int8())), number, 0)
    return shard


def aggregate_parts(schema: StateSchema, parts: list[Rows], *, combined: bool) -> dict[int, dict[str, Any]]:
    """Return what a shard emits, by key, after all parts."""
    return emitted(aggregated(schema, parts, combined=combined))


def emitted(shard: AggregateShard) -> dict[int, dict[str, Any]]:
    return {row["k"]: row for row in results_of(shard.snapshot(), shard.schema).to_pylist()}

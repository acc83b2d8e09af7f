"""State machine of a shard of the first or last rows by key, and its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cmp_to_key
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from coordinator.model.schema import Field, StateSchema
from store_actors.engine.versions import Compaction
from store_actors.messages.requests import ShardInput
from store_actors.operators.top import FirstShard, TopShard, top_shard
from store_actors.operators.top_schema import RANK_COLUMN, top_schema
from tests.unit.shard_machine import OperatorMachine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Row = dict[str, Any]
Order = list[dict[str, Any]]


def by(column: str, *, descending: bool = False, nulls_first: bool = False) -> dict[str, Any]:
    return {"column": column, "descending": descending, "nulls_first": nulls_first}


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else EPOCH + timedelta(seconds=seconds)


def input_of(schema: StateSchema, rows: list[Row]) -> ShardInput:
    return ShardInput.of_raw(schema, pa.RecordBatch.from_pylist(rows, schema=schema.raw_schema()))


def comparable(value: Any) -> Any:
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


def comparison(order: Order) -> Callable[[Row, Row], int]:
    """Return a comparison of two rows: negative if the first comes before the second."""

    def compare(a_row: Row, b_row: Row) -> int:
        for column_order in order:
            a, b = a_row[column_order["column"]], b_row[column_order["column"]]
            if a is None or b is None:
                if (a is None) != (b is None):
                    return -1 if (a is None) == column_order["nulls_first"] else 1
                continue
            if comparable(a) != comparable(b):
                return -1 if (comparable(a) < comparable(b)) != column_order["descending"] else 1
        return 0

    return compare


def in_order(rows: Iterable[Row], order: Order, ties: str) -> list[Row]:
    """Sort rows, given in the order of arrival, as the table does."""
    arrived = list(rows)
    return sorted(arrived if ties == "first" else reversed(arrived), key=cmp_to_key(comparison(order)))


@dataclass(frozen=True)
class Kept:
    row: Row
    arrival: int
    rank: int


@dataclass
class TopModel:
    """The table as lists. A batch emits (id, rank) pairs."""

    schema: StateSchema
    tables: dict[Any, list[Kept]] = field(default_factory=dict)
    watermark_ms: int = 0
    arrivals: int = 0

    def partition(self, row: Row) -> Any:
        return tuple(row[key.name] for key in self.schema.input_keys)

    def expired(self, row: Row, watermark_ms: int) -> bool:
        expiry = row[self.schema.expiry_key] if self.schema.expiry_key else None
        return expiry is not None and expiry <= EPOCH + timedelta(milliseconds=watermark_ms)

    def ordered(self, kept: list[Kept]) -> list[Kept]:
        by_id = {entry.row["id"]: entry for entry in kept}
        arrived = sorted(kept, key=lambda entry: entry.arrival)
        options = self.schema.options
        ordered = in_order((entry.row for entry in arrived), options["order"], options["ties"])
        return [replace(by_id[row["id"]], rank=index + 1) for index, row in enumerate(ordered)]

    def after(self, rows: list[Row], watermark_ms: int) -> tuple[TopModel, set[tuple[int, int | None]], int]:
        """Return the model of the next version, the emitted pairs, and the number of late rows."""
        options = self.schema.options
        on_time = [row for row in rows if not self.expired(row, self.watermark_ms)]
        tables, emitted = dict(self.tables), set[tuple[int, int | None]]()
        for number, row in enumerate(on_time):
            tables[self.partition(row)] = [*tables.get(self.partition(row), []), Kept(row, self.arrivals + number, 0)]
        by_key = self.schema.expiry_key in {field.name for field in self.schema.keys}
        has_rank = RANK_COLUMN in self.schema.row_schema().names
        for key, kept in list(tables.items()):
            former_ranks = {entry.row["id"]: entry.rank for entry in self.tables.get(key, [])}
            chosen = self.ordered(kept)[: options["n"]]
            expired = [entry for entry in chosen if self.expired(entry.row, watermark_ms)]
            remaining = self.ordered([entry for entry in chosen if entry not in expired])
            final = (
                chosen if by_key else [*remaining, *(entry for entry in expired if entry.row["id"] not in former_ranks)]
            )
            for entry in final:
                before = former_ranks.get(entry.row["id"])
                if before is None or (has_rank and before != entry.rank):
                    emitted.add((entry.row["id"], entry.rank if has_rank else None))
            tables[key] = remaining
        non_empty = {key: kept for key, kept in tables.items() if kept}
        after = TopModel(self.schema, non_empty, watermark_ms, self.arrivals + len(on_time))
        return after, emitted, len(rows) - len(on_time)

    def rows(self) -> set[tuple[int, int | None]]:
        has_rank = RANK_COLUMN in self.schema.row_schema().names
        return {(entry.row["id"], entry.rank if has_rank else None) for kept in self.tables.values() for entry in kept}


def pairs(table: pa.Table) -> set[tuple[int, int | None]]:
    rows = [(row["id"], row.get(RANK_COLUMN)) for row in table.to_pylist()]
    assert len(set(rows)) == len(rows), "a row appears twice"
    return set(rows)


COLUMNS = (
    Field("id", "int64"),
    Field("ts", "timestamp"),
    Field("f", "float64"),
    Field("s", "string"),
    Field("d", "decimal(30,2)"),
)


ORDERS = st.lists(
    st.builds(by, st.sampled_from(["ts", "f", "s", "d"]), descending=st.booleans(), nulls_first=st.booleans()),
    min_size=1,
    max_size=2,
)


ROW = st.fixed_dictionaries(
    {
        "k": st.sampled_from([None, "a", "b", "", "ab"]),
        "end": st.sampled_from([None, *(at(seconds) for seconds in (5, 10, 15, 20))]),
        "ts": st.one_of(st.none(), st.integers(0, 30).map(at)),
        "f": st.sampled_from([None, math.nan, -0.0, 0.0, 1.5, -2.0]),
        "s": st.one_of(st.none(), st.text("abä", max_size=2)),
        "d": st.sampled_from([None, Decimal("-1.00"), Decimal(2**70), Decimal("0.50")]),
    }
)


class TopMachine(OperatorMachine[TopModel]):
    @initialize(
        n=st.integers(1, 4),
        order=ORDERS,
        ties=st.sampled_from(["first", "last"]),
        rank=st.booleans(),
        expiry=st.sampled_from([None, "end", "ts"]),
        partition=st.sampled_from([("k",), ("end", "k"), ("end",), ()]),
    )
    def start(
        self, n: int, order: Order, ties: str, rank: bool, expiry: str | None, partition: tuple[str, ...]
    ) -> None:
        types = {"k": "string", "end": "timestamp"}
        keys = tuple(Field(name, types[name]) for name in partition)
        other_columns = tuple(Field(name, kind) for name, kind in types.items() if name not in partition)
        self.schema = top_schema(
            keys, (*COLUMNS, *other_columns), n, order, ties=ties, rank=rank,
            expiry=expiry, delay_ms=None if expiry is None else 0,
        )  # fmt: skip
        self.ids = 0
        self.begin(TopModel(self.schema))

    def new_shard(self) -> TopShard | FirstShard:
        return top_shard(self.schema)

    def no_rows(self) -> ShardInput:
        return input_of(self.schema, [])

    @precondition(lambda self: self.pending is None)
    @rule(rows=st.lists(ROW, max_size=25), forward=st.sampled_from([0, 0, 1000, 4000]))
    def apply(self, rows: list[Row], forward: int) -> None:
        rows = [{**row, "id": self.ids + index} for index, row in enumerate(rows)]
        self.ids += len(rows)
        model, emitted, late = self.newest.after(rows, self.newest.watermark_ms + forward)
        change = self.apply_input(input_of(self.schema, rows), model.watermark_ms)
        assert (change.rows_in, change.rows_late) == (len(rows), late)
        assert pairs(self.shard.output(change.delta)) == emitted
        self.applied(change, model)

    @precondition(lambda self: self.pending is None and self._frozen is None)
    @rule()
    def compact(self) -> None:
        Compaction().run(self.shard)

    def check(self, model: TopModel) -> None:
        assert pairs(self.shard.snapshot()) == model.rows()
        assert len(self.shard) == len(model.rows())

"""State machine of a join shard, and its rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from coordinator.model.schema import Field, StateSchema
from store_actors.engine.versions import Change
from store_actors.messages.requests import ShardInput
from store_actors.operators.join import JoinShard
from store_actors.operators.join_schema import join_schema
from tests.unit.shard_machine import OperatorMachine

SECOND = 1_000_000
Row = dict[str, Any]


def column(name: str) -> Row:
    return {"op": "column", "name": name}


def call(op: str, *args: Row) -> Row:
    return {"op": op, "args": list(args)}


def table_of(schema: pa.Schema, rows: list[Row]) -> pa.Table:
    return pa.Table.from_arrays(
        [pa.array([row.get(field.name) for row in rows], field.type) for field in schema], schema=schema
    )


def input_of(schema: StateSchema, left: list[Row], right: list[Row]) -> ShardInput:
    tables = tuple(table_of(side, rows) for side, rows in zip(schema.input_schemas(), (left, right), strict=True))
    return ShardInput(tables, len(left) + len(right))


def through_json(schema: StateSchema) -> StateSchema:
    """Return a schema as the store actor has it from the log."""
    return msgspec.json.decode(msgspec.json.encode(schema), type=StateSchema)


class Driver:
    """A join in batches, as Spark's suites run it: emitted rows, kept rows, and rows put and dropped since the last check."""

    def __init__(self, schema: StateSchema) -> None:
        self.schema = through_json(schema)
        self.shard = JoinShard(self.schema)
        self.changes: list[Change] = []

    def input(self, left: list[Row], right: list[Row]) -> ShardInput:
        return input_of(self.schema, left, right)

    def batch(self, left: list[Row], right: list[Row], watermark_ms: int | None = None) -> Change:
        watermark = self.shard.watermark_ms if watermark_ms is None else watermark_ms
        change = self.shard.apply(self.input(left, right), watermark, self.shard.version + 1)
        self.shard.commit()
        self.changes.append(change)
        return change

    def restart(self) -> None:
        self.shard = reloaded(self.schema, self.changes)


def reloaded(schema: StateSchema, changes: list[Change]) -> JoinShard:
    shard = JoinShard(schema)
    for change in changes:
        shard.load(change.delta, change.version, change.watermark_ms)
    return shard


def rows_of(table: pa.Table | None) -> Counter[tuple[Any, ...]]:
    assert table is not None
    columns = [plain(column_values) for column_values in table.columns]
    return Counter(zip(*columns, strict=True)) if columns else Counter()


def plain(values: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_temporal(values.type) and not pa.types.is_date(values.type):
        values = values.cast(pa.int64())
    return ["nan" if isinstance(value, float) and math.isnan(value) else value for value in values.to_pylist()]


def left(*values: int | None) -> list[Row]:
    return [{"k0": v, "l0": v, "l1": None if v is None else 2 * v} for v in values]


def right(*values: int | None) -> list[Row]:
    return [{"k0": v, "r0": v, "r1": None if v is None else 3 * v} for v in values]


SIDE_FIELDS = tuple(
    (
        Field(f"{s}id", "int64"), Field(f"{s}v", "int64"), Field(f"{s}s", "string"), Field(f"{s}t", "timestamp"),
        Field(f"{s}x", "timestamp"), Field(f"{s}p", "bool"),
    )
    for s in "lr"
)  # fmt: skip


CONDITION = call("<=", column("lv"), column("rv"))
SECONDS = st.one_of(st.none(), st.integers(1, 20))
ROW = st.tuples(
    st.sampled_from(["a", "b", "", None]),
    st.one_of(st.none(), st.just(1)),
    st.one_of(st.none(), st.integers(0, 3)),
    st.one_of(st.none(), st.text("ab", max_size=2)),
    SECONDS,
    SECONDS,
    st.sampled_from([True, True, True, False, None]),
)


JOIN_TYPES = ["inner", "left_outer", "right_outer", "full_outer", "left_semi"]
OUTER = {"left_outer": {0}, "right_outer": {1}, "full_outer": {0, 1}}


@dataclass(frozen=True)
class Kept:
    row: tuple[Any, ...]
    matched: bool = False


@dataclass(frozen=True)
class JoinModel:
    """Rows of both sides: (key, null-safe key, value, text, event time, expiry, can match, id)."""

    sides: tuple[tuple[Kept, ...], tuple[Kept, ...]]
    watermark_ms: int

    def after(
        self, join_type: str, new: list[list[tuple[Any, ...]]], watermark_ms: int
    ) -> tuple[JoinModel, Counter[tuple[Any, ...]], int]:
        """Return the next version, the emitted rows, and the number of late rows."""
        sides = [list(self.sides[0]), list(self.sides[1])]
        emitted: Counter[tuple[Any, ...]] = Counter()
        outer, late = OUTER.get(join_type, set()), 0
        for side in (0, 1):
            for row in new[side]:
                if row[4] is not None and row[4] * 1000 <= self.watermark_ms:
                    late += 1
                elif not row[6]:
                    emitted.update([unmatched_output(side, row)] if side in outer else [])
                else:
                    self._enter(join_type, side, Kept(row), sides, emitted)
        for side in (0, 1):
            ended = [kept for kept in sides[side] if kept.row[5] is not None and kept.row[5] * 1000 <= watermark_ms]
            emitted.update(unmatched_output(side, kept.row) for kept in ended if side in outer and not kept.matched)
            sides[side] = [kept for kept in sides[side] if kept not in ended]
        return JoinModel((tuple(sides[0]), tuple(sides[1])), watermark_ms), emitted, late

    @staticmethod
    def _enter(
        join_type: str, side: int, new: Kept, sides: list[list[Kept]], emitted: Counter[tuple[Any, ...]]
    ) -> None:
        for index, candidate in enumerate(sides[1 - side]):
            pair = (new.row, candidate.row) if side == 0 else (candidate.row, new.row)
            if not joins(*pair, equal_nulls=join_type == "full_outer"):
                continue
            if join_type != "left_semi":
                emitted.update([(*output_of(pair[0]), *output_of(pair[1]))])
            elif not (new.matched if side == 0 else candidate.matched):
                emitted.update([output_of(pair[0])])
            new, sides[1 - side][index] = replace(new, matched=True), replace(candidate, matched=True)
        if join_type == "left_semi":
            sides[0] = [kept for kept in sides[0] if not kept.matched]
            if side == 0 and new.matched:
                return
        if new.row[0] is not None or side in OUTER.get(join_type, ()):
            sides[side].append(new)


def joins(left: tuple[Any, ...], right: tuple[Any, ...], *, equal_nulls: bool) -> bool:
    same_key = (equal_nulls or left[0] is not None) and left[0] == right[0] and left[1] == right[1]
    return same_key and left[2] is not None and right[2] is not None and left[2] <= right[2]


def output_of(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row[7], row[3]


def unmatched_output(side: int, row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*output_of(row), None, None) if side == 0 else (None, None, *output_of(row))


class JoinMachine(OperatorMachine[JoinModel]):
    @initialize(join_type=st.sampled_from(JOIN_TYPES))
    def start(self, join_type: str) -> None:
        self.join_type = join_type
        self.ids = 0
        options = {
            "join_type": join_type,
            "null_safe": ["k1"],
            "event_time": ["lt", "rt"],
            "expiry": ["lx", "rx"],
            "pre": ["lp", "rp"],
            "condition": CONDITION,
            "output": [["lid", "ls"], ["rid", "rs"]],
        }
        keys = (Field("k0", "string"), Field("k1", "int32"))
        self.schema = through_json(join_schema(keys, *SIDE_FIELDS, options, 1000))
        self.begin(JoinModel(((), ()), 0))

    def new_shard(self) -> JoinShard:
        return JoinShard(self.schema)

    def no_rows(self) -> ShardInput:
        return input_of(self.schema, [], [])

    def numbered(self, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        self.ids += len(rows)
        return [(*row, self.ids - index) for index, row in enumerate(rows)]

    @precondition(lambda self: self.pending is None)
    @rule(sides=st.tuples(st.lists(ROW, max_size=12), st.lists(ROW, max_size=12)), ahead=st.integers(0, 4))
    def apply(self, sides: tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]], ahead: int) -> None:
        new = [self.numbered(rows) for rows in sides]
        watermark_ms = self.newest.watermark_ms + ahead * 1000
        model, emitted, late = self.newest.after(self.join_type, new, watermark_ms)
        rows = [[self.input_row(side, row) for row in new[side]] for side in (0, 1)]
        change = self.apply_input(input_of(self.schema, *rows), watermark_ms)
        assert rows_of(change.emitted) == emitted
        assert (change.rows_late, change.rows_in) == (late, len(new[0]) + len(new[1]))
        before = sum(map(len, self.newest.sides))
        if "outer" not in self.join_type:
            assert before + change.rows_updated - change.rows_removed == sum(map(len, model.sides))
        self.applied(change, model)

    @staticmethod
    def input_row(side: int, row: tuple[Any, ...]) -> Row:
        s, micros = "lr"[side], [None if seconds is None else seconds * SECOND for seconds in row[4:6]]
        names = ("k0", "k1", f"{s}v", f"{s}s", f"{s}t", f"{s}x", f"{s}p", f"{s}id")
        return dict(zip(names, (*row[:4], *micros, *row[6:]), strict=True))

    def check(self, model: JoinModel) -> None:
        rows = self.shard.snapshot().to_pylist()
        for side, s in ((0, "l"), (1, "r")):
            kept = [row for row in rows if row["__side"] == side]
            tracked = side in OUTER.get(self.join_type, ())
            expected = Counter(
                (kept_row.row[0], kept_row.row[1], *output_of(kept_row.row)) for kept_row in model.sides[side]
            )
            names = ["k0", "k1", f"{s}id", f"{s}s"]
            if self.join_type == "left_semi" and side == 1:
                expected, names = Counter((kept_row.row[0], kept_row.row[1]) for kept_row in model.sides[1]), names[:2]
            assert Counter(tuple(row[name] for name in names) for row in kept) == expected
            if tracked:
                assert {row[f"{s}id"]: row["__matched"] for row in kept} == {
                    kept_row.row[7]: kept_row.matched for kept_row in model.sides[side]
                }
        assert len({row["__row"] for row in rows}) == len(rows) == len(self.shard)

"""State machine of a session shard, and its rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec import structs

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, OperatorKind, StateSchema
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, UPDATED, UPDATED_AND_REMOVED
from store_actors.messages.requests import ShardInput
from store_actors.operators.session_windows import MERGED, SessionShard
from tests.unit.shard_machine import OperatorMachine, read_frozen

K = AccumulatorKind
SECOND = 1_000_000
TIMES = (Field("session_start", "timestamp"), Field("session_end", "timestamp"))
COUNT = Accumulator(K.COUNT_ROWS, (), (Field("n", "int64", False),))


def schema_of(
    keys: tuple[Field, ...], inputs: tuple[Field, ...], accumulators: tuple[Accumulator, ...], mode: str
) -> StateSchema:
    return StateSchema(
        keys=(*keys, Field(ROW_COLUMN, "int64", False)),
        inputs=(*TIMES, *inputs),
        accumulators=(*(Accumulator(K.VALUE, (field.name,), (field,)) for field in TIMES), *accumulators),
        expiry_key=None if mode == "complete" else "session_end",
        delay_ms=30_000,
        output_mode=mode,
        operator=OperatorKind.SESSION,
    )


def input_of(schema: StateSchema, columns: Iterable[Iterable[Any]]) -> ShardInput:
    arrays = [
        pa.array([value * SECOND if isinstance(value, int) else value for value in column], field.type)
        if pa.types.is_timestamp(field.type)
        else pa.array(list(column), field.type)
        for field, column in zip(schema.raw_schema(), columns, strict=True)
    ]
    return ShardInput.of_raw(schema, pa.record_batch(arrays, schema=schema.raw_schema()))


FIRST = (Field("first", "int64"), Field("first_set", "bool", False))
MODEL_KEYS = (Field("user", "string"), Field("region", "int32"))
MODEL = schema_of(
    MODEL_KEYS,
    (Field("v", "int64"), Field("s", "string")),
    (
        COUNT,
        Accumulator(K.SUM_INT, ("v",), (Field("sum", "int64"),)),
        Accumulator(K.FIRST, ("v",), FIRST),
        Accumulator(K.LAST, ("s",), (Field("last", "string"), Field("last_set", "bool", False))),
        Accumulator(K.MAX, ("s",), (Field("most", "string"),)),
    ),
    "append",
)


ROW = st.tuples(
    st.sampled_from([None, "a"]),
    st.sampled_from([None, 0]),
    st.integers(0, 60),
    st.sampled_from([1, 5, 5, 5, 12]),
    st.none() | st.integers(-9, 9),
    st.none() | st.text(max_size=2),
)


Row = tuple[str | None, int | None, int, int, int | None, str | None]
Key = tuple[str | None, int | None]
Values = tuple[tuple[int | None, str | None], ...]


@dataclass(frozen=True)
class Session:
    start: int
    end: int
    values: Values

    def comparable(self, key: Key) -> tuple[Any, ...]:
        numbers = [v for v, _ in self.values if v is not None]
        words = [s for _, s in self.values if s is not None]
        (first, _), (_, last) = self.values[0], self.values[-1]
        most = max(words, key=str.encode) if words else None
        return (
            *key,
            self.start,
            self.end,
            len(self.values),
            sum(numbers) if numbers else None,
            first,
            True,
            last,
            True,
            most,
        )


Sessions = dict[Key, tuple[Session, ...]]


def numbered_sessions(table: pa.Table) -> list[tuple[int | None, int | None, tuple[Any, ...]]]:
    """Return what a delta says happened to each session, the session's number, and the session; sorted by the session."""
    rows = []
    for row in table.to_pylist():
        mark, number = row.pop(CHANGE_COLUMN, None), row.pop(ROW_COLUMN, None)
        for field in TIMES:
            row[field.name] = int(row[field.name].timestamp())
        rows.append((mark, number, tuple(row.values())))
    return sorted(rows, key=lambda row: repr(row[2]))


def comparable_sessions(table: pa.Table) -> list[tuple[Any, ...]]:
    return [session for _, _, session in numbered_sessions(table)]


#: What a delta says of a session: what happened to it, the session, and the one whose number it keeps, if there is one.
Mark = tuple[int, tuple[Any, ...], tuple[Any, ...] | None]


@dataclass(frozen=True)
class SessionModel:
    sessions: Sessions
    watermark: int

    def after(self, rows: list[Row], watermark: int) -> tuple[SessionModel, dict[str, Any]]:
        """Return the model of the next version, and facts of the batch by name."""
        on_time = [row for row in rows if row[2] + row[3] > self.watermark]
        sessions, updated, put_rows, removed_rows = dict(self.sessions), [], 0, 0
        marks: list[Mark] = []
        for key in {row[:2] for row in on_time}:
            old = self.sessions.get(key, ())
            new = [Session(at, at + gap, ((v, s),)) for *row_key, at, gap, v, s in on_time if tuple(row_key) == key]
            events = [(s.start, 0, 0, s) for s in old] + [(s.start, 1, s.end, s) for s in new]
            merged: list[Session] = []
            for *_, session in sorted(events, key=lambda event: event[:3]):
                if merged and session.start <= merged[-1].end:
                    previous = merged.pop()
                    values = previous.values + session.values
                    session = Session(previous.start, max(previous.end, session.end), values)
                merged.append(session)
            sessions[key] = tuple(merged)
            changed = [s for s in merged if not any(s is before for before in old)]
            updated += [s.comparable(key) for s in changed]
            for now in changed:
                first, *others = [s.comparable(key) for s in old if now.start <= s.start <= now.end] or [None]
                marks.append((UPDATED_AND_REMOVED if now.end <= watermark else UPDATED, now.comparable(key), first))
                marks += [(MERGED, other, other) for other in others]
            put_rows += len(merged)
            removed_rows += len({s.start for s in old} - {s.start for s in merged})
        closed = [s.comparable(key) for key, of_key in sessions.items() for s in of_key if s.end <= watermark]
        marks += [(REMOVED, session, session) for session in closed if session not in updated]
        still_open = {key: tuple(s for s in of_key if s.end > watermark) for key, of_key in sessions.items()}
        facts = {
            # Rows of one key and time are one: Spark adds them up before it looks at the watermark.
            "late": len({row[:4] for row in rows if row[2] + row[3] <= self.watermark}),
            "updated": sorted(updated, key=repr),
            "closed": sorted(closed, key=repr),
            "counts": (put_rows, removed_rows + len(closed)),
            "marks": sorted(marks, key=lambda mark: repr(mark[1])),
        }
        return SessionModel(still_open, watermark), facts

    def comparable(self) -> list[tuple[Any, ...]]:
        return sorted((s.comparable(key) for key, of_key in self.sessions.items() for s in of_key), key=repr)


class SessionMachine(OperatorMachine[SessionModel]):
    def __init__(self) -> None:
        super().__init__()
        self.begin(SessionModel({}, 0))

    def new_shard(self) -> SessionShard:
        return SessionShard(MODEL)

    def no_rows(self) -> ShardInput:
        return ShardInput((MODEL.raw_schema().empty_table(),), 0)

    @precondition(lambda self: self.pending is None)
    @rule(rows=st.lists(ROW, max_size=25), parts=st.integers(1, 3), watermark=st.integers(0, 8))
    def apply(self, rows: list[Row], parts: int, watermark: int) -> None:
        watermark += self.newest.watermark
        # Event time advances about as fast as the watermark.
        rows = [(*row[:2], row[2] + max(0, self.newest.watermark - 20), *row[3:]) for row in rows]
        timed = [(user, region, at, at + gap, v, s) for user, region, at, gap, v, s in rows]
        size = max(1, len(rows) // parts)
        batches = [input_of(MODEL, zip(*timed[at : at + size], strict=True)).raw for at in range(0, len(rows), size)]
        raw = pa.concat_tables([MODEL.raw_schema().empty_table(), *batches])
        model, facts = self.newest.after(rows, watermark)
        numbers = {session: number for _, number, session in numbered_sessions(self.shard.snapshot())}
        change = self.apply_input(ShardInput((raw,), len(rows)), watermark * 1000)
        assert (change.rows_in, change.rows_late) == (len(rows), facts["late"])
        assert (change.rows_updated, change.rows_removed) == facts["counts"]
        for (mark, number, session), (expected, *sessions) in zip(
            numbered_sessions(change.delta), facts["marks"], strict=True
        ):
            assert (mark, session) == (expected, sessions[0])
            assert number == numbers[sessions[1]] if sessions[1] else number not in numbers.values()
        assert comparable_sessions(self.shard.output(change.delta)) == facts["closed"]
        update = SessionShard(structs.replace(MODEL, output_mode="update"))
        assert comparable_sessions(update.output(change.delta)) == facts["updated"]
        self.applied(change, model)

    def check(self, model: SessionModel) -> None:
        assert comparable_sessions(self.shard.snapshot()) == model.comparable()
        frozen = read_frozen(self.shard.frozen(), self.shard.schema.row_schema())
        assert comparable_sessions(frozen) == model.comparable()
        numbers = self.shard.snapshot().column(ROW_COLUMN).to_pylist()
        assert len(numbers) == len(set(numbers)) == len(self.shard)
        assert self.pending is not None or self.watermark_ms == model.watermark * 1000

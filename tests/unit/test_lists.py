"""State that grows with its group, against plain Python: lists and sets of every type, through versions, files and sessions."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from coordinator.model.errors import InvalidRequestError
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import Accumulator, AccumulatorKind, Field, StateSchema
from coordinator.model.type_names import list_type, string_to_type
from spark_jobs.worker import exchange
from store_actors.engine import versions
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN, UPDATED, Change
from store_actors.messages import ShardInput
from store_actors.operators.aggregate import AggregateShard, output_of
from store_actors.operators.session_windows import SessionShard
from store_actors.serving.files import delta_path, encode_delta
from tests.unit.compacting import CompactingMachine
from tests.unit.freezing import read_frozen
from tests.unit.test_accumulators import VALUES
from tests.unit.test_exchange import KEYED, shuffle
from tests.unit.test_exchange import batch_of as shuffled_rows
from tests.unit.test_session_windows import input_of as session_input
from tests.unit.test_session_windows import schema_of as session_schema

K = AccumulatorKind
SECOND = 1_000_000


def collected(kind: AccumulatorKind, column: str, type_name: str, name: str) -> Accumulator:
    return Accumulator(kind, (column,), (Field(name, list_type(type_name), False),))


def distinct(values: Sequence[Any]) -> list[Any]:
    """The first of equal values, in order; no NaN equals another one."""
    found: list[Any] = []
    for value in values:
        if (isinstance(value, float) and math.isnan(value)) or value not in found:
            found.append(value)
    return found


def exact(values: Sequence[Any]) -> list[Any]:
    """Values told apart also where Python takes them for equal: -0.0 and 0.0."""
    return [repr(value) if isinstance(value, float) else value for value in values]


# -- every type -------------------------------------------------------------------------------------------------------

ANY_VALUES = VALUES | {"float32": st.floats(width=32), "float64": st.one_of(st.floats(), st.sampled_from([0.0, -0.0]))}


def both_of(type_name: str) -> StateSchema:
    return StateSchema(
        keys=(Field("k", "int64"),),
        inputs=(Field("v", type_name),),
        accumulators=(
            collected(K.COLLECT_LIST, "v", type_name, "all"),
            Accumulator(K.COUNT_VALID, ("v",), (Field("n", "int64", False),)),
            collected(K.COLLECT_SET, "v", type_name, "different"),
        ),
        expiry_key=None,
        delay_ms=None,
        output_mode="update",
    )


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("type_name", sorted(VALUES))
def test_lists_and_sets_of_every_type(type_name: str, merge: bool) -> None:
    schema, value_type = both_of(type_name), string_to_type(type_name)
    some = st.one_of(st.none(), ANY_VALUES[type_name])
    rows = st.tuples(st.sampled_from([1, 2, None]), some)

    @settings(max_examples=25, deadline=None)
    @given(parts=st.lists(st.lists(rows, max_size=30), min_size=1, max_size=4))
    def check(parts: list[list[tuple[int | None, Any]]]) -> None:
        final = GroupTable(schema)
        for part in parts:
            columns = [pa.array([k for k, _ in part], pa.int64()), pa.array([v for _, v in part], value_type)]
            batch = pa.record_batch(columns, schema=schema.raw_schema())
            if merge:
                combined = GroupTable(schema)
                combined.accumulate(combined.encode(batch), 1)
                for partial in combined.decode(combined.rows[combined.live()]).to_batches():
                    encoded = final.encode(partial, partial=True)
                    final.accumulate(encoded.take(slice(0, len(encoded))), 1)
            else:
                final.accumulate(final.encode(batch), 1)
        found = {row["k"]: row for row in final.decode(final.rows[final.live()]).to_pylist()}
        given_rows = [row for part in parts for row in part]
        assert found.keys() == {k for k, _ in given_rows}
        for k, row in found.items():
            values = [v for key, v in given_rows if key == k and v is not None]
            assert exact(row["all"]) == exact(values)
            assert row["n"] == len(values)
            assert sorted(exact(row["different"])) == sorted(exact(distinct(values)))

    check()


# -- versions ---------------------------------------------------------------------------------------------------------

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
Row = tuple[int, str, str | None, Decimal | None, float | None]
Key = tuple[int, str]
Groups = dict[Key, list[Row]]


def rows_of(seed: int, size: int) -> list[Row]:
    """Rows of few groups, so that lists get long."""
    chance = random.Random(seed)
    return [
        (
            chance.choice([2, 4]),
            chance.choice("aab"),
            chance.choice([None, *(f"w{n}" for n in range(40))]),
            chance.choice([None, *(Decimal(n) * 10**16 for n in range(-20, 20))]),
            chance.choice([None, math.nan, -0.0, *(n / 2 for n in range(-9, 9))]),
        )
        for _ in range(size)
    ]


ROWS = st.builds(rows_of, st.integers(0, 2**32), st.integers(0, 60))


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    arrays = [pa.array([end * SECOND for end in columns[0]], pa.timestamp("us", tz="UTC"))]
    arrays += [
        pa.array(column, field.type) for column, field in zip(columns[1:], list(SCHEMA.raw_schema())[1:], strict=True)
    ]
    return pa.record_batch(arrays, schema=SCHEMA.raw_schema())


def input_of(raw: Sequence[Row], combined: Sequence[Row] = ()) -> ShardInput:
    table = GroupTable(SCHEMA)
    table.accumulate(table.encode(batch_of(combined)), 1)
    some = ShardInput.of_raw(SCHEMA, batch_of(raw))
    return ShardInput((some.raw, table.decode(table.rows[table.live()])), len(raw) + len(combined))


def told(groups: Groups) -> dict[Key, tuple[Any, ...]]:
    def of(rows: list[Row], place: int) -> list[Any]:
        return [row[place] for row in rows if row[place] is not None]

    return {
        key: (
            of(rows, 2),
            max(of(rows, 2), default=None),
            distinct(of(rows, 2)),
            distinct(of(rows, 3)),
            exact(distinct(of(rows, 4))),
        )
        for key, rows in groups.items()
    }


def groups_of(table: pa.Table) -> dict[Key, tuple[Any, ...]]:
    ends = table.column("end").cast(pa.int64()).to_pylist()
    return {
        (end // SECOND, row["user"]): (row["words"], row["top"], row["word_set"], row["amounts"], exact(row["xs"]))
        for end, row in zip(ends, table.to_pylist(), strict=True)
    }


class ListMachine(CompactingMachine):
    """As ``test_shard_machine``: a shard against the rows of its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = AggregateShard(SCHEMA)
        self.versions: dict[int, Groups] = {0: {}}
        self.changes: dict[int, Change] = {}
        self.pending: Groups | None = None
        self.pending_change: Change
        self.watermarks = {0: 0}

    @precondition(lambda self: self.pending is None)
    @rule(
        raw=ROWS,
        combined=ROWS,
        forward=st.sampled_from([0, 0, 0, 1]),
        then=st.sampled_from(["commit", "commit", "abort", "wait"]),
    )
    def apply(self, raw: list[Row], combined: list[Row], forward: int, then: str) -> None:
        before = self.watermarks[self.shard.version]
        groups = {key: list(rows) for key, rows in self.versions[self.shard.version].items()}
        touched = set()
        for row in (*raw, *combined):
            if row[0] * 1000 > before:
                groups.setdefault(row[:2], []).append(row)
                touched.add(row[:2])
        watermark = before + 1000 * forward
        version = self.shard.version + 1
        change = self.shard.apply(input_of(raw, combined), watermark, version)
        closed = {key: rows for key, rows in groups.items() if key[0] * 1000 <= watermark}
        assert groups_of(output_of(change.delta, "update")) == told({key: groups[key] for key in touched})
        assert groups_of(output_of(change.delta, "append")) == told(closed)
        self.pending = {key: rows for key, rows in groups.items() if key not in closed}
        self.pending_change = change
        self.equals_model()
        if then == "commit":
            self.commit()
        elif then == "abort":
            self.abort()

    @precondition(lambda self: self.pending is not None)
    @rule()
    def commit(self) -> None:
        assert self.pending is not None
        change = self.pending_change
        self.changes[change.version], self.watermarks[change.version] = change, change.watermark_ms
        self.versions[self.shard.commit()] = self.pending
        self.pending = None

    @precondition(lambda self: self.pending is not None)
    @rule()
    def abort(self) -> None:
        self.shard.abort()
        self.pending = None

    @precondition(lambda self: self.pending is None and self.shard.version > 0)
    @rule(back=st.integers(1, 3))
    def rollback(self, back: int) -> None:
        version = max(0, self.shard.version - back)
        if self.shard.rollback(version):
            assert self.shard.version == version

    @precondition(lambda self: self.pending is None)
    @rule(from_snapshot=st.booleans())
    def reload(self, from_snapshot: bool) -> None:
        fresh, version = AggregateShard(SCHEMA), self.shard.version
        if from_snapshot:
            rows = self.shard.snapshot()
            kinds = pa.nulls(rows.num_rows, pa.int8()).fill_null(UPDATED)
            fresh.load(rows.append_column(CHANGE_COLUMN, kinds), version, self.watermarks[version])
        else:
            for one in range(1, version + 1):
                fresh.load(self.changes[one].delta, one, self.watermarks[one])
        self.shard = fresh
        self.shard.version = version

    @invariant()
    def equals_model(self) -> None:
        groups = self.versions[self.shard.version] if self.pending is None else self.pending
        assert groups_of(self.shard.snapshot()) == told(groups)


ListMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestListsAgainstRows = ListMachine.TestCase


# -- what it costs ----------------------------------------------------------------------------------------------------


def words(end: int, texts: Sequence[str]) -> ShardInput:
    return input_of([(end, "a", text, None, None) for text in texts])


def test_an_undo_does_not_copy_the_list_and_garbage_is_let_go() -> None:
    shard = AggregateShard(SCHEMA)
    for version in range(1, 201):
        shard.apply(words(1, [f"word {version} {n}" for n in range(200)]), 0, version)
        shard.commit()
    assert sum(step.nbytes for step in shard.steps()) < 2000
    # 40,000 words in a list and in a set with its index, each in an extent of 65,536; garbage is less than as much again.
    assert shard.table.lists.used < 2 * 3 * 65_536
    ((row,),) = [shard.snapshot().to_pylist()]
    assert len(row["words"]) == len(row["word_set"]) == 40_000


def test_lists_and_strings_of_closed_groups_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_SMALL_POOL", 0)
    shard = AggregateShard(SCHEMA)
    for version in range(1, 60):
        shard.apply(words(version, [f"word {version} {n}" for n in range(100)]), (version - 3) * 1000, version)
        shard.commit()
    assert shard.table.lists.used < 5000
    assert shard.table.pool.count < 1000


def test_a_closed_group_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_SMALL_POOL", -(1 << 40))
    shard = AggregateShard(SCHEMA)
    texts = [f"word {n}" for n in range(12)]
    shard.apply(words(1, texts), 0, 1)
    shard.commit()
    shard.apply(words(5, ["another"]), 1000, 2)
    shard.commit()
    assert shard.rollback(1)
    shard.apply(words(1, [*texts, "more"]), 0, 2)
    ((row,),) = [shard.snapshot().to_pylist()]
    assert (row["words"], row["word_set"], row["top"]) == ([*texts, *texts, "more"], [*texts, "more"], "word 9")


def test_a_reader_keeps_what_it_reads_when_the_version_is_undone() -> None:
    shard = AggregateShard(SCHEMA)
    for version, texts in enumerate([["a", "b", "c"], ["d"]], start=1):
        shard.apply(words(1, texts), 0, version)
        shard.commit()
    read = shard.frozen()
    assert shard.rollback(1)
    shard.apply(words(1, ["another"]), 0, 2)
    assert [row["words"] for row in read_frozen(read, SCHEMA.row_schema()).to_pylist()] == [["a", "b", "c", "d"]]
    assert [row["words"] for row in shard.snapshot().to_pylist()] == [["a", "b", "c", "another"]]


@pytest.mark.parametrize("kept", [7, 8, 9, 30])
def test_a_set_finds_its_elements_after_many_undone_versions(kept: int) -> None:
    """What undone versions leave in a set's index takes up its places, again and again."""
    shard = AggregateShard(SCHEMA)
    shard.apply(words(1, [f"kept {n}" for n in range(kept)]), 0, 1)
    shard.commit()
    expected = [f"kept {n}" for n in range(kept)]
    for round_ in range(100):
        shard.apply(words(1, [f"gone {round_} {n}" for n in range(6)]), 0, shard.version + 1)
        shard.abort()
        if round_ % 20 == 19:
            more = [f"kept {len(expected)}", *expected]
            shard.apply(words(1, more), 0, shard.version + 1)
            shard.commit()
            expected.append(more[0])
        ((row,),) = [shard.snapshot().to_pylist()]
        assert row["word_set"] == expected


@pytest.mark.parametrize("times", [2048, 4097])
def test_more_strings_in_one_row_than_arrow_counts_are_refused_and_never_written(times: int) -> None:
    """A word that is gathered again and again takes memory once, and its length each time in a file."""
    table = GroupTable(SCHEMA)
    table.accumulate(table.encode(batch_of([(1, "a", "x" * (1 << 20), None, None)])), 1)
    field = table.layout.lists["words"]
    ids = np.full((1, times), table.lists.arena[int(table.rows[0, field.word])])
    table.lists.append(table.rows, np.zeros(times, np.int64), field, ids, np.ones((1, times), np.uint8), 0)
    with pytest.raises(InvalidRequestError, match="bytes of strings in one column"):
        table.decode(table.rows[:1])


# -- files and schemas ------------------------------------------------------------------------------------------------


def test_files_have_arrow_lists_that_any_tool_reads() -> None:
    shard = AggregateShard(SCHEMA)
    change = shard.apply(input_of([(1, "a", "x", None, 0.5), (1, "a", "x", None, None)]), 0, 1)
    data, _ = encode_delta(change, SCHEMA, {})
    rows = pa.ipc.open_file(data).read_all()
    assert rows.column("words").to_pylist() == [["x", "x"]]
    assert rows.schema.field("amounts").type == pa.list_(pa.field("element", pa.decimal128(20, 2), nullable=False))
    assert not rows.schema.field("amounts").nullable
    told_schema = json.loads(rows.schema.metadata[b"statefleet"])
    assert StateSchema.from_json(told_schema["schema"]) == SCHEMA
    spark = {field["name"]: field["type"] for field in told_schema["spark"]["fields"]}
    assert spark["xs"] == {"type": "array", "elementType": "double", "containsNull": False}
    assert delta_path(StateStoreId("s", 0, 0), 1, "x").endswith(".delta")


def test_a_global_group_has_empty_lists_before_any_input() -> None:
    shard = AggregateShard(replace(SCHEMA, keys=(), expiry_key=None))
    change = shard.apply(ShardInput.of_raw(shard.schema), 0, 1)
    (row,) = change.delta.drop_columns([CHANGE_COLUMN]).to_pylist()
    assert row == {"words": [], "top": None, "word_set": [], "amounts": [], "xs": []}


# -- the map side ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", [False, True])
def test_map_tasks_send_lists_that_they_combined(monkeypatch: pytest.MonkeyPatch, combine: bool) -> None:
    monkeypatch.setattr(exchange, "_WORTHWHILE", 1.0 if combine else -1.0)
    monkeypatch.setattr(exchange, "_CHUNK_BYTES", 200)
    accumulators = (
        collected(K.COLLECT_LIST, "v", "int64", "all"),
        collected(K.COLLECT_SET, "v", "int64", "different"),
    )
    schema = replace(KEYED, accumulators=accumulators)
    rows = [(n % 7, None if n % 3 else "s", n % 20 if n % 5 else None) for n in range(600)]
    tasks = [[shuffled_rows(rows[:400])], [shuffled_rows(rows[400:])]]
    for received in (one.rows for one in shuffle(schema, tasks, 3)):
        assert (received.raw if combine else received.partial).num_rows == 0
        shard = AggregateShard(schema)
        for row in shard.apply(received, 0, 1).delta.to_pylist():
            values = [v for k, s, v in rows if (k, s) == (row["k"], row["s"]) and v is not None]
            assert row["all"] == values
            assert row["different"] == distinct(values)


# -- sessions ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 60), st.integers(0, 15)), max_size=20),
        max_size=5,
    ),
    undo=st.booleans(),
)
def test_sessions_gather_what_all_their_rows_have(batches: list[list[tuple[str, int, int]]], undo: bool) -> None:
    accumulators = (
        collected(K.COLLECT_LIST, "v", "int64", "all"),
        collected(K.COLLECT_SET, "v", "int64", "different"),
    )
    schema = session_schema((Field("user", "string"),), (Field("v", "int64"),), accumulators, "complete")
    shard, seen = SessionShard(schema), []
    for version, rows in enumerate(batches, start=1):
        columns = list(zip(*[(user, at, at + 4, v) for user, at, v in rows], strict=True)) or [()] * 4
        if undo:
            shard.apply(session_input(schema, columns), 0, version)
            shard.abort()
        shard.apply(session_input(schema, columns), 0, version)
        shard.commit()
        seen += rows
        expected = []
        for user in ("a", "b"):
            sessions: list[list[tuple[int, int]]] = []
            for at, v in sorted((at, v) for one, at, v in seen if one == user):
                if sessions and at <= sessions[-1][-1][0] + 4:
                    sessions[-1].append((at, v))
                else:
                    sessions.append([(at, v)])
            expected += [(user, sorted(v for _, v in one), sorted({v for _, v in one})) for one in sessions]
        found = [(row["user"], sorted(row["all"]), sorted(row["different"])) for row in shard.snapshot().to_pylist()]
        assert sorted(found) == sorted(expected)

"""Session windows against lists of rows: Spark's own cases, and a machine with late rows, aborts, rollbacks and reloads."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.schema import ROW_COLUMN, Accumulator, Field, StateSchema
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, UPDATED, UPDATED_AND_REMOVED, Change
from store_actors.operators.session_windows import MERGED, SessionShard
from tests.unit.session_machine import (
    COUNT,
    FIRST,
    SECOND,
    TIMES,
    K,
    input_of,
    schema_of,
)

# -- Spark's cases ----------------------------------------------------------------------------------------------------

WORDS = (Field("word", "string"),)
#: Lines with their time, of each batch of Spark's StreamingSessionWindowSuite.
LINES = [
    [("hello world spark streaming", 40), ("world hello structured streaming", 41)],
    [("spark streaming", 25)],
    [("spark streaming", 30)],
    [("hello apache spark", 60)],
    [("structured streaming", 90)],
]


class WordQuery:
    """A query whose keys are the words of lines; times are in seconds, and the watermark is 30 s behind."""

    def __init__(self, mode: str, gaps: dict[str, int] | None = None) -> None:
        self.schema = schema_of(WORDS, (), (COUNT,), mode)
        self.shard = SessionShard(self.schema)
        self.gaps = gaps or {}
        self.watermark_ms = 0

    def run(self, lines: list[tuple[str, int]]) -> Change:
        rows = [(word, at, at + self.gaps.get(word, 10)) for line, at in lines for word in line.split()]
        rows = [row for row in rows if row[1] < row[2]]
        self.watermark_ms = max(self.watermark_ms, max(at for _, at in lines) * 1000 - 30_000)
        change = self.shard.apply(
            input_of(self.schema, zip(*rows, strict=True)), self.watermark_ms, self.shard.version + 1
        )
        self.shard.commit()
        return change

    @staticmethod
    def session_counts(table: pa.Table) -> Counter[tuple[str, int, int, int]]:
        starts, ends = (table.column(field.name).cast(pa.int64()).to_numpy() // SECOND for field in TIMES)
        words, counts = table.column("word").to_pylist(), table.column("n").to_pylist()
        return Counter(zip(words, starts.tolist(), ends.tolist(), counts, strict=True))


def test_spark_case_sw1_complete_mode() -> None:
    query = WordQuery("complete")
    early = {("hello", 40, 51, 2), ("world", 40, 51, 2), ("structured", 41, 51, 1)}
    later = {("hello", 60, 70, 1), ("apache", 60, 70, 1), ("spark", 60, 70, 1)}
    last = {("structured", 90, 100, 1), ("streaming", 90, 100, 1)}
    apart = early | {("streaming", 40, 51, 2), ("spark", 40, 50, 1)}
    joined = early | {("spark", 25, 50, 3), ("streaming", 25, 51, 4)}
    expected = [
        apart,
        apart | {("spark", 25, 35, 1), ("streaming", 25, 35, 1)},
        joined,
        joined | later,
        joined | later | last,
    ]
    # Sessions put, and sessions whose start was removed, as StreamingSessionWindowStateManager.putRows counts them.
    counts = [(5, 0), (4, 0), (2, 2), (5, 0), (4, 0)]
    for lines, sessions, (updated, removed) in zip(LINES, expected, counts, strict=True):
        change = query.run(lines)
        assert query.session_counts(query.shard.snapshot()) == Counter(sessions)
        assert (change.rows_updated, change.rows_removed, change.rows_late) == (updated, removed, 0)


def test_spark_case_append_mode_emits_what_the_watermark_closes_and_drops_late_rows() -> None:
    query = WordQuery("append")
    batches = [*LINES[:2], [("spark streaming", 0)], *LINES[2:]]
    changes = [query.run(lines) for lines in batches]
    assert [change.rows_late for change in changes] == [0, 0, 2, 0, 0, 0]
    assert [change.rows_removed for change in changes] == [0, 0, 0, 2, 0, 5]
    emitted = [query.session_counts(query.shard.output(change.delta)) for change in changes]
    assert emitted[:-1] == [Counter()] * 5
    assert emitted[-1] == Counter(
        {("spark", 25, 50, 3), ("streaming", 25, 51, 4), ("hello", 40, 51, 2), ("world", 40, 51, 2)}
        | {("structured", 41, 51, 1)}
    )
    assert len(query.shard) == 5


def test_spark_case_36465_gaps_differ_from_row_to_row() -> None:
    query = WordQuery("append", {"hello": 1, "structured": 0, "world": -10})
    changes = [query.run(lines) for lines in [*LINES[:2], [("spark streaming", 0)], *LINES[2:]]]
    assert [change.rows_late for change in changes] == [0, 0, 2, 0, 0, 0]
    emitted = [query.session_counts(query.shard.output(change.delta)) for change in changes]
    assert sum(emitted[:-1], Counter()) == Counter()
    # Sessions of 40 and 41 touch (gap 1) and are one.
    assert emitted[-1] == Counter({("spark", 25, 50, 3), ("streaming", 25, 51, 4), ("hello", 40, 42, 2)})
    assert query.session_counts(query.shard.snapshot()) == Counter(
        {("hello", 60, 61, 1), ("apache", 60, 70, 1), ("spark", 60, 70, 1), ("streaming", 90, 100, 1)}
    )


# -- rules --------------------------------------------------------------------------------------------------------------


def test_a_late_row_is_dropped_though_an_open_session_would_take_it_in() -> None:
    query = WordQuery("append")
    query.run([("a", 5), ("a", 12), ("z", 46)])  # the watermark is 16
    change = query.run([("a", 6), ("a", 7), ("z", 40)])
    assert change.rows_late == 1  # ends at 16; the row at 7 ends at 17
    assert query.session_counts(query.shard.snapshot())["a", 5, 22, 3] == 1


def test_a_session_that_a_batch_begins_and_closes_is_emitted_once() -> None:
    query = WordQuery("append")
    change = query.run([("brief", 5), ("brief", 7), ("long", 100)])
    assert query.session_counts(query.shard.output(change.delta)) == Counter({("brief", 5, 17, 2)})
    kinds = dict(
        zip(change.delta.column("word").to_pylist(), change.delta.column(CHANGE_COLUMN).to_pylist(), strict=True)
    )
    assert kinds == {"brief": UPDATED_AND_REMOVED, "long": UPDATED}


def test_a_session_that_grows_keeps_its_number_and_a_merged_one_is_distinguished_from_a_closed_one() -> None:
    query = WordQuery("append")
    first = query.run([("a", 31), ("a", 50)]).delta.to_pylist()
    number = {row["session_start"].timestamp(): row[ROW_COLUMN] for row in first}
    change = query.run([("a", 41)])
    assert sorted((row[CHANGE_COLUMN], row[ROW_COLUMN], row["n"]) for row in change.delta.to_pylist()) == [
        (UPDATED, number[31], 3),
        (MERGED, number[50], 1),
    ]
    assert query.shard.output(change.delta).num_rows == 0
    assert (change.rows_updated, change.rows_removed) == (1, 1)


def test_sessions_that_were_merged_are_apart_again_after_an_abort_and_after_a_rollback() -> None:
    query = WordQuery("append")
    query.run([("a", 31), ("a", 50)])
    apart = query.shard.snapshot().sort_by(ROW_COLUMN)
    query.shard.apply(input_of(query.schema, [["a"], [41], [51]]), 0, 2)
    query.shard.abort()
    assert query.shard.snapshot().sort_by(ROW_COLUMN) == apart
    query.run([("a", 41)])
    assert query.session_counts(query.shard.snapshot()) == Counter({("a", 31, 60, 3)})
    assert query.shard.rollback(1)
    assert query.shard.snapshot().sort_by(ROW_COLUMN) == apart
    query.run([("a", 41)])
    assert query.session_counts(query.shard.snapshot()) == Counter({("a", 31, 60, 3)})


def test_a_session_that_grew_is_closed_by_its_new_end_and_after_an_abort_by_its_old_one() -> None:
    query = WordQuery("append")
    query.run([("a", 1)])
    shard = query.shard
    grow = input_of(query.schema, [["a"], [9], [19]])
    nothing = input_of(query.schema, [[], [], []])
    shard.apply(grow, 0, 2)
    shard.abort()
    assert shard.apply(nothing, 11_000, 2).rows_removed == 1
    shard.abort()
    shard.apply(grow, 0, 2)
    shard.commit()
    assert shard.apply(nothing, 18_999, 3).rows_removed == 0
    shard.commit()
    assert query.session_counts(shard.output(shard.apply(nothing, 19_000, 4).delta)) == Counter({("a", 1, 19, 2)})


def test_all_rows_of_a_hot_key_are_one_session_in_any_order() -> None:
    schema = schema_of(WORDS, (Field("v", "int64"),), (COUNT, Accumulator(K.FIRST, ("v",), FIRST)), "append")
    times = np.random.default_rng(7).permutation(5000)
    shard = SessionShard(schema)
    for version, part in enumerate(np.array_split(times, 3), start=1):
        shard.apply(
            input_of(schema, [["hot"] * len(part), part.tolist(), (part + 1).tolist(), part.tolist()]), 0, version
        )
        shard.commit()
    (row,) = shard.snapshot().to_pylist()
    assert (row["n"], row["first"]) == (5000, 0)
    assert (row["session_start"].timestamp(), row["session_end"].timestamp()) == (0, 5000)


# -- every accumulator ----------------------------------------------------------------------------------------------------

EVERY = (
    COUNT,
    Accumulator(K.COUNT_VALID, ("v",), (Field("valid", "int64", False),)),
    Accumulator(K.SUM_INT, ("v",), (Field("sum", "int64"),)),
    Accumulator(K.SUM_FLOAT, ("f",), (Field("total", "float64"),)),
    Accumulator(K.SUM_DECIMAL, ("d",), (Field("money", "decimal(20,2)"), Field("money_empty", "bool", False))),
    Accumulator(K.MIN, ("s",), (Field("least", "string"),)),
    Accumulator(K.MAX, ("d",), (Field("most", "decimal(10,2)"),)),
    Accumulator(K.FIRST, ("v",), FIRST),
    Accumulator(K.LAST, ("s",), (Field("last", "string"), Field("last_set", "bool", False))),
    Accumulator(K.FIRST_VALID, ("d",), (Field("some", "decimal(10,2)"), Field("some_set", "bool", False))),
    Accumulator(K.LAST_VALID, ("v",), (Field("newest", "int64"), Field("newest_set", "bool", False))),
    Accumulator(
        K.MOMENTS,
        ("f",),
        (Field("m_n", "float64", False), Field("m_avg", "float64", False), Field("m_m2", "float64", False)),
    ),
)
VALUES = (Field("v", "int64"), Field("f", "float64"), Field("s", "string"), Field("d", "decimal(10,2)"))
VALUE_ROW = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.integers(-1000, 1000).map(float),
    st.none() | st.text(max_size=3),
    st.none() | st.decimals(Decimal("-999.99"), Decimal("999.99"), places=2),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUE_ROW, min_size=1, max_size=12), st.data())
def test_every_accumulator_merges_as_if_rows_had_come_in_order(
    values: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    schema = schema_of(WORDS, VALUES, EVERY, "append")
    shard = SessionShard(schema)
    batch_of_row = data.draw(st.lists(st.integers(1, 4), min_size=len(values), max_size=len(values)))
    for version in range(1, 5):
        rows = [
            ("k", 5 * at, 5 * at + 5, *value)
            for at, (value, batch) in enumerate(zip(values, batch_of_row, strict=True))
            if batch == version
        ]
        columns = zip(*rows, strict=True) if rows else ([] for _ in schema.raw_schema())
        shard.apply(input_of(schema, columns), 0, version)
        shard.commit()
    plain = GroupTable(StateSchema(WORDS, VALUES, EVERY, None, None, "update"))
    arrays = [
        pa.array(column, field.arrow().type) for column, field in zip(zip(*values, strict=True), VALUES, strict=True)
    ]
    names = ["word", *(field.name for field in VALUES)]
    plain.accumulate(plain.encode(pa.record_batch([pa.array(["k"] * len(values)), *arrays], names)), 1)
    (expected,) = plain.decode(plain.rows[plain.live()]).to_pylist()
    (row,) = shard.snapshot().to_pylist()
    for name, value in expected.items():
        # The formula that merges moments is not the one that adds values.
        assert row[name] == (pytest.approx(value, abs=1e-6) if name.startswith("m_") else value), name


def test_a_delta_marks_every_row_with_what_happened_to_its_session() -> None:
    query = WordQuery("append")
    query.run([("old", 1), ("a", 30), ("a", 45)])  # the watermark is 15: "old" is closed at once
    change = query.run([("a", 39), ("b", 62), ("c", 1)])
    rows = {(row["word"], row[CHANGE_COLUMN]): row["n"] for row in change.delta.to_pylist()}
    assert rows == {("a", UPDATED): 3, ("a", MERGED): 1, ("b", UPDATED): 1}
    assert change.rows_late == 1
    query.run([("b", 90)])
    change = query.run([("d", 110)])
    assert {(row["word"], row[CHANGE_COLUMN]) for row in change.delta.to_pylist()} == {("d", UPDATED), ("b", REMOVED)}

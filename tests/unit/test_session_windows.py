"""Session windows: what a delta says of each session; `test_shard_machines.py` compares with lists of rows.

Spark's cases are in `tests/integration/operator_cases.py`.
"""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from coordinator.model.schema import ROW_COLUMN, Field
from store_actors.engine.versions import CHANGE_COLUMN, REMOVED, UPDATED, UPDATED_AND_REMOVED, Change
from store_actors.operators.session_windows import MERGED, SessionShard
from tests.unit.session_machine import COUNT, SECOND, TIMES, input_of, schema_of

WORDS = (Field("word", "string"),)


class WordQuery:
    """A query whose keys are words; times are in seconds, and the watermark is 30 s behind."""

    def __init__(self) -> None:
        self.schema = schema_of(WORDS, (), (COUNT,), "append")
        self.shard = SessionShard(self.schema)
        self.watermark_ms = 0

    def run(self, lines: list[tuple[str, int]]) -> Change:
        rows = [(word, at, at + 10) for word, at in lines]
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


def test_a_session_that_a_batch_begins_and_closes_is_emitted_once() -> None:
    query = WordQuery()
    change = query.run([("brief", 5), ("brief", 7), ("long", 100)])
    assert query.session_counts(query.shard.output(change.delta)) == Counter({("brief", 5, 17, 2)})
    kinds = dict(
        zip(change.delta.column("word").to_pylist(), change.delta.column(CHANGE_COLUMN).to_pylist(), strict=True)
    )
    assert kinds == {"brief": UPDATED_AND_REMOVED, "long": UPDATED}


def test_a_session_that_grows_keeps_its_number_and_a_merged_one_is_distinguished_from_a_closed_one() -> None:
    query = WordQuery()
    first = query.run([("a", 31), ("a", 50)]).delta.to_pylist()
    number = {row["session_start"].timestamp(): row[ROW_COLUMN] for row in first}
    change = query.run([("a", 41)])
    assert sorted((row[CHANGE_COLUMN], row[ROW_COLUMN], row["n"]) for row in change.delta.to_pylist()) == [
        (UPDATED, number[31], 3),
        (MERGED, number[50], 1),
    ]
    assert query.shard.output(change.delta).num_rows == 0
    assert (change.rows_updated, change.rows_removed) == (1, 1)


def test_a_delta_marks_every_row_with_what_happened_to_its_session() -> None:
    query = WordQuery()
    query.run([("old", 1), ("a", 30), ("a", 45)])  # the watermark is 15: "old" is closed at once
    change = query.run([("a", 39), ("b", 62), ("c", 1)])
    rows = {(row["word"], row[CHANGE_COLUMN]): row["n"] for row in change.delta.to_pylist()}
    assert rows == {("a", UPDATED): 3, ("a", MERGED): 1, ("b", UPDATED): 1}
    assert change.rows_late == 1
    query.run([("b", 90)])
    change = query.run([("d", 110)])
    assert {(row["word"], row[CHANGE_COLUMN]) for row in change.delta.to_pylist()} == {("d", UPDATED), ("b", REMOVED)}

"""Rows that share a key, and rows that expire, against plain dicts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.schema import ROW_COLUMN, Field, StateSchema
from store_actors.engine.expiry_queue import NEVER, ExpiryQueue
from store_actors.engine.multimap import MultiTable
from store_actors.engine.table import GroupTable
from store_actors.engine.versions import CHANGE_COLUMN, Compaction, UndoPart

SCHEMA = StateSchema.keyed((Field("k", "string"), Field(ROW_COLUMN, "int64", nullable=False)), (Field("v", "int64"),))
KEYS = st.sampled_from(["a", "b", "c", None, ""])


class Model:
    """A multimap from key to values, as a dict of its rows by number."""

    def __init__(self) -> None:
        self.table = MultiTable(SCHEMA)
        self.rows: dict[int, tuple[str | None, int]] = {}

    def batch(self, rows: dict[int, tuple[str | None, int]]) -> pa.RecordBatch:
        return pa.record_batch(
            [
                pa.array([key for key, _ in rows.values()], pa.string()),
                pa.array(list(rows), pa.int64()),
                pa.array([value for _, value in rows.values()], pa.int64()),
            ],
            schema=SCHEMA.row_schema(),
        )

    def change(self, add: list[tuple[str | None, int]], remove: list[int], version: int) -> None:
        table = self.table
        step = table.begin(version)
        numbers = table.numbers(len(add)).tolist()  # before any row is removed, as operators do
        removed_rows = {number: self.rows[number] for number in remove}
        words = table.table.rows_of(self.batch(removed_rows))
        slots = table.table.remove_rows(words)
        step.parts.append(UndoPart(np.empty((0, words.shape[1]), np.uint64), table.table.rows[slots].copy()))
        new = dict(zip(numbers, add, strict=True))
        touched = table.table.upsert(table.table.rows_of(self.batch(new)), version)
        assert len(touched.before) == 0
        step.parts.append(UndoPart(table.table.rows[touched.created].copy(), touched.before))
        for number in remove:
            del self.rows[number]
        self.rows |= new

    def check(self) -> None:
        keys = ["a", "b", "c", None, "", "never"]
        probe = pa.record_batch({"k": pa.array(keys, pa.string())})
        key_indices, slots = self.table.table.match(*self.table.table.chain_keys(probe))
        rows = self.table.table.decode(self.table.table.rows[slots]).to_pylist()
        matched = sorted(
            (index, row[ROW_COLUMN], row["v"]) for index, row in zip(key_indices.tolist(), rows, strict=True)
        )
        assert matched == sorted(
            (keys.index(key), number, value) for number, (key, value) in self.rows.items() if key in keys
        )
        assert key_indices.tolist() == sorted(key_indices.tolist())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_multimap_finds_all_rows_of_a_key_through_changes_undo_and_reload(data: st.DataObject) -> None:
    model = Model()
    for version in range(1, data.draw(st.integers(1, 8)) + 1):
        before = dict(model.rows)
        add = data.draw(st.lists(st.tuples(KEYS, st.integers(-5, 5)), max_size=12))
        remove = data.draw(st.lists(st.sampled_from(sorted(before)), unique=True)) if before else []
        model.change(add, remove, version + 100)
        model.check()
        match data.draw(st.sampled_from(["commit", "abort", "compact", "reload"])):
            case "abort":
                model.table.abort()
                model.rows = before
            case "compact":
                model.table.commit()
                Compaction().run(model.table)
            case "reload":
                model.table.commit()
                rows = model.table.snapshot()
                model.table = MultiTable(SCHEMA)
                model.table.load(
                    rows.append_column(CHANGE_COLUMN, pa.array(np.zeros(len(rows), np.int8))), version + 100, 0
                )
            case "commit":
                model.table.commit()
        model.check()
        if model.table.version != version + 100:
            model.table.version = version + 100


def test_a_thousand_rows_of_one_key_and_a_thousand_keys_are_all_found() -> None:
    model = Model()
    model.change([("hot", value) for value in range(1000)] + [(f"k{value}", value) for value in range(1000)], [], 1)
    probe = pa.record_batch({"k": pa.array(["hot", "k7", "hot", "cold"])})
    key_indices, slots = model.table.table.match(*model.table.table.chain_keys(probe))
    assert np.bincount(key_indices, minlength=4).tolist() == [1000, 1, 1000, 0]
    assert len(set(slots.tolist())) == 1001


@given(st.lists(st.lists(st.integers(0, 50), max_size=10), max_size=10), st.lists(st.integers(0, 60), max_size=10))
def test_an_expiry_queue_returns_each_due_slot_once(batches: list[list[int]], limits: list[int]) -> None:
    queue, waiting, slot = ExpiryQueue(), dict[int, int](), 0
    for batch, limit in zip(batches, limits, strict=False):
        slots = np.arange(slot, slot + len(batch))
        slot += len(batch)
        queue.add(np.array(batch, np.int64), slots)
        waiting |= dict(zip(slots.tolist(), batch, strict=True))
        due = queue.due(limit).tolist()
        assert sorted(due) == sorted(waiting_slot for waiting_slot, expiry in waiting.items() if expiry <= limit)
        for due_slot in due:
            del waiting[due_slot]


def test_a_late_expiry_does_not_hold_entries_of_the_same_batch() -> None:
    queue, size = ExpiryQueue(), 1000
    for batch in range(200):
        expiries = np.full(size, batch)
        expiries[7] = 10**6
        queue.add(expiries, np.arange(size))
        assert len(queue.due(batch)) == size - 1
    assert (queue.entries, queue.nbytes) == (200, 200 * 16)
    assert len(queue.due(10**6)) == 200


def test_the_expiry_queue_of_a_table_follows_its_rows() -> None:
    # Each key is removed before it is due: evictions never look at its entry.
    schema = StateSchema((Field("until", "timestamp"),), (), (), "until", 0, "update")
    table = GroupTable(schema)
    rows = np.zeros((5000, table.layout.row_words), np.uint64)
    for version in range(100):
        rows[:, table.layout.expiry_word] = np.arange(10**6 + 5000 * version, 10**6 + 5000 * (version + 1))
        table.put(rows)
        table.remove_rows(rows[:-100])
    assert len(table) == 100 * 100
    assert table._expiry_queue.entries <= 2 * len(table) + (1 << 16)
    assert (len(table.evict(2 * 10**6)), len(table)) == (100 * 100, 0)


def test_slots_that_never_expire_are_not_entered() -> None:
    queue = ExpiryQueue()
    queue.add(np.array([NEVER, 5]), np.array([1, 2]))
    assert queue.due(NEVER - 1).tolist() == [2]
    assert queue.nbytes == 0

"""Slots that expire against a plain dict, and what a queue of them holds; `test_shard_machines.py` has tables whose rows expire."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.model.schema import Field, StateSchema
from store_actors.engine.expiry_queue import NEVER, ExpiryQueue
from store_actors.engine.table import GroupTable


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

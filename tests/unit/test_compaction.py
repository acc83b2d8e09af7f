"""Memory of what no version has any more is freed while a shard runs: strings and lists of every operator, and slots that expire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, OperatorKind, StateSchema
from store_actors.engine.expiry_queue import NEVER, ExpiryQueue
from store_actors.engine.table import GroupTable
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.operators.deduplicate import DeduplicateShard
from store_actors.operators.join import JoinShard
from store_actors.operators.join_schema import join_schema
from store_actors.operators.session_windows import SessionShard
from store_actors.operators.top import top_shard
from store_actors.operators.top_schema import top_schema
from tests.unit import session_machine
from tests.unit.top_machine import by

#: Rows of a batch, and bytes of a string: a batch adds 200 kB of new strings, all batches together 40 MB.
ROWS, LENGTH, BATCHES = 200, 1000, 200
BATCH = ROWS * LENGTH
SECOND = 1_000_000


def texts(batch: int, name: str) -> pa.Array:
    return pa.array([f"{name} {batch} {row} ".ljust(LENGTH, "x") for row in range(ROWS)])


def times(batch: int) -> pa.Array:
    return pa.array(np.full(ROWS, batch * SECOND)).cast(pa.timestamp("us", "UTC"))


def ids() -> pa.Array:
    return pa.array(range(ROWS), pa.int64())


def of_raw(schema: StateSchema, **columns: pa.Array) -> ShardInput:
    return ShardInput.of_raw(schema, pa.record_batch(columns).cast(schema.raw_schema()))


@dataclass(frozen=True)
class Case:
    """Batches of an operator: an empty shard, the rows of each batch, and its watermark in milliseconds."""

    shard: Callable[[], Any]
    rows: Callable[[int], ShardInput]
    watermark_ms: Callable[[int], int] = lambda batch: 0

    def step(self) -> Callable[[int], int]:
        """Return a function that runs a batch, and returns the bytes of the shard after it."""
        shard = self.shard()

        def step(batch: int) -> int:
            shard.apply(self.rows(batch), self.watermark_ms(batch), batch)
            shard.commit()
            return int(shard.nbytes)

        return step


def goes_on(batch: int) -> int:
    """What came before a batch is over."""
    return (batch - 1) * 1000


LAST = Accumulator(AccumulatorKind.LAST, ("v",), (Field("a0_last", "string"), Field("a0_set", "bool")))
COLLECT = Accumulator(AccumulatorKind.COLLECT_LIST, ("v",), (Field("a0_values", "list<string>", False),))
TEXT, TIME = (Field("v", "string"),), Field("t", "timestamp")
OVERWRITTEN = StateSchema((Field("k", "int64"),), TEXT, (LAST,), None, None, "update")
TIMED = StateSchema((TIME, Field("k", "string")), TEXT, (LAST,), "t", 0, "append")
LISTS = StateSchema((TIME, Field("k", "int64")), TEXT, (COLLECT,), "t", 0, "append")
SESSIONS = session_machine.schema_of((Field("k", "string"),), TEXT, (LAST,), "append")
DUPLICATES = StateSchema(
    (Field("k", "string"), TIME), (), (), "t", 0, "append", operator=OperatorKind.DEDUPLICATE, options={"late_us": 0}
)
SIDES = join_schema(
    (Field("k0", "string"),), (Field("lt", "timestamp"),), (Field("r0", "string"), Field("rt", "timestamp")),
    {"join_type": "full_outer", "expiry": ["lt", "rt"]},
)  # fmt: skip


def timed(batch: int) -> ShardInput:
    return of_raw(TIMED, t=times(batch), k=texts(batch, "k"), v=texts(batch, "v"))


def session_rows(batch: int) -> ShardInput:
    bounds = {"session_start": times(batch), "session_end": times(batch + 1)}
    return of_raw(SESSIONS, k=texts(batch, "k"), **bounds, v=texts(batch, "v"))


def joined_rows(batch: int) -> ShardInput:
    left = pa.table({"k0": texts(batch, "k"), "lt": times(batch)})
    right = pa.table({"k0": texts(batch, "k"), "r0": texts(batch, "r"), "rt": times(batch)})
    return ShardInput((left, right), 2 * ROWS)


def first_rows(n: int) -> Case:
    schema = top_schema((Field("k", "int64"),), (Field("n", "int64"), *TEXT), n, [by("n", descending=True)])
    return Case(
        lambda: top_shard(schema),
        lambda batch: of_raw(schema, k=ids(), n=pa.array(np.full(ROWS, batch)), v=texts(batch, "v")),
    )


CASES: dict[str, Case] = {
    "overwritten values": Case(
        lambda: AggregateShard(OVERWRITTEN), lambda batch: of_raw(OVERWRITTEN, k=ids(), v=texts(batch, "v"))
    ),
    # Keys that come too late, which the state never has.
    "late rows": Case(lambda: AggregateShard(TIMED), timed, lambda batch: 10**9),
    "closed groups": Case(lambda: AggregateShard(TIMED), timed, goes_on),
    "closed sessions": Case(lambda: SessionShard(SESSIONS), session_rows, goes_on),
    "forgotten duplicates": Case(
        lambda: DeduplicateShard(DUPLICATES),
        lambda batch: of_raw(DUPLICATES, k=texts(batch, "k"), t=times(batch)),
        goes_on,
    ),
    "the first row": first_rows(1),
    "the first two rows": first_rows(2),
    "joined rows": Case(lambda: JoinShard(SIDES), joined_rows, goes_on),
    "lists": Case(
        lambda: AggregateShard(LISTS),
        lambda batch: of_raw(LISTS, t=times(batch), k=ids(), v=texts(batch, "v")),
        goes_on,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_follows_what_versions_hold(case: str) -> None:
    """Two versions and their undo have at most 8 strings a row; all batches together add 200 and more."""
    step = CASES[case].step()
    assert max(step(batch) for batch in range(1, BATCHES + 1)) < 5 * 8 * BATCH


@pytest.mark.parametrize("removes", [False, True], ids=["overwritten", "removed"])
def test_memory_of_a_keyed_store_follows_what_versions_hold(removes: bool) -> None:
    """Each version overwrites the rows of the one before, or removes them."""
    shard = KeyedShard((Field("k", "string" if removes else "int64"),), TEXT)
    for batch in range(1, BATCHES + 1):
        handle = shard.begin(shard.version)
        if removes and batch > 1:
            handle.remove(pa.table({"k": texts(batch - 1, "k")}))
        handle.put(pa.table({"k": texts(batch, "k") if removes else ids(), "v": texts(batch, "v")}))
        handle.commit()
        assert shard.nbytes < 5 * 8 * BATCH


def test_a_pool_that_is_fully_in_use_is_not_copied() -> None:
    schema = StateSchema((Field("k", "string"),), TEXT, (LAST,), None, None, "update")
    shard = AggregateShard(schema)
    pools = set()
    for batch in range(1, 50):
        shard.apply(of_raw(schema, k=texts(batch, "k"), v=texts(0, "v")), 0, batch)
        shard.commit()
        pools.add(id(shard.table.pool))
    assert len(shard) == 49 * ROWS
    assert len(pools) == 1


# -- queues of slots that expire ---------------------------------------------------------------------------------------


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

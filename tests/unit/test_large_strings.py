"""More than 4 GiB of strings in one column of a shard, really: ``pytest -m large tests/unit/test_large_strings.py``, alone.

Takes 10 GB of memory and some minutes. The same paths with small pieces are in ``test_pieces.py`` and ``test_snapshot_pieces.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from coordinator.storage.local import LocalObjectStore
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard, output_of
from store_actors.serving.files import encode_delta
from tests.unit.snapshot_memory import load, write

pytestmark = [pytest.mark.large, pytest.mark.timeout(3600)]

SCHEMA = StateSchema(
    keys=(Field("k", "int64"),),
    inputs=(Field("v", "string"),),
    accumulators=(Accumulator(AccumulatorKind.MAX, ("v",), (Field("a0_max", "string"),)),),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)
LENGTH, DIGITS, GROUPS, BATCH = 1 << 20, 12, 4200, 100


def texts(numbers: np.ndarray) -> pa.Array:
    """Return a text of 1 MiB for each number, beginning with the number."""
    content = np.full((len(numbers), LENGTH), ord("x"), np.uint8)
    for digit in range(DIGITS):
        content[:, digit] = ord("0") + numbers // 10 ** (DIGITS - 1 - digit) % 10
    ends = (np.arange(len(numbers) + 1) * LENGTH).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(numbers), [None, pa.py_buffer(ends), pa.py_buffer(content)])


def numbers_of(column: pa.ChunkedArray) -> np.ndarray:
    """Return the numbers that texts begin with, and check the rest of each text."""
    numbers = [np.empty(0, np.int64)]
    for chunk in column.chunks:
        assert chunk.nbytes < 2**31
        ends = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        assert (np.diff(ends) == LENGTH).all()
        content = np.frombuffer(chunk.buffers()[2], np.uint8)[ends[0] : ends[-1]].reshape(-1, LENGTH)
        assert (content[:, DIGITS:] == ord("x")).all()
        digits = content[:, :DIGITS].astype(np.int64) - ord("0")
        numbers.append(digits @ 10 ** np.arange(DIGITS - 1, -1, -1))
    return np.concatenate(numbers)


def same(table: pa.Table) -> int:
    """Return the number of rows, and check that each has the text of its key."""
    keys = table.column("k").to_numpy()
    assert (numbers_of(table.column("a0_max")) == keys).all()
    return len(keys)


def test_a_column_of_more_than_4_gib_is_applied_emitted_written_and_loaded(tmp_path: Path) -> None:
    shard = AggregateShard(SCHEMA)
    for begin in range(0, GROUPS, BATCH):
        numbers = np.arange(begin, begin + BATCH)
        rows = ShardInput.of_raw(SCHEMA, pa.record_batch({"k": numbers, "v": texts(numbers)}))
        assert same(shard.apply(rows, 0, shard.version + 1).delta) == BATCH
        shard.commit()
    assert shard.table.pool.used > 2**32
    # More than 2 GiB in one batch's results, and in its delta: half of the groups are touched by a lesser text.
    half = np.arange(0, GROUPS, 2)
    rows = ShardInput.of_raw(SCHEMA, pa.record_batch({"k": half, "v": pa.array(["!"] * len(half))}))
    change = shard.apply(rows, 0, shard.version + 1)
    shard.commit()
    emitted = output_of(change.delta, "update")
    assert emitted.nbytes > 2**31
    assert same(emitted) == len(half)
    data, _ = encode_delta(change, SCHEMA, {})
    del emitted, change
    batches = pa.ipc.open_file(data)
    read = sum(same(pa.table(batches.get_batch(number))) for number in range(batches.num_record_batches))
    assert read == len(half)
    del batches, data
    objects = LocalObjectStore(tmp_path)
    snapshot = write(shard, objects, 1 << 26)
    assert len(snapshot.files) > 32
    del shard
    loaded = load(snapshot, objects, SCHEMA)
    assert loaded.table.pool.used > 2**32
    assert sum(same(table) for make_tables in loaded.frozen() for table in make_tables()) == GROUPS

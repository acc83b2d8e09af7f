"""What the engine alone costs a row, on one core: upserts, gets, removals, counts and sums; no Ray and no Spark.

``python -m benchmarks.engine --json result.json``

A keyed store has rows of two int64 values under int64 keys, or under UUIDs as text. Each operation takes a batch of random keys, is
committed, and is timed with the conversion from and to Arrow. A hash table that does nothing else is updated with the same keys beside
it: no versions, no commit, no Arrow, no deletions, so it is about as fast as an upsert can be, and the ratio to it says more than
nanoseconds of some machine. Bytes a key are those of a state whose last two batches changed a tenth of its keys each, with the way back
from both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit

from coordinator.model.accumulator_kinds import AccumulatorKind
from coordinator.model.schema import Accumulator, Field, StateSchema
from store_actors.engine.versions import RETAINED_VERSIONS
from store_actors.keyed.shard import KeyedShard
from store_actors.messages.requests import ShardInput
from store_actors.operators.aggregate import AggregateShard

#: Counts and sums by an integer key.
_COUNT_AND_SUM = StateSchema(
    keys=(Field("k", "int64"),),
    inputs=(Field("v", "int64"),),
    accumulators=(
        Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),)),
        Accumulator(AccumulatorKind.SUM_INT, ("v",), (Field("total", "int64"),)),
    ),
    expiry_key=None,
    delay_ms=None,
    output_mode="update",
)
_DASHES = (8, 13, 18, 23)
_VALUES = (Field("n", "int64"), Field("total", "int64"))
_Integers = np.ndarray[Any, np.dtype[np.int64]]


def uuids(count: int) -> pa.Array:
    """Return random UUIDs as text, the same for the same number."""
    digits = np.frombuffer(np.random.default_rng(count).bytes(16 * count).hex().encode(), "S1").reshape(count, 32)
    text = np.full((count, 36), b"-", "S1")
    text[:, [place for place in range(36) if place not in _DASHES]] = digits
    offsets = pa.py_buffer(np.arange(0, 36 * count + 1, 36, dtype=np.int32))
    return pa.StringArray.from_buffers(count, offsets, pa.py_buffer(text.tobytes()))


def _median_ns(action: Callable[[Any], Any], inputs: Sequence[Any]) -> float:
    """Return the median of nanoseconds a row of calls with each of the inputs; the first of them warms up."""
    nanoseconds = []
    for rows in inputs:
        started = time.perf_counter_ns()
        action(rows)
        nanoseconds.append((time.perf_counter_ns() - started) / len(rows))
    return statistics.median(nanoseconds[1:])


@njit  # type: ignore[misc]
def _slot(slots: _Integers, keys: _Integers, key: int) -> int:
    """Return the slot of a key, or the free one for it: linear probing from a multiplicative hash."""
    mask = len(slots) - 1
    slot = np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask
    while slots[slot] >= 0 and keys[slots[slot]] != key:
        slot = (slot + 1) & mask
    return slot


@njit  # type: ignore[misc]
def _put_all(slots: _Integers, keys: _Integers) -> None:
    for row in range(len(keys)):
        slots[_slot(slots, keys, keys[row])] = row


@njit  # type: ignore[misc]
def _exchange(slots: _Integers, keys: _Integers, values: _Integers, given: _Integers, exchanged: _Integers) -> None:
    """Set the values of given keys, each of which is there, and hand out those before."""
    for row in range(len(given)):
        held = slots[_slot(slots, keys, given[row])]
        # A loop over the two columns takes half as long again.
        n, total = values[held, 0], values[held, 1]
        values[held, 0], values[held, 1] = exchanged[row, 0], exchanged[row, 1]
        exchanged[row, 0], exchanged[row, 1] = n, total


def _table_ns(keys: int, rows: int, times: int) -> float:
    """Return nanoseconds a row of upserts in a hash table that does nothing else."""
    random = np.random.default_rng(1)
    held, slots = random.permutation(keys), np.full(1 << (2 * keys - 1).bit_length(), -1, np.int32)
    _put_all(slots, held)
    values, exchanged = (np.zeros((count, len(_VALUES)), np.int64) for count in (keys, rows))
    batches = [random.integers(0, keys, rows) for _ in range(times + 1)]
    return _median_ns(lambda given: _exchange(slots, held, values, given, exchanged), batches)


class _Store:
    def __init__(self, keys: pa.Array, rows: int, seed: int) -> None:
        self._keys, self._rows = keys, rows
        self._random = np.random.default_rng(seed)
        self.shard = KeyedShard((Field("k", "string" if pa.types.is_string(keys.type) else "int64"),), _VALUES)
        self._put(keys)

    def _put(self, keys: pa.Array) -> None:
        numbers = pa.array(np.arange(len(keys)))
        handle = self.shard.begin(self.shard.version)
        handle.put(pa.table({"k": keys, "n": numbers, "total": numbers}))
        handle.commit()

    def _drawn(self, rows: int) -> pa.Array:
        return self._keys.take(pa.array(self._random.integers(0, len(self._keys), rows)))

    def _get(self, keys: pa.Array) -> None:
        self.shard.read().multi_get(pa.table({"k": keys}))

    def _remove(self, keys: pa.Array) -> None:
        handle = self.shard.begin(self.shard.version)
        handle.remove(pa.table({"k": keys}))
        handle.commit()

    def measure(self, times: int) -> dict[str, float]:
        """Return nanoseconds a row by operation, and bytes a key."""
        # Memory has two versions besides the newest one: what these overwrote counts, too.
        for _ in range(RETAINED_VERSIONS):
            self._put(self._drawn(len(self._keys) // 10))
        bytes_a_key = self.shard.nbytes / len(self._keys)
        drawn = [self._drawn(self._rows) for _ in range(times + 1)]
        # A key is removed once.
        parts = [self._keys.slice(number * self._rows, self._rows) for number in range(times + 1)]
        return {
            "upsert_ns": _median_ns(self._put, drawn),
            "get_ns": _median_ns(self._get, drawn),
            "remove_ns": _median_ns(self._remove, parts),
            "bytes_a_key": bytes_a_key,
        }


def _counted(keys: int, rows: int, times: int) -> dict[str, float]:
    """Return nanoseconds a row of counts and sums by an integer key, and bytes a key."""
    shard, random = AggregateShard(_COUNT_AND_SUM), np.random.default_rng(keys)

    def apply(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        batch = pa.record_batch({"k": numbers, "v": numbers})
        shard.apply(ShardInput.of_raw(_COUNT_AND_SUM, batch), 0, shard.version + 1)
        shard.commit()

    apply(random.permutation(keys))
    for _ in range(RETAINED_VERSIONS):
        apply(random.integers(0, keys, keys // 10))
    bytes_a_key = shard.nbytes / keys
    fold_ns = _median_ns(apply, [random.integers(0, keys, rows) for _ in range(times + 1)])
    return {"fold_ns": fold_ns, "bytes_a_key": bytes_a_key}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=2_000_000, help="keys of a store (%(default)s)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of a batch (%(default)s)")
    parser.add_argument("--times", type=int, default=7, help="batches of each operation (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on one core, and print the figures."""
    options = _parse(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    keys = max(options.keys, options.rows * (options.times + 1))
    results = {
        "int64 keys": _Store(pa.array(np.random.default_rng(1).permutation(keys)), options.rows, 1).measure(
            options.times
        ),
        "UUID text keys": _Store(uuids(keys), options.rows, 2).measure(options.times),
        "count and sum, int64 keys": _counted(keys, options.rows, options.times),
        "a hash table alone, int64 keys": {"table_ns": _table_ns(keys, options.rows, options.times)},
    }
    print(f"{keys:,} keys, {options.rows:,} rows a batch, one core")
    for name, row in results.items():
        figures = "  ".join(f"{figure.replace('_', ' ')} {value:,.0f}" for figure, value in row.items())
        print(f"  {name:<31} {figures}")
    if options.json is not None:
        options.json.write_text(json.dumps({"keys": keys, "rows": options.rows, **results}, indent=2))


if __name__ == "__main__":
    main()

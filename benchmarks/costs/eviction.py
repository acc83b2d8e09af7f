"""The cost of closing state, by the rows that are closed and by the rows that there are; no Ray and no Spark.

``python -m benchmarks.costs eviction --json result.json``

Shards of each kind run in this process, at two sizes of state. A measured batch has no rows, only a watermark (or a time) that ends
the same number of rows at both sizes; between two such batches, as many rows are added. The times must follow the number of rows
closed: an engine that scans its state would take as many times as long as the state is larger.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from coordinator.model.schema import ROW_COLUMN, Accumulator, AccumulatorKind, Field, OperatorKind, StateSchema
from coordinator.runtime.runtime import random_seed
from store_actors.keyed.shard import KeyedShard
from store_actors.messages import ShardInput
from store_actors.operators.join_schema import join_schema
from store_actors.operators.make_shard import OperatorShard, make_shard

#: Rows that a measured batch closes, and how many times as large the large state is as the small one.
_CLOSED = 20_000
_LARGER = 10
_MEASURED = 7
#: Event time from one step to the next, in milliseconds.
_STEP_MS = 1_000
_TIMES = tuple(Field(name, "timestamp") for name in ("session_start", "session_end"))
_COUNT = Accumulator(AccumulatorKind.COUNT_ROWS, (), (Field("n", "int64", False),))


def _at(keys: int, step: int) -> pa.Array:
    return pa.array(np.full(keys, step * _STEP_MS * 1000), pa.timestamp("us", tz="UTC"))


class _State(ABC):
    """State whose rows end in steps of :data:`_CLOSED` rows."""

    @abstractmethod
    def add(self, step: int) -> None:
        """Add the rows of a step."""

    @abstractmethod
    def close(self, step: int) -> int:
        """Close the rows of a step, the oldest there is; return how many."""

    @abstractmethod
    def __len__(self) -> int: ...


class _Operator(_State):
    """A shard of an operator.

    Parameters
    ----------
    rows_of
        Function that returns the rows of a step, which expire at the step's time.
    """

    def __init__(self, schema: StateSchema, rows_of: Callable[[StateSchema, int], ShardInput]) -> None:
        self._schema, self._rows_of = schema, rows_of
        self._shard: OperatorShard = make_shard(schema, random_seed())
        self._no_rows = ShardInput(tuple(columns.empty_table() for columns in schema.input_schemas()), 0)

    def __len__(self) -> int:
        return len(self._shard)

    def add(self, step: int) -> None:
        self._batch(self._rows_of(self._schema, step), self._shard.watermark_ms)

    def close(self, step: int) -> int:
        return self._batch(self._no_rows, step * _STEP_MS)

    def _batch(self, rows: ShardInput, watermark_ms: int) -> int:
        change = self._shard.apply(rows, watermark_ms, self._shard.version + 1)
        self._shard.commit()
        return change.rows_removed


class _Timeouts(_State):
    """A keyed store of the fleet's functions, whose keys time out."""

    def __init__(self) -> None:
        self._shard = KeyedShard(
            (Field("k", "int64"),), (Field("n", "int64"), Field("timeout_us", "int64")), "timeout_us"
        )

    def __len__(self) -> int:
        return len(self._shard)

    def add(self, step: int) -> None:
        with self._shard.begin(self._shard.version) as handle:
            due = np.full(_CLOSED, step * _STEP_MS * 1000)
            handle.put(pa.table({"k": _keys(step), "n": due, "timeout_us": due}))
            handle.commit()

    def close(self, step: int) -> int:
        with self._shard.begin(self._shard.version) as handle:
            removed = handle.remove(handle.due(step * _STEP_MS * 1000).select(["k"]))
            handle.commit()
        return removed


def _keys(step: int) -> pa.Array:
    """Return keys that no other step has, shuffled."""
    return pa.array(np.random.default_rng(step).permutation(_CLOSED) + step * _CLOSED, pa.int64())


def _raw(schema: StateSchema, *columns: pa.Array) -> ShardInput:
    return ShardInput.of_raw(schema, pa.record_batch(list(columns), schema=schema.raw_schema()))


def _aggregate() -> _State:
    keys = Field("k", "int64"), Field("end", "timestamp")
    schema = StateSchema(keys, (), (_COUNT,), "end", 0, "update")
    return _Operator(schema, lambda schema, step: _raw(schema, _keys(step), _at(_CLOSED, step)))


def _session() -> _State:
    span = tuple(Accumulator(AccumulatorKind.VALUE, (column.name,), (column,)) for column in _TIMES)
    schema = StateSchema(
        (Field("k", "int64"), Field(ROW_COLUMN, "int64", False)), _TIMES, (*span, _COUNT), "session_end", 0, "append",
        OperatorKind.SESSION,
    )  # fmt: skip
    return _Operator(schema, lambda schema, step: _raw(schema, _keys(step), _at(_CLOSED, step - 1), _at(_CLOSED, step)))


def _deduplicate() -> _State:
    schema = StateSchema(
        (Field("k", "int64"), Field("at", "timestamp")), (), (), "at", 0, "append", OperatorKind.DEDUPLICATE
    )
    return _Operator(schema, lambda schema, step: _raw(schema, _keys(step), _at(_CLOSED, step)))


def _join() -> _State:
    left, right = ((Field(side, "int64"), Field(f"{side}_end", "timestamp")) for side in ("left", "right"))
    options = {"join_type": "inner", "expiry": ["left_end", "right_end"], "output": [["left"], ["right"]]}

    def rows_of(schema: StateSchema, step: int) -> ShardInput:
        # Half of the rows are on each side, and none match.
        keys = _keys(step)
        halves = keys[: _CLOSED // 2], keys[_CLOSED // 2 :]
        tables = tuple(
            pa.table([half, half, _at(len(half), step)], schema=kind)
            for half, kind in zip(halves, schema.input_schemas(), strict=True)
        )
        return ShardInput(tables, _CLOSED)

    return _Operator(join_schema((Field("k", "int64"),), left, right, options, 0), rows_of)


_KINDS: dict[str, Callable[[], _State]] = {
    "aggregate": _aggregate,
    "session": _session,
    "dedup": _deduplicate,
    "join": _join,
    "timeouts": _Timeouts,
}


def _closing_s(state: _State, rows: int) -> float:
    """Return the median seconds of a batch that closes :data:`_CLOSED` of a number of rows."""
    steps = max(2, rows // _CLOSED)
    for step in range(1, steps + 1):
        state.add(step)
    seconds = []
    for step in range(1, _MEASURED + 1):
        before, started = len(state), time.perf_counter()
        closed = state.close(step)
        seconds.append(time.perf_counter() - started)
        if closed != _CLOSED or len(state) != before - _CLOSED:
            raise AssertionError(f"a batch closed {closed} rows, and not {_CLOSED}")
        state.add(steps + step)
    return statistics.median(seconds)


def _measure(rows: int) -> list[dict[str, Any]]:
    """Return, for each kind of state, the seconds of closing as many rows in a state of `rows` rows as in one of a tenth of that."""
    rows = max(rows, 2 * _LARGER * _CLOSED)
    results = []
    for name, make in _KINDS.items():
        small_s, large_s = _closing_s(make(), rows // _LARGER), _closing_s(make(), rows)
        results.append(
            {"state": name, "rows": rows, "closed": _CLOSED, "small_s": small_s, "large_s": large_s,
             "ratio": large_s / small_s}
        )  # fmt: skip
    return results


def _report(results: Sequence[dict[str, Any]]) -> None:
    rows = results[0]["rows"]
    print(f"\n{_CLOSED:,} rows closed in a batch, milliseconds; an engine that scans its state would be at {_LARGER}")
    print(f"  {'':<10} {rows // _LARGER:>12,} rows {rows:>12,} rows    large / small")
    for row in results:
        print(f"  {row['state']:<10} {row['small_s'] * 1000:17.1f} {row['large_s'] * 1000:17.1f} {row['ratio']:16.2f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("--state", type=int, default=3_000_000, help="rows in the large state (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all figures")


def run(options: argparse.Namespace) -> None:
    """Measure and print the figures."""
    results = _measure(options.state)
    _report(results)
    if options.json is not None:
        options.json.write_text(json.dumps({"evictions": results}, indent=2))

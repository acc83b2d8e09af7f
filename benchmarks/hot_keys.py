"""What it costs a store actor to count the hottest keys of its shards: batches that are counted and others, and look-ups, in turn.

``python -m benchmarks.hot_keys --json result.json``

No Ray, no Spark: a batch is applied and its delta made as in a store actor; every second one is counted, too, as far as batches are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.loading import SCHEMA
from store_actors.messages import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.files import encode_delta
from store_actors.serving.hot_key_tracker import HotKeyTracker

_KEYS = 100_000
_COLUMNS = [field.name for field in SCHEMA.input_keys]


def _batch(random: np.random.Generator, rows: int) -> ShardInput:
    """Rows of which three in ten have one key."""
    keys = random.integers(0, _KEYS, rows)
    keys[random.random(rows) < 0.3] = 7
    return ShardInput.of_raw(SCHEMA, pa.record_batch({"k": keys, "v": keys}))


def _apply(shard: AggregateShard, rows: ShardInput) -> None:
    change = shard.apply(rows, 0, shard.version + 1)
    encode_delta(change, SCHEMA, {})
    shard.commit()


def _in_turn(times: int, work: Callable[[], Any], count: Callable[[Any], None]) -> tuple[float, float]:
    """Microseconds of CPU time that some work takes by itself and with what counts it, on average: not each time is counted."""
    took: tuple[list[float], list[float]] = [], []
    for turn in range(2 * times):
        begun = time.thread_time()
        done = work()
        if turn % 2:
            count(done)
        took[turn % 2].append(1e6 * (time.thread_time() - begun))
    # The first ones are all counted.
    without, counted = (statistics.fmean(one[times // 4 :]) for one in took)
    return without, counted


def measured(rows: int, times: int) -> dict[str, Any]:
    """Batches of some rows."""
    random, heat, shard = np.random.default_rng(rows), HotKeyTracker(threading.RLock()), AggregateShard(SCHEMA)
    _apply(shard, ShardInput.of_raw(SCHEMA, pa.record_batch({"k": np.arange(_KEYS), "v": np.arange(_KEYS)})))
    batches = iter([_batch(random, rows) for _ in range(2 * times)])

    def batch() -> ShardInput:
        made = next(batches)
        _apply(shard, made)
        return made

    without, counted = _in_turn(times, batch, lambda made: heat.written("s", 0, _COLUMNS, made.tables))
    hottest = heat.hottest("s", 0, 1).written
    return {
        "rows": rows,
        "us": round(without, 1),
        "us_counted": round(counted, 1),
        "hottest": hottest and hottest.to_pylist(),
    }


def looked_up(times: int) -> dict[str, Any]:
    """What one look-up of one key takes longer."""
    heat, keys = HotKeyTracker(threading.RLock()), pa.table({"k": pa.array([7])})
    begun = time.thread_time()
    for _ in range(times):
        heat.looked_up("s", 0, keys)
    return {"look_up_us": round(1e6 * (time.thread_time() - begun) / times, 2)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    told = [measured(rows, max(80, min(options.times, 2_000_000 // rows))) for rows in (10, 1_000, 100_000)]
    print("rows of a batch   alone        counted, too")
    for one in told:
        print(f"{one['rows']:15,}   {one['us']:8,.0f} us   {one['us_counted']:8,.0f} us")
    look_ups = looked_up(20 * options.times)
    print(f"a look-up takes {look_ups['look_up_us']} us longer")
    if options.json:
        options.json.write_text(json.dumps({"batches": told, **look_ups}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The cost for a store actor of counting the hottest keys of its shards: batches that are counted beside others, and look-ups.

``python -m benchmarks.costs hot_keys --json result.json``

No Ray, no Spark: a batch is applied and its delta encoded as in a store actor. Every second batch is also given to the tracker of
hot keys, which counts some of the batches that it gets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.schemas import COUNT_AND_SUM
from store_actors.messages import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.files import encode_delta
from store_actors.serving.hot_key_tracker import HotKeyTracker

_KEYS = 100_000
_COLUMNS = [field.name for field in COUNT_AND_SUM.input_keys]


def _batch(random: np.random.Generator, rows: int) -> ShardInput:
    """Return rows of which three in ten have one key."""
    keys = random.integers(0, _KEYS, rows)
    keys[random.random(rows) < 0.3] = 7
    return ShardInput.of_raw(COUNT_AND_SUM, pa.record_batch({"k": keys, "v": keys}))


def _apply(shard: AggregateShard, rows: ShardInput) -> None:
    change = shard.apply(rows, 0, shard.version + 1)
    encode_delta(change, COUNT_AND_SUM, {})
    shard.commit()


def _alternating_us(times: int, work: Callable[[], Any], count: Callable[[Any], None]) -> tuple[float, float]:
    """Return the mean microseconds of CPU time of the work alone, and of the work followed by `count`, in turn."""
    took: tuple[list[float], list[float]] = [], []
    for turn in range(2 * times):
        begun = time.thread_time()
        result = work()
        if turn % 2:
            count(result)
        took[turn % 2].append(1e6 * (time.thread_time() - begun))
    # The tracker counts all of its first batches.
    without, counted = (statistics.fmean(samples[times // 4 :]) for samples in took)
    return without, counted


def _measure_batches(rows: int, times: int) -> dict[str, Any]:
    """Return the microseconds of a batch of a number of rows, alone and counted."""
    random, tracker, shard = (
        np.random.default_rng(rows),
        HotKeyTracker(threading.RLock()),
        AggregateShard(COUNT_AND_SUM),
    )
    _apply(shard, ShardInput.of_raw(COUNT_AND_SUM, pa.record_batch({"k": np.arange(_KEYS), "v": np.arange(_KEYS)})))
    batches = iter([_batch(random, rows) for _ in range(2 * times)])

    def run_batch() -> ShardInput:
        batch = next(batches)
        _apply(shard, batch)
        return batch

    without, counted = _alternating_us(times, run_batch, lambda batch: tracker.written("s", 0, _COLUMNS, batch.tables))
    hottest = tracker.hottest("s", 0, 1).written
    return {
        "rows": rows,
        "us": round(without, 1),
        "us_counted": round(counted, 1),
        "hottest": hottest and hottest.to_pylist(),
    }


def _measure_look_ups(times: int) -> dict[str, Any]:
    """Return how many microseconds longer a look-up of one key takes."""
    tracker, keys = HotKeyTracker(threading.RLock()), pa.table({"k": pa.array([7])})
    begun = time.thread_time()
    for _ in range(times):
        tracker.looked_up("s", 0, keys)
    return {"look_up_us": round(1e6 * (time.thread_time() - begun) / times, 2)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--json", type=Path)


def run(options: argparse.Namespace) -> None:
    """Measure and print the figures."""
    results = [_measure_batches(rows, max(80, min(options.times, 2_000_000 // rows))) for rows in (10, 1_000, 100_000)]
    print("rows of a batch   alone        counted, too")
    for result in results:
        print(f"{result['rows']:15,}   {result['us']:8,.0f} us   {result['us_counted']:8,.0f} us")
    look_ups = _measure_look_ups(20 * options.times)
    print(f"a look-up takes {look_ups['look_up_us']} us longer")
    if options.json:
        options.json.write_text(json.dumps({"batches": results, **look_ups}, indent=2))

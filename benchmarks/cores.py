"""How many cores one store actor's process keeps busy: shards worked on by one thread, by two of a process, and by two processes.

``python -m benchmarks.cores --json result.json``

Each worker applies batches to a shard of its own and commits them, delta files included, as a store actor does; no Ray, no Spark. What
two threads of a process do beside what two processes do says how much of the work holds Python's lock, and so how many cores one
process can keep busy (Amdahl's law).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.loading import SCHEMA
from store_actors.messages import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.files import encode_delta

_shards: dict[int, AggregateShard] = {}


def _fill(number: int, keys: int) -> None:
    """A shard with so many groups, in the process that it is called in."""
    shard = _shards[number] = AggregateShard(SCHEMA)
    shard.apply(_batch(np.arange(keys, dtype=np.int64)), 0, 1)
    shard.commit()


def _batch(keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> ShardInput:
    return ShardInput.of_raw(SCHEMA, pa.record_batch({"k": keys, "v": keys}))


def _work(number: int, rows: int, batches: int) -> None:
    """Some batches of a shard."""
    shard = _shards[number]
    random = np.random.default_rng(number)
    for _ in range(batches):
        version = shard.version + 1
        change = shard.apply(_batch(random.integers(0, len(shard), rows)), 0, version)
        encode_delta(change, SCHEMA, {})
        shard.commit()


def _seconds(pool: Executor, workers: int, options: argparse.Namespace) -> float:
    """How long each of so many workers takes for its batches when all of them work."""
    started = time.perf_counter()
    for done in [pool.submit(_work, number, options.rows, options.batches) for number in range(workers)]:
        done.result()
    return time.perf_counter() - started


def _measured(options: argparse.Namespace) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"one": [], "threads": [], "processes": []}
    context = multiprocessing.get_context("spawn")
    with (
        ThreadPoolExecutor(2) as threads,
        ProcessPoolExecutor(1, context) as first,
        ProcessPoolExecutor(1, context) as second,
    ):
        for number in range(2):
            _fill(number, options.keys)
        for number, pool in enumerate((first, second)):
            pool.submit(_fill, number, options.keys).result()

        def processes() -> float:
            started = time.perf_counter()
            waiting = [
                pool.submit(_work, number, options.rows, options.batches) for number, pool in enumerate((first, second))
            ]
            for one in waiting:
                one.result()
            return time.perf_counter() - started

        ways: dict[str, Callable[[], float]] = {
            "one": lambda: _seconds(threads, 1, options),
            "threads": lambda: _seconds(threads, 2, options),
            "processes": processes,
        }
        for _ in range(options.times + 1):
            for name, way in ways.items():
                seconds[name].append(way())
    # The first round warms up.
    return {name: some[1:] for name, some in seconds.items()}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=1_000_000, help="groups of each shard")
    parser.add_argument("--rows", type=int, default=100_000, help="rows a batch")
    parser.add_argument("--batches", type=int, default=10, help="batches of each worker in a round")
    parser.add_argument("--times", type=int, default=7, help="rounds")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and print the figures."""
    options = _parse(argv)
    seconds = _measured(options)
    one, threads, processes = (statistics.median(seconds[name]) for name in ("one", "threads", "processes"))
    # Two workers of one process take longer than two processes by what they wait for each other.
    serial = max(0.0, threads / processes - 1.0)
    busy = {cores: 1.0 / (serial + (1.0 - serial) / cores) for cores in (2, 8, 16, 64)}
    print(f"one worker {one:.3f} s; two threads {threads:.3f} s each; two processes {processes:.3f} s each (medians)")
    print(f"rows/s of one worker: {options.rows * options.batches / one:,.0f}")
    print(f"part of the work that holds the process: {serial:.3f}")
    print("cores that one process keeps busy: " + ", ".join(f"{some:.1f} of {cores}" for cores, some in busy.items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds": seconds, "serial": serial, "busy": busy}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

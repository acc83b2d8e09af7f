"""The number of cores that a store actor's process keeps busy: one thread, two threads of a process, and two processes.

``python -m benchmarks.costs cores --json result.json``

Each worker applies batches to a shard of its own and commits them, delta files included, as a store actor does; no Ray, no Spark.
How much slower two threads of a process are than two processes shows how much of the work holds Python's lock, and so how many
cores one process can keep busy (Amdahl's law).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.schemas import COUNT_AND_SUM
from store_actors.messages import ShardInput
from store_actors.operators.aggregate import AggregateShard
from store_actors.serving.files import encode_delta

_shards: dict[int, AggregateShard] = {}


def _fill(number: int, keys: int) -> None:
    """Make a shard with a number of groups, in the process that this is called in."""
    shard = _shards[number] = AggregateShard(COUNT_AND_SUM)
    shard.apply(_batch(np.arange(keys, dtype=np.int64)), 0, 1)
    shard.commit()


def _batch(keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> ShardInput:
    return ShardInput.of_raw(COUNT_AND_SUM, pa.record_batch({"k": keys, "v": keys}))


def _work(number: int, rows: int, batches: int) -> None:
    """Run batches on a shard."""
    shard = _shards[number]
    random = np.random.default_rng(number)
    for _ in range(batches):
        version = shard.version + 1
        change = shard.apply(_batch(random.integers(0, len(shard), rows)), 0, version)
        encode_delta(change, COUNT_AND_SUM, {})
        shard.commit()


def _seconds(start: Callable[[int], Future[None]], workers: int) -> float:
    """Return how long a number of workers take for their batches when all of them work."""
    started = time.perf_counter()
    for worker in [start(number) for number in range(workers)]:
        worker.result()
    return time.perf_counter() - started


def _measured(options: argparse.Namespace) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"one": [], "threads": [], "processes": []}
    context = multiprocessing.get_context("spawn")
    with (
        ThreadPoolExecutor(2) as threads,
        ProcessPoolExecutor(1, context) as first,
        ProcessPoolExecutor(1, context) as second,
    ):
        pools = (first, second)
        for number, pool in enumerate(pools):
            _fill(number, options.keys)
            pool.submit(_fill, number, options.keys).result()

        def work_in(pool: Executor, number: int) -> Future[None]:
            return pool.submit(_work, number, options.rows, options.batches)

        sides: dict[str, Callable[[], float]] = {
            "one": lambda: _seconds(lambda number: work_in(threads, number), 1),
            "threads": lambda: _seconds(lambda number: work_in(threads, number), 2),
            "processes": lambda: _seconds(lambda number: work_in(pools[number], number), 2),
        }
        for _ in range(options.times + 1):
            for name, measure in sides.items():
                seconds[name].append(measure())
    # The first round warms up.
    return {name: rounds[1:] for name, rounds in seconds.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("--keys", type=int, default=1_000_000, help="groups of each shard")
    parser.add_argument("--rows", type=int, default=100_000, help="rows a batch")
    parser.add_argument("--batches", type=int, default=10, help="batches of each worker in a round")
    parser.add_argument("--times", type=int, default=7, help="rounds")
    parser.add_argument("--json", type=Path, help="file for all figures")


def run(options: argparse.Namespace) -> None:
    """Measure and print the figures."""
    seconds = _measured(options)
    one_s, threads_s, processes_s = (statistics.median(seconds[name]) for name in ("one", "threads", "processes"))
    # Two workers of one process take longer than two processes by the time that they wait for each other.
    serial = max(0.0, threads_s / processes_s - 1.0)
    busy = {cores: 1.0 / (serial + (1.0 - serial) / cores) for cores in (2, 8, 16, 64)}
    print(
        f"one worker {one_s:.3f} s; two threads {threads_s:.3f} s each; two processes {processes_s:.3f} s each (medians)"
    )
    print(f"rows/s of one worker: {options.rows * options.batches / one_s:,.0f}")
    print(f"part of the work that holds the process: {serial:.3f}")
    print(
        "cores that one process keeps busy: " + ", ".join(f"{number:.1f} of {cores}" for cores, number in busy.items())
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds": seconds, "serial": serial, "busy": busy}, indent=2))

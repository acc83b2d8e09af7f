"""The cost of reads of live state: alone, and for the batches of a query that runs meanwhile.

``python -m benchmarks.live --json result.json``

One aggregation by an integer key. Alone: a ``get`` beside a bare call of a Ray actor, in turn; ``multi_get`` of every key; a scan,
beside a copy of the same bytes through Ray's object store. Then batches in turn: alone, and beside another process that gets keys, by
``--readers`` threads at a rate of ``--gets`` a second. Reported are the medians, and the processor time of that process for each call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from benchmarks.harness import FLEET, Variant, add_files, report_json, session, write_rows
from benchmarks.workloads import SCHEMA, aggregate, keyed_rows
from coordinator.service.calls import RayActors
from coordinator.service.deploy import ray_address
from statefleet.fleet import connect
from statefleet.reads.fleet import attach
from statefleet.reads.state import LiveState

_NAME = "live"


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def _bare_call(actor_name: str) -> Callable[[], Any]:
    handle = RayActors().find(actor_name)
    assert handle is not None
    return lambda: ray.get(handle.ping.remote())


def _look_ups(state: LiveState, bare_call: Callable[[], Any], keys: int, count: int) -> dict[str, float]:
    """Return the medians of a bare actor call and of a ``get``, in turn, in milliseconds."""
    bare, gets = [], []
    for key in np.random.default_rng(1).integers(0, keys, count).tolist():
        bare.append(_timed(bare_call)[0])
        took, row = _timed(lambda key=key: state.get({"key": key}))  # type: ignore[misc]
        assert row is not None
        gets.append(took)
    ordered = sorted(gets)
    return {
        "bare_call_ms": 1000 * statistics.median(bare),
        "get_ms": 1000 * statistics.median(gets),
        "get_p99_ms": 1000 * ordered[int(0.99 * len(ordered))],
    }


def _bulk(state: LiveState, keys: int, repeats: int) -> dict[str, float]:
    """Return the keys a second of ``multi_get``, and the bytes a second of a scan and of their copy through Ray's object store."""
    requested = pa.table({"key": np.random.default_rng(2).permutation(keys)})
    multi_gets, scans, copies = [], [], []
    for _ in range(repeats):
        took, rows = _timed(lambda: state.multi_get(requested))
        assert rows["__found"].to_numpy().all()
        multi_gets.append(len(rows) / took)
        del rows
        took, rows = _timed(lambda: state.scan().to_arrow())
        assert len(rows) == keys
        scans.append(rows.nbytes / took)
        took, copy = _timed(lambda rows=rows: ray.get(ray.put(rows)))  # type: ignore[misc]
        copies.append(rows.nbytes / took)
        # So Ray reuses its memory, instead of touching more of it for the first time.
        del rows, copy
    return {
        "multi_get_keys_s": statistics.median(multi_gets),
        "scan_bytes_s": statistics.median(scans),
        "copy_bytes_s": statistics.median(copies),
    }


class _Reader:
    """Another process, whose threads get keys at a rate, from :meth:`start` to :meth:`stop`."""

    def __init__(self, uri: str, keys: int, gets_s: int, threads: int) -> None:
        processes = multiprocessing.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_read, args=(theirs, uri, ray_address(), keys, gets_s, threads))
        self._process.start()
        self._pipe.recv()

    def start(self) -> None:
        self._pipe.send(True)

    def stop(self) -> dict[str, float]:
        """Pause; return the calls a second, their median and the processor time of each, in milliseconds."""
        self._pipe.send(False)
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _read(pipe: Connection, uri: str, address: str, keys: int, gets_s: int, readers: int) -> None:
    state = attach(uri, address=address).state(_NAME)
    drawn = cycle(np.random.default_rng(readers).integers(0, keys, 100_000).tolist())
    state.get({"key": next(drawn)})
    going, took, between_s = threading.Event(), list[float](), readers / gets_s

    def make_calls(number: int) -> None:
        while True:
            going.wait()
            due = time.perf_counter() + between_s * number / readers
            while going.is_set():
                time.sleep(max(0.0, due - time.perf_counter()))
                took.append(_timed(lambda: state.get({"key": next(drawn)}))[0])
                due = max(due + between_s, time.perf_counter() - 0.1)

    for number in range(readers):
        threading.Thread(target=make_calls, args=(number,), daemon=True).start()
    pipe.send("ready")
    while pipe.recv():
        took.clear()
        begun, used = time.perf_counter(), time.process_time()
        going.set()
        pipe.recv()
        going.clear()
        passed, used = time.perf_counter() - begun, time.process_time() - used
        pipe.send(
            {
                "calls_s": len(took) / passed,
                "call_ms": 1000 * statistics.median(took or [0.0]),
                "cpu_ms": 1000 * used / max(1, len(took)),
            }
        )


def _beside(variant: Variant, files: Path, reader: _Reader, options: argparse.Namespace) -> dict[str, float]:
    """Return the medians of batches, in turn alone and beside gets, and of these gets."""
    files.mkdir()
    random = np.random.default_rng(4)
    alone, beside, gets = list[float](), list[float](), list[dict[str, float]]()
    for number in range(2 * (1 + options.batches)):
        drawn = random.integers(0, options.keys, options.rows, dtype=np.int64)
        file = write_rows(files / f"{files.name}-{number:04d}.parquet", keyed_rows(drawn))
        if number % 2:
            reader.start()
            beside.append(variant.run(file))
            gets.append(reader.stop())
        else:
            alone.append(variant.run(file))
    medians = {name: statistics.median(figures[name] for figures in gets[1:]) for name in gets[0]}
    return {**medians, "alone_s": statistics.median(alone[1:]), "beside_s": statistics.median(beside[1:])}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=1_000_000, help="distinct keys (%(default)s)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows a batch (%(default)s)")
    parser.add_argument("--batches", type=int, default=9, help="measured batches of each side (%(default)s)")
    parser.add_argument("--repeats", type=int, default=11, help="times that all keys are read (%(default)s)")
    parser.add_argument("--count", type=int, default=2000, help="keys that are looked up one by one (%(default)s)")
    parser.add_argument(
        "--gets", type=int, nargs="+", default=[100, 1000], help="gets a second beside batches (%(default)s)"
    )
    parser.add_argument("--readers", type=int, default=32, help="threads that get keys beside batches (%(default)s)")
    parser.add_argument("--shards", type=int, default=4, help="shards, and shuffle partitions of Spark's stores")
    parser.add_argument("--executor-memory", default="2g", help="of the Spark executor (%(default)s)")
    add_files(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure reads alone and beside batches; return the exit code."""
    options = _parse(argv)
    with session("statefleet-live", options) as (spark, root):
        fleet = connect(f"file://{root}/fleet")
        source = spark.readStream.schema(SCHEMA).parquet(str(Variant.input_folder(root, FLEET)))
        counted = aggregate(fleet.stateful(source, name=_NAME, shards=options.shards))
        variant = Variant.start(FLEET, root, counted, "update")
        every_key = np.random.default_rng(0).permutation(options.keys)
        variant.run(write_rows(root / "prefill.parquet", keyed_rows(every_key)))
        state = attach(fleet.uri).state(_NAME)
        state.get({"key": 0})
        (actor,) = [actor for actor in fleet.status()["store_actors"] if actor["alive"]][:1]
        look_ups = _look_ups(state, _bare_call(actor["actor_name"]), options.keys, options.count)
        alone = {**look_ups, **_bulk(state, options.keys, options.repeats)}
        print(
            f"a bare actor call {alone['bare_call_ms']:.2f} ms, get {alone['get_ms']:.2f} ms (p99 {alone['get_p99_ms']:.2f})"
        )
        print(f"multi_get {alone['multi_get_keys_s']:,.0f} keys/s, scan {alone['scan_bytes_s'] / 1e9:.2f} GB/s, "
              f"copy through Ray {alone['copy_bytes_s'] / 1e9:.2f} GB/s", flush=True)  # fmt: skip
        beside = []
        for gets_s in options.gets:
            reader = _Reader(fleet.uri, options.keys, gets_s, options.readers)
            try:
                figures = _beside(variant, root / f"gets-{gets_s}", reader, options)
            finally:
                reader.end()
            beside.append({"gets_s": gets_s, **figures})
            print(f"{gets_s:,} gets/s asked for: batches alone {figures['alone_s']:.2f} s; beside {figures['calls_s']:,.0f} gets/s "
                  f"{figures['beside_s'] / figures['alone_s']:.3f} times as long; a get {figures['call_ms']:.2f} ms, "
                  f"{figures['cpu_ms']:.2f} ms of a core", flush=True)  # fmt: skip
        variant.query.stop()
        fleet.shutdown()
    report_json(options, alone=alone, beside=beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What reads of live state cost: alone, and for the batches of a query that runs meanwhile.

``python -m benchmarks.live --json result.json``

One aggregation by an integer key. Alone: a ``get`` beside a bare call of a Ray actor, in turn; ``multi_get`` of every key; a scan,
beside a copy of the same bytes through Ray's object store. Then batches in turn without and with another process that gets keys, so
many ``--gets`` a second by so many ``--readers``, and both sides' medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from benchmarks.harness import FLEET, SMALL_SPLITS, Variant, add_options, report_json, session, write_rows
from benchmarks.micro_batch import SCHEMA, aggregate, keyed_rows
from coordinator.calls import RayActors
from coordinator.deploy import ray_address
from spark_jobs.fleet import Fleet, connect
from store_actors.live.fleet import attach
from store_actors.live.state import LiveState

_NAME = "live"


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = call()
    return time.perf_counter() - begun, found


def _look_ups(state: LiveState, fleet: Fleet, keys: int, count: int) -> dict[str, float]:
    """Medians of a bare actor call and of a ``get``, in turn, in milliseconds."""
    (actor,) = [one for one in fleet.status()["store_actors"] if one["alive"]][:1]
    handle = RayActors().find(actor["actor_name"])
    bare, gets = [], []
    for key in np.random.default_rng(1).integers(0, keys, count).tolist():
        bare.append(_timed(lambda: ray.get(handle.ping.remote()))[0])
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
    """Keys a second of ``multi_get``, bytes a second of a scan, and of a copy of these through Ray's object store."""
    asked = pa.table({"key": np.random.default_rng(2).permutation(keys)})
    many, scans, copies = [], [], []
    for _ in range(repeats):
        took, found = _timed(lambda: state.multi_get(asked))
        assert found["__found"].to_numpy().all()
        many.append(len(found) / took)
        took, rows = _timed(lambda: state.scan().to_arrow())
        assert len(rows) == keys
        scans.append(rows.nbytes / took)
        took, _ = _timed(lambda rows=rows: ray.get(ray.put(rows)))  # type: ignore[misc]
        copies.append(rows.nbytes / took)
    return {
        "multi_get_keys_s": statistics.median(many),
        "scan_bytes_s": statistics.median(scans),
        "copy_bytes_s": statistics.median(copies),
    }


class _Reader:
    """Another process, some threads of which get keys at a rate, while they are told to."""

    def __init__(self, uri: str, keys: int, gets_s: int, threads: int) -> None:
        told = json.dumps({"uri": uri, "address": ray_address(), "keys": keys, "gets_s": gets_s, "threads": threads})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.live", "--reader", told],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._ask("")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def start(self) -> None:
        """Get keys from now on."""
        self._ask("go")

    def stop(self) -> dict[str, float]:
        """Get none for now; how many there were a second, and their median in milliseconds."""
        told: dict[str, float] = json.loads(self._ask("halt"))
        return told

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _read(told: str) -> int:
    """The other process."""
    import threading

    facts = json.loads(told)
    state = attach(facts["uri"], address=facts["address"]).state(_NAME)
    going, took, between_s = threading.Event(), list[float](), facts["threads"] / facts["gets_s"]
    state.get({"key": 0})

    def get_keys(seed: int) -> None:
        keys = cycle(np.random.default_rng(seed).integers(0, facts["keys"], 100_000).tolist())
        while True:
            going.wait()
            due = time.perf_counter() + between_s * seed / facts["threads"]
            while going.is_set():
                time.sleep(max(0.0, due - time.perf_counter()))
                took.append(_timed(lambda: state.get({"key": next(keys)}))[0])
                due = max(due + between_s, time.perf_counter() - 0.1)

    for seed in range(facts["threads"]):
        threading.Thread(target=get_keys, args=(seed,), daemon=True).start()
    begun = 0.0
    for line in sys.stdin:
        if line == "go\n":
            took.clear()
            begun = time.perf_counter()
            going.set()
            print("{}", flush=True)
        elif line == "halt\n":
            going.clear()
            passed = time.perf_counter() - begun
            done = {"gets_s": len(took) / passed, "get_ms": 1000 * statistics.median(took or [0.0])}
            print(json.dumps(done), flush=True)
        else:
            print("{}", flush=True)
    return 0


def _beside(variant: Variant, files: Path, reader: _Reader, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of batches in turn without and with reads."""
    files.mkdir()
    random = np.random.default_rng(4)
    sides: dict[str, list[float]] = {"alone": [], "read": []}
    told: list[dict[str, float]] = []
    for number in range(2 + 2 * options.batches):
        drawn = random.integers(0, options.keys, options.rows, dtype=np.int64)
        file = write_rows(files / f"{files.name}-{number:04d}.parquet", keyed_rows(drawn))
        side = ("alone", "read")[number % 2]
        if side == "read":
            reader.start()
        took = variant.run(file)
        if side == "read":
            told.append(reader.stop())
        if number >= 2:
            sides[side].append(took)
    medians = {side: statistics.median(took) for side, took in sides.items()}
    return {
        "batch_alone_s": medians["alone"],
        "batch_read_s": medians["read"],
        "gets_s": statistics.median(one["gets_s"] for one in told),
        "get_beside_ms": statistics.median(one["get_ms"] for one in told),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=1_000_000, help="distinct keys (%(default)s)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows a batch (%(default)s)")
    parser.add_argument("--batches", type=int, default=9, help="measured batches of each side (%(default)s)")
    parser.add_argument("--count", type=int, default=2000, help="keys that are looked up one by one (%(default)s)")
    parser.add_argument(
        "--gets", type=int, nargs="+", default=[100, 1000], help="gets a second beside batches (%(default)s)"
    )
    parser.add_argument("--readers", type=int, default=32, help="threads that get keys beside batches (%(default)s)")
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    add_options(parser, executor_memory="2g")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both; returns the exit code."""
    options = _parse(argv)
    if options.reader:
        return _read(options.reader)
    with session("statefleet-live", options, SMALL_SPLITS) as (spark, root):
        fleet = connect(f"file://{root}/fleet")
        source = spark.readStream.schema(SCHEMA).parquet(str(Variant.input_folder(root, FLEET)))
        counted = aggregate(fleet.stateful(source, name=_NAME, shards=options.shards))
        variant = Variant.start(FLEET, root, counted, "update")
        every_key = np.random.default_rng(0).permutation(options.keys)
        variant.run(write_rows(root / "prefill.parquet", keyed_rows(every_key)))
        state = attach(fleet.uri).state(_NAME)
        state.get({"key": 0})
        alone = {**_look_ups(state, fleet, options.keys, options.count), **_bulk(state, options.keys, 5)}
        print(
            f"a bare actor call {alone['bare_call_ms']:.2f} ms, get {alone['get_ms']:.2f} ms (p99 {alone['get_p99_ms']:.2f})"
        )
        print(f"multi_get {alone['multi_get_keys_s']:,.0f} keys/s, scan {alone['scan_bytes_s'] / 1e9:.2f} GB/s, "
              f"copy through Ray {alone['copy_bytes_s'] / 1e9:.2f} GB/s", flush=True)  # fmt: skip
        beside = []
        for gets_s in options.gets:
            reader = _Reader(fleet.uri, options.keys, gets_s, options.readers)
            try:
                beside.append(_beside(variant, root / f"gets-{gets_s}", reader, options))
            finally:
                reader.end()
            one = beside[-1]
            print(f"{one['gets_s']:,.0f} gets/s beside: batches {one['batch_read_s'] / one['batch_alone_s']:.3f} times as long "
                  f"({one['batch_alone_s']:.2f} s alone), get {one['get_beside_ms']:.2f} ms", flush=True)  # fmt: skip
        variant.query.stop()
        fleet.shutdown()
    report_json(options, alone=alone, beside=beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())

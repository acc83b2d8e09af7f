"""The cost of reads of live state: alone, and for the batches of a query that runs meanwhile.

``python -m benchmarks.live --json result.json``

One aggregation by an integer key. Alone: a ``get`` beside a bare call of a Ray actor, in turn; ``multi_get`` of every key; a scan,
beside a copy of the same bytes through Ray's object store. Then batches in turn: alone; beside another process that gets keys, by
``--readers`` threads at a rate of ``--gets`` a second; beside the same process with as many bare calls of the store actor; and
beside its threads doing nothing at the same times. Reported are the medians of all sides, and the processor time of that process
for each call.

A batch fills all cores of a small machine, and any other work on them slows it. With ``--apart`` Spark's processes have half of the
cores, and readers, store actors and the coordinator the other half: the rest is the cost of the reads themselves for batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray

from benchmarks.harness import FLEET, SMALL_SPLITS, Variant, add_options, cores, report_json, session, write_rows
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
    """Another process, whose threads make calls of a kind at a rate, from :meth:`start` to :meth:`stop`."""

    def __init__(self, uri: str, actor_name: str, keys: int, gets_s: int, threads: int) -> None:
        facts = {"uri": uri, "address": ray_address(), "actor_name": actor_name}
        settings = json.dumps({**facts, "keys": keys, "gets_s": gets_s, "threads": threads})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.live", "--reader", settings],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._ask("")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def start(self, kind: str) -> None:
        """Begin to make calls of a kind."""
        self._ask(kind)

    def stop(self) -> dict[str, float]:
        """Pause; return the calls a second, their median and the processor time of each, in milliseconds."""
        figures: dict[str, float] = json.loads(self._ask("halt"))
        return figures

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


#: The calls beside which batches run.
_SIDES = ("alone", "gets", "bare", "threads")


def _read(settings: str) -> int:
    """Run the other process."""
    facts = json.loads(settings)
    state = attach(facts["uri"], address=facts["address"]).state(_NAME)
    keys = cycle(np.random.default_rng(facts["threads"]).integers(0, facts["keys"], 100_000).tolist())
    calls: dict[str, Callable[[], Any]] = {
        "gets": lambda: state.get({"key": next(keys)}),
        "bare": _bare_call(facts["actor_name"]),
        "threads": lambda: None,
    }
    for call in calls.values():
        call()
    going, took, between_s, kind = threading.Event(), list[float](), facts["threads"] / facts["gets_s"], ["gets"]

    def make_calls(number: int) -> None:
        while True:
            going.wait()
            due = time.perf_counter() + between_s * number / facts["threads"]
            while going.is_set():
                time.sleep(max(0.0, due - time.perf_counter()))
                # The kind may have changed while it slept.
                took.append(_timed(calls[kind[0]])[0])
                due = max(due + between_s, time.perf_counter() - 0.1)

    for number in range(facts["threads"]):
        threading.Thread(target=make_calls, args=(number,), daemon=True).start()
    begun = used = 0.0
    for line in sys.stdin:
        command = line.strip()
        if command in calls:
            took.clear()
            kind[0], begun, used = command, time.perf_counter(), time.process_time()
            going.set()
            print("{}", flush=True)
        elif command == "halt":
            going.clear()
            passed, used = time.perf_counter() - begun, time.process_time() - used
            done = {"calls_s": len(took) / passed, "call_ms": 1000 * statistics.median(took or [0.0])}
            print(json.dumps({**done, "cpu_ms": 1000 * used / max(1, len(took))}), flush=True)
        else:
            print("{}", flush=True)
    return 0


def _set_apart(spark_cores: int) -> None:
    """Pin Spark's processes to the first cores, and all others of this session to the rest, with their present and later threads."""
    every = sorted(os.sched_getaffinity(0))
    session = psutil.Process()
    session_processes = [session, *session.children(recursive=True)]
    jvms = [process for process in session_processes if process.name() == "java"]
    of_spark = {process.pid for jvm in jvms for process in (jvm, *jvm.children(recursive=True))}
    for process in session_processes:
        assigned = every[:spark_cores] if process.pid in of_spark else every[spark_cores:] or every
        for thread in process.threads():
            os.sched_setaffinity(thread.id, assigned)


def _beside(variant: Variant, files: Path, reader: _Reader, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of batches, in turn alone and beside each kind of calls, and of these calls."""
    files.mkdir()
    random = np.random.default_rng(4)
    batches: dict[str, list[float]] = {side: [] for side in _SIDES}
    calls_of: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES[1:]}
    for number in range(len(_SIDES) * (1 + options.batches)):
        drawn = random.integers(0, options.keys, options.rows, dtype=np.int64)
        file = write_rows(files / f"{files.name}-{number:04d}.parquet", keyed_rows(drawn))
        side = _SIDES[number % len(_SIDES)]
        if side in calls_of:
            reader.start(side)
        took = variant.run(file)
        calls = reader.stop() if side in calls_of else None
        if number >= len(_SIDES):
            batches[side].append(took)
            if calls is not None:
                calls_of[side].append(calls)
    medians: dict[str, Any] = {side: {"batch_s": statistics.median(took)} for side, took in batches.items()}
    for side, all_calls in calls_of.items():
        medians[side] |= {name: statistics.median(calls[name] for calls in all_calls) for name in all_calls[0]}
    return medians


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
    parser.add_argument("--apart", action="store_true", help="give Spark half of the cores, and readers the others")
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    add_options(parser, executor_memory="2g")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure reads alone and beside batches; return the exit code."""
    options = _parse(argv)
    if options.reader:
        return _read(options.reader)
    spark_cores = max(1, cores() // 2) if options.apart else cores()
    with session("statefleet-live", options, SMALL_SPLITS, task_slots=spark_cores) as (spark, root):
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
            reader = _Reader(fleet.uri, actor["actor_name"], options.keys, gets_s, options.readers)
            if options.apart:
                _set_apart(spark_cores)
            try:
                beside.append(_beside(variant, root / f"gets-{gets_s}", reader, options))
            finally:
                reader.end()
            print(f"{gets_s:,} calls/s asked for; batches alone {beside[-1]['alone']['batch_s']:.2f} s")
            for side in _SIDES[1:]:
                figures = beside[-1][side]
                ratio = figures["batch_s"] / beside[-1]["alone"]["batch_s"]
                print(f"  beside {figures['calls_s']:,.0f} {side}/s: {ratio:.3f} times as long; "
                      f"{figures['call_ms']:.2f} ms, {figures['cpu_ms']:.2f} ms of a core", flush=True)  # fmt: skip
        variant.query.stop()
        fleet.shutdown()
    report_json(options, alone=alone, beside=beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())

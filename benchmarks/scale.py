"""The coordinator at the size of a large fleet: decisions a second, memory, recovery, requests a batch. No Ray, no Spark.

``python -m benchmarks.scale --json result.json``

The coordinator runs in this process, over an object store in memory that counts requests and may delay them. Its callers are
coroutines, so a call has the coordinator's own cost, without Ray's.

- *One state* of many shards, and *many queries* side by side: rounds of place, lease, commit, the end of the batch; and the
  requests of users: where a shard is and why, which shards are reassigned, the status as JSON. The longest stall is the longest
  time for which the event loop was blocked.
- *Recovery*: the same state with all retained versions, read by a new coordinator.
- *Requests*: a batch of a query over a store with slow requests, with as many tasks at a time as Spark has cores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import pickle
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.callers import FLEET_URI, CountedObjects, Node, Query, actors, commit_of
from benchmarks.harness import add_files, report_json
from coordinator.ledger.records import Committed, Record, RunStarted, ShardsAssigned
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.maintenance import Maintenance
from coordinator.runtime.runtime import freeze_imports
from coordinator.service.coordinator import Coordinator
from store_actors.actor.deploy import actors_for

Result = TypeVar("Result")

#: Number of concurrent calls, as many as Ray lets into the coordinator (``coordinator.service.deploy``).
_AT_ONCE = 1000
#: Seconds between checks of the event loop for stalls.
_TICK_S = 0.005


@dataclass
class Timed:
    """Calls of a kind: their number, their time, and the longest time for which the event loop was blocked."""

    calls: int = 0
    seconds: float = 0.0
    longest_stall_s: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)

    @property
    def calls_per_second(self) -> float:
        return self.calls / self.seconds


class Meter:
    def __init__(self, objects: CountedObjects) -> None:
        self._objects = objects
        self.timed: dict[str, Timed] = {}

    async def time(self, name: str, calls: int, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do work of a number of calls, and add it to the figures of a name."""
        before, longest_stall_s = Counter(self._objects.requests), 0.0

        async def watch() -> None:
            nonlocal longest_stall_s
            while True:
                slept = time.perf_counter()
                await asyncio.sleep(_TICK_S)
                longest_stall_s = max(longest_stall_s, time.perf_counter() - slept - _TICK_S)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        started = time.perf_counter()
        try:
            result = await work()
        finally:
            seconds = time.perf_counter() - started
            await asyncio.sleep(2 * _TICK_S)
            watching.cancel()
        timed = self.timed.setdefault(name, Timed())
        timed.calls += calls
        timed.seconds += seconds
        timed.longest_stall_s = max(timed.longest_stall_s, longest_stall_s)
        timed.requests += self._objects.requests - before
        return result


async def _all(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Return the results of calls, of which :data:`_AT_ONCE` run concurrently."""
    waiting = iter(calls)

    async def caller() -> list[Result]:
        return [await call for call in waiting]

    results = await asyncio.gather(*(caller() for _ in range(_AT_ONCE)))
    return [result for caller_results in results for result in caller_results]


def _resident_mib() -> float:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


# -- rounds of batches ------------------------------------------------------------------------------------------------


async def _batch(meter: Meter, queries: Sequence[Query], number: int) -> None:
    """Run a batch of all queries, concurrently; each step begins once all queries have done the step before."""
    shards = sum(query.shards for query in queries)
    await meter.time("lease", shards, lambda: _all(call for q in queries for call in q.leases(number)))
    await meter.time("commit", shards, lambda: _all(call for q in queries for call in q.commits(number)))
    await meter.time("end of batch", len(queries), lambda: _all(q.settle(number) for q in queries))


async def _rounds(title: str, count: int, shards: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a number of queries side by side."""
    objects = CountedObjects()
    coordinator, present = _coordinator(objects), actors(options.actors)
    queries = [Query(coordinator, f"query-{number:02d}", shards, present) for number in range(count)]
    meter = Meter(objects)
    before = _resident_mib()
    await meter.time("place", len(queries), lambda: _all(query.place() for query in queries))
    # The first batch starts the run and gives every shard to a store actor.
    first = Meter(objects)
    await _batch(first, queries, 0)
    meter.timed |= {f"{name}, first batch": timed for name, timed in first.timed.items()}
    for number in range(1, options.batches + 1):
        await _batch(meter, queries, number)
    await meter.time("elsewhere", len(queries[0].actors), lambda: _all(queries[0].reassigned()))
    await meter.time(
        "explain", shards, lambda: _all(coordinator.explain_placement(queries[0].name, i) for i in range(shards))
    )

    async def status() -> int:
        return len(json.dumps(await coordinator.status()))

    size = await meter.time("status as JSON", 1, status)
    await meter.time("status with details", 1, coordinator.status_details)
    print(f"  status: {size / 2**20:.1f} MiB of JSON; memory grew by {_resident_mib() - before:.0f} MiB")
    print(f"{title}\n  {'':<26}{'calls':>8}{'calls/s':>10}{'seconds':>9}{'stall':>9}  requests")
    for name, timed in meter.timed.items():
        requests = ", ".join(f"{count} {kind}" for kind, count in sorted(timed.requests.items()))
        times = f"{timed.calls_per_second:>10.0f}{timed.seconds:>9.3f}{timed.longest_stall_s:>8.3f}s"
        print(f"  {name:<26}{timed.calls:>8}{times}  {requests}")
    return {name: {**vars(timed), "calls_per_second": timed.calls_per_second} for name, timed in meter.timed.items()}


def _coordinator(objects: CountedObjects) -> Coordinator:
    return Coordinator(FLEET_URI, objects, Maintenance(interval_s=24 * 3600.0), "node-0")


def _large(options: argparse.Namespace) -> Awaitable[dict[str, Any]]:
    title = f"one state of {options.shards:,} shards on {options.actors:,} store actors"
    return _rounds(title, 1, options.shards, options)


def _many(options: argparse.Namespace) -> Awaitable[dict[str, Any]]:
    title = f"{options.queries} queries of {options.query_shards} shards each"
    return _rounds(title, options.queries, options.query_shards, options)


# -- recovery ---------------------------------------------------------------------------------------------------------


def _history(query: Query, versions: int) -> Iterable[Record]:
    """Yield the records of a state with a number of versions of each shard, each as if received in a message of its own."""
    yield RunStarted(query.run_id, query.query_id, 0, 1)
    for partition in range(query.shards):
        yield ShardsAssigned(partition, 2 + partition, query.where[partition], "spread")
    for version in range(1, versions + 1):
        for partition in range(query.shards):
            entry = commit_of(query, partition, version, epoch=2 + partition)
            yield Committed(pickle.loads(pickle.dumps(entry)))


async def _recovery(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a state with all retained versions, read by a new coordinator."""
    objects = CountedObjects()
    query = Query(_coordinator(objects), "large", options.shards, actors(options.actors))
    before = _resident_mib()
    log = ManifestLog(objects, query.name, "writer")
    log.create_metadata(query.metadata)
    ledger = StateLedger(f"{objects.uri}/{query.name}")
    for record in _history(query, options.versions):
        ledger.fold(record)
    memory_mib = _resident_mib() - before
    log.append([])
    started = time.perf_counter()
    log.write_checkpoint(log.plan_checkpoint(ledger))
    write_s = time.perf_counter() - started
    del ledger
    started = time.perf_counter()
    fresh = _coordinator(objects)
    await fresh.locate(query.name, 0)
    open_s = time.perf_counter() - started
    size = objects.bytes_put["checkpoints"] + objects.bytes_put["parts"]
    figures = {
        "versions": options.versions,
        "memory_mib": memory_mib,
        "checkpoint_bytes": size,
        "checkpoint_s": write_s,
        "recovery_s": open_s,
    }
    print(
        f"recovery of {options.shards:,} shards with {options.versions} versions: {open_s:.1f} s; in memory {memory_mib:.0f} MiB; "
        f"a whole checkpoint {size / 2**20:.0f} MiB, {write_s:.1f} s"
    )
    return figures


# -- requests that take their time ------------------------------------------------------------------------------------


async def _slow(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a query's batches over a store with slow requests; a task takes no time besides its requests."""
    objects = CountedObjects(delay_s=options.request_s)
    coordinator = _coordinator(objects)
    query = Query(coordinator, "slow", options.query_shards, actors(actors_for(options.cores)))
    await query.place()
    node = Node(query, coordinator, objects, asyncio.get_running_loop(), options.cores)
    seconds, requests, calls = [], [], []
    for number in range(options.batches + 1):
        before, called, started = Counter(objects.requests), Counter(node.calls), time.perf_counter()
        await node.batch(number)
        seconds.append(time.perf_counter() - started)
        requests.append(dict(objects.requests - before))
        calls.append(dict(node.calls - called))
    times = [batch_s / options.request_s for batch_s in seconds]
    print(
        f"a batch of {options.query_shards} shards, {options.cores} tasks, "
        f"{1000 * options.request_s:.0f} ms a request: {statistics.median(times[1:]):.1f} request times, the first one of a run "
        f"{times[0]:.1f}; requests {requests[-1]}, calls of the coordinator {calls[-1]}, of the first one {calls[0]}"
    )
    return {"batch_s": seconds, "request_s": options.request_s, "requests": requests, "calls": calls}


# -- the command ------------------------------------------------------------------------------------------------------

_PARTS = {"large": _large, "many": _many, "recovery": _recovery, "slow": _slow}


def main() -> int:
    """Run the parts that the options name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    add_files(parser)
    parser.add_argument("--only", choices=_PARTS, action="append", help="part to run (default: all); may be repeated")
    parser.add_argument("--shards", type=int, default=10_000, help="of the large state (%(default)s)")
    parser.add_argument("--actors", type=int, default=1_000, help="store actors (%(default)s)")
    parser.add_argument("--queries", type=int, default=50, help="queries side by side (%(default)s)")
    parser.add_argument("--query-shards", type=int, default=200, help="shards of each of them (%(default)s)")
    parser.add_argument("--batches", type=int, default=3, help="batches that count (%(default)s)")
    parser.add_argument("--versions", type=int, default=110, help="retained versions of recovery (%(default)s)")
    parser.add_argument("--request-s", type=float, default=0.05, help="seconds of a slow request (%(default)s)")
    parser.add_argument("--cores", type=int, default=16, help="tasks at once over the slow store (%(default)s)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    # As in the processes of a fleet.
    freeze_imports()
    results = {name: asyncio.run(_PARTS[name](options)) for name in options.only or _PARTS}
    report_json(options, settings={k: v for k, v in vars(options).items() if k not in ("json", "folder")}, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

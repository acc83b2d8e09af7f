"""What the coordinator does at the size of a large fleet: decisions a second, memory, recovery, requests a batch. No Ray, no Spark.

``python -m benchmarks.scale --json result.json``

The coordinator itself, in this process, over an object store in memory whose requests are counted, and may take a time. Its callers
are coroutines, so a call costs what the coordinator makes of it and nothing of Ray.

- *One state* of many shards, and *many queries* side by side: rounds of place, lease, commit, the end of the batch; and what people
  ask: where a shard is and why, what is elsewhere, the status as JSON. The longest stall is the longest time for which the event
  loop answered nobody.
- *Recovery*: the same state with as many versions as are retained, read by a new coordinator.
- *Requests*: a batch of one query where each request takes so long, its tasks so many at a time, as Spark's cores are.
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

from benchmarks.callers import FLEET_URI, CountedObjects, Node, Query, actors, commit_of, metadata_of
from benchmarks.harness import add_files, report_json
from coordinator.ledger.records import Committed, Record, RunStarted, ShardsAssigned
from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.maintenance import Maintenance
from coordinator.runtime.runtime import freeze_imports
from coordinator.service.coordinator import Coordinator
from store_actors.deploy import actors_for

Result = TypeVar("Result")

#: Calls that are on their way at once, as many as Ray lets into the coordinator (``coordinator.service.deploy``).
_AT_ONCE = 1000
#: How often the event loop is looked at for stalls.
_TICK_S = 0.005


@dataclass
class Timed:
    """Calls of a kind: how many, in which time, and how long the event loop answered nobody at worst."""

    calls: int
    seconds: float
    stall_s: float
    requests: Counter[str] = field(default_factory=Counter)

    def told(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "calls": self.calls,
            "seconds": self.seconds,
            "calls_per_second": self.calls / self.seconds,
            "longest_stall_s": self.stall_s,
            "requests": dict(self.requests),
        }


class Meter:
    """Times what is asked of a coordinator."""

    def __init__(self, objects: CountedObjects) -> None:
        self._objects = objects
        self.found: dict[str, Timed] = {}

    async def time(self, name: str, calls: int, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do some work of so many calls; a name that comes again is added to."""
        before, watching = Counter(self._objects.requests), _Watch()
        ticking = asyncio.create_task(watching.tick())
        await asyncio.sleep(0)
        started = time.perf_counter()
        try:
            result = await work()
        finally:
            seconds = time.perf_counter() - started
            await asyncio.sleep(2 * _TICK_S)
            ticking.cancel()
        timed = self.found.setdefault(name, Timed(0, 0.0, 0.0))
        timed.calls += calls
        timed.seconds += seconds
        timed.stall_s = max(timed.stall_s, watching.longest_s)
        timed.requests += self._objects.requests - before
        return result


class _Watch:
    """How long the event loop answered nobody."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def tick(self) -> None:
        while True:
            slept = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - slept - _TICK_S)


async def _all(calls: Iterable[Awaitable[Result]], at_once: int = _AT_ONCE) -> list[Result]:
    """Results of calls, so many of which are on their way at once."""
    waiting = iter(calls)

    async def caller() -> list[Result]:
        return [await call for call in waiting]

    return [one for some in await asyncio.gather(*(caller() for _ in range(at_once))) for one in some]


def _resident_mib() -> float:
    """Memory of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


# -- rounds of batches ------------------------------------------------------------------------------------------------


async def _batch(meter: Meter, queries: Sequence[Query], number: int, at_once: int = _AT_ONCE) -> None:
    """One batch of all queries, side by side; each step is begun when the one before is done by all."""
    shards = sum(query.shards for query in queries)
    await meter.time("lease", shards, lambda: _all((call for q in queries for call in q.leases(number)), at_once))
    await meter.time("commit", shards, lambda: _all((call for q in queries for call in q.commits(number)), at_once))
    await meter.time("end of batch", len(queries), lambda: _all(q.settle(number) for q in queries))


async def _rounds(queries: Sequence[Query], coordinator: Coordinator, objects: CountedObjects, batches: int) -> Meter:
    meter = Meter(objects)
    before = _resident_mib()
    await meter.time("place", len(queries), lambda: _all(query.place() for query in queries))
    # The first batch starts the run and gives every shard to a store actor.
    first = Meter(objects)
    await _batch(first, queries, 0)
    meter.found |= {f"{name}, first batch": timed for name, timed in first.found.items()}
    for number in range(1, batches + 1):
        await _batch(meter, queries, number)
    await meter.time("elsewhere", len(queries[0].actors), lambda: _all(queries[0].elsewhere()))
    asked = queries[0].shards
    await meter.time(
        "explain", asked, lambda: _all(coordinator.explain_placement(queries[0].name, i) for i in range(asked))
    )

    async def status() -> int:
        return len(json.dumps(await coordinator.status()))

    size = await meter.time("status as JSON", 1, status)
    told = await meter.time("watch, all changed", 1, lambda: coordinator.watch({}))
    await meter.time("watch, nothing changed", 1, lambda: coordinator.watch(told["stamps"]))
    print(f"  status: {size / 2**20:.1f} MiB of JSON; memory grew by {_resident_mib() - before:.0f} MiB")
    return meter


def _coordinator(objects: CountedObjects) -> Coordinator:
    return Coordinator(FLEET_URI, objects, Maintenance(interval_s=24 * 3600.0), "node-0")


async def _large(options: argparse.Namespace) -> dict[str, Any]:
    """One state of many shards."""
    objects = CountedObjects()
    coordinator = _coordinator(objects)
    query = Query(coordinator, "large", options.shards, actors(options.actors))
    meter = await _rounds([query], coordinator, objects, options.batches)
    return _report(f"one state of {options.shards:,} shards on {options.actors:,} store actors", meter)


async def _many(options: argparse.Namespace) -> dict[str, Any]:
    """Many queries."""
    objects = CountedObjects()
    coordinator, there = _coordinator(objects), actors(options.actors)
    queries = [Query(coordinator, f"query-{n:02d}", options.query_shards, there) for n in range(options.queries)]
    meter = await _rounds(queries, coordinator, objects, options.batches)
    return _report(f"{options.queries} queries of {options.query_shards} shards each", meter)


def _report(title: str, meter: Meter) -> dict[str, Any]:
    print(f"{title}\n  {'':<26}{'calls':>8}{'calls/s':>10}{'seconds':>9}{'stall':>9}  requests")
    for name, one in meter.found.items():
        requests = ", ".join(f"{count} {kind}" for kind, count in sorted(one.requests.items()))
        rate = one.calls / one.seconds
        print(f"  {name:<26}{one.calls:>8}{rate:>10.0f}{one.seconds:>9.3f}{one.stall_s:>8.3f}s  {requests}")
    return {name: one.told() for name, one in meter.found.items()}


# -- recovery ---------------------------------------------------------------------------------------------------------


def _history(query: Query, versions: int) -> Iterable[Record]:
    """Records of a state that has so many versions of each shard; each was told in a message of its own."""
    yield RunStarted(query.run_id, query.query_id, 0, 1)
    for partition in range(query.shards):
        yield ShardsAssigned(partition, 2 + partition, query.actor_of(partition), "spread")
    for version in range(1, versions + 1):
        for partition in range(query.shards):
            entry = commit_of(query, partition, version, epoch=2 + partition)
            yield Committed(pickle.loads(pickle.dumps(entry)))


async def _recovery(options: argparse.Namespace) -> dict[str, Any]:
    """A state with all the versions that are retained, read by a new coordinator."""
    objects = CountedObjects()
    query = Query(_coordinator(objects), "large", options.shards, actors(options.actors))
    before = _resident_mib()
    log = ManifestLog(objects, query.name, "writer")
    log.create_metadata(metadata_of(query.name, query.query_id, query.shards))
    ledger = StateLedger(f"{objects.uri}/{query.name}")
    for record in _history(query, options.versions):
        ledger.fold(record)
    held_mib = _resident_mib() - before
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
    found = {
        "versions": options.versions,
        "memory_mib": held_mib,
        "checkpoint_bytes": size,
        "checkpoint_s": write_s,
        "recovery_s": open_s,
    }
    print(
        f"recovery of {options.shards:,} shards with {options.versions} versions: {open_s:.1f} s; in memory {held_mib:.0f} MiB; "
        f"a whole checkpoint {size / 2**20:.0f} MiB, {write_s:.1f} s"
    )
    return found


# -- requests that take their time ------------------------------------------------------------------------------------


async def _slow(options: argparse.Namespace) -> dict[str, Any]:
    """A query's batches over a store that takes so long for each request; what a task does beside the requests takes nothing."""
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
    times = [one / options.request_s for one in seconds]
    print(
        f"a batch of {options.query_shards} shards, {options.cores} tasks, "
        f"{1000 * options.request_s:.0f} ms a request: {statistics.median(times[1:]):.1f} request times, the first one of a run "
        f"{times[0]:.1f}; requests {requests[-1]}, calls of the coordinator {calls[-1]}, of the first one {calls[0]}"
    )
    return {"batch_s": seconds, "request_s": options.request_s, "requests": requests, "calls": calls}


# -- the command ------------------------------------------------------------------------------------------------------

_PARTS = {"large": _large, "many": _many, "recovery": _recovery, "slow": _slow}


def main() -> int:
    """Run what was asked for."""
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
    # As the processes of a fleet do.
    freeze_imports()
    results = {name: asyncio.run(_PARTS[name](options)) for name in options.only or _PARTS}
    report_json(options, settings={k: v for k, v in vars(options).items() if k not in ("json", "folder")}, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

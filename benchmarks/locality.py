"""The same query with and without tasks on the nodes of their shards, on several Ray nodes of this machine, in one run.

``python -m benchmarks.locality --json result.json``

Both sides get the same files, batch by batch in turn. Reported are the share of state operations that ran on the node of their
shard, the bytes between nodes, the shards that changed their store actor, and ratios of batch times. Then a shard is moved while
the query runs. Reported are the bytes copied, the time of the copy, and how much longer the batch after the move takes than the
batch before it. With several waits (``--wait``) all of that is measured under each ``spark.locality.wait``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.harness import (
    Target,
    Variant,
    add_files,
    in_turn,
    print_ratios,
    ratios_of,
    report_json,
    scratch,
    summary,
    write_rows,
)
from benchmarks.nodes import WORKERS, ray_nodes, session_on
from benchmarks.workloads import SCHEMA, aggregate, keyed_rows
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from spark_jobs import fleet as fleet_module
from spark_jobs.driver_calls import DriverCalls
from spark_jobs.fleet import Fleet, connect
from spark_jobs.plan.bounds import UnboundedStateWarning
from store_actors.deploy import store_metrics
from store_actors.moving import carry_out

PLACED, UNPLACED = "placed", "unplaced"


class _HostsOfOneFleet(DriverCalls):
    """Answers the hosts of shards for one fleet only; tasks of the others prefer no node."""

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._uri = uri

    def answer(self, message: str) -> str:
        batch = json.loads(message)
        if batch["operator"]["uri"] == self._uri:
            return super().answer(message)
        if batch["asked"] == "place":
            return json.dumps({"hosts": []})
        return json.dumps({**json.loads(super().answer(message)), "hosts": []})


def _start(spark: SparkSession, fleet: Fleet, name: str, root: Path, shards: int) -> Variant:
    source = spark.readStream.schema(SCHEMA).parquet(str(Variant.input_folder(root, name)))
    return Variant.start(name, root, aggregate(fleet.stateful(source, name=f"bench-{name}", shards=shards)), "update")


def _between_nodes(fleet: Fleet) -> int:
    return sum(metrics["bytes_between_nodes"] for metrics in store_metrics(RayActors(), fleet.status()).values())


def _state(fleet: Fleet) -> dict[str, Any]:
    (state,) = fleet.status()["queries"]
    return dict(state)


def _operations(fleet: Fleet) -> tuple[int, int]:
    shards = _state(fleet)["shards"]
    return sum(shard["operations"] for shard in shards), sum(shard["operations_local"] for shard in shards)


def _epochs(fleet: Fleet) -> list[int]:
    return [shard["epoch"] for shard in _state(fleet)["shards"]]


def _measure(spark: SparkSession, options: argparse.Namespace, root: Path) -> dict[str, dict[str, Any]]:
    fleets = {name: connect(f"file://{root}/{name}-fleet") for name in (PLACED, UNPLACED)}
    fleet_module._DRIVER = _HostsOfOneFleet(fleets[PLACED].uri)
    files = root / "files"
    files.mkdir(parents=True)
    random = np.random.default_rng(1)
    sides = [_start(spark, fleet, name, root, options.shards) for name, fleet in fleets.items()]
    try:
        every_key = np.arange(options.keys, dtype=np.int64)
        for side in sides:
            side.run(write_rows(files / f"fill-{side.name}.parquet", keyed_rows(every_key)))
        before: dict[str, tuple[Any, ...]] = {}
        for number in range(options.warmup + options.batches):
            if number == options.warmup:
                before = {
                    name: (_operations(fleet), _between_nodes(fleet), _epochs(fleet)) for name, fleet in fleets.items()
                }
            file = write_rows(files / f"{number}.parquet", keyed_rows(random.integers(0, options.keys, options.rows)))
            for side in in_turn(sides, number):
                side.run(file) if number < options.warmup else side.measure(file)
        results: dict[str, dict[str, Any]] = {}
        for side in sides:
            fleet = fleets[side.name]
            (all_before, local_before), bytes_before, epochs = before[side.name]
            operations, local = _operations(fleet)
            results[side.name] = {
                **summary(side.batch_s),
                "operations": operations - all_before,
                "locality": (local - local_before) / (operations - all_before),
                "bytes_between_nodes": _between_nodes(fleet) - bytes_before,
                "shards_moved": sum(now != then for now, then in zip(_epochs(fleet), epochs, strict=True)),
            }
        results["move"] = _moved(fleets[PLACED], sides[0], files, random, options)
        return results
    finally:
        for side in sides:
            side.query.stop()
        for fleet in fleets.values():
            fleet.shutdown()


def _moved(fleet: Fleet, side: Variant, files: Path, random: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Move a shard to another node a few times; compare the batches after and before each move."""
    coordinator = CoordinatorClient.find(fleet.uri)
    assert coordinator is not None, "the query runs on it"
    copies, longer_s = [], []

    def run(name: str) -> float:
        return side.run(
            write_rows(files / f"move-{name}.parquet", keyed_rows(random.integers(0, options.keys, options.rows)))
        )

    for number in range(options.moves):
        shard = _state(fleet)["shards"][0]
        targets = [
            actor for actor in fleet.status()["store_actors"] if actor["alive"] and actor["node_id"] != shard["node_id"]
        ]
        before_s = run(f"{number}-before")
        moves = coordinator.plan_move("bench-placed", 0, targets[number % len(targets)]["node_id"])
        (outcome,) = carry_out(RayActors(), coordinator, moves)
        if outcome.copy_result is None:
            raise RuntimeError(f"the shard was not moved: {outcome.error}")
        copies.append(outcome.copy_result)
        # The target has it from the end of a batch on.
        run(f"{number}-meanwhile")
        longer_s.append(run(f"{number}-after") - before_s)
    return {
        "moves": options.moves,
        "shard_rows": _state(fleet)["shards"][0]["state_rows"],
        "bytes_from_memory": [copy.moved_bytes for copy in copies],
        "copy_ms": [copy.duration_ms for copy in copies],
        "batch_longer_by_s": longer_s,
        "median_longer_by_s": statistics.median(longer_s),
    }


def _report(wait: str, results: dict[str, dict[str, Any]], batches: int) -> None:
    print(f"\nspark.locality.wait {wait}, {len(WORKERS)} nodes, {batches} batches")
    for name in (PLACED, UNPLACED):
        row = results[name]
        print(
            f"  {name:<9} {row['locality']:7.1%} of {row['operations']} operations at their shard, "
            f"{row['bytes_between_nodes'] / 1e6:8.1f} MB between nodes, {row['shards_moved']} shards moved, "
            f"median batch {row['median_s']:.2f} s ({row['min_s']:.2f} .. {row['max_s']:.2f})"
        )
    move = results["move"]
    print(
        f"  a shard of {move['shard_rows']:,} rows moved {move['moves']} times: "
        f"{statistics.median(move['bytes_from_memory']) / 1e6:.1f} MB from memory in {statistics.median(move['copy_ms']):.0f} ms, "
        f"the batch after it longer by {move['median_longer_by_s'] * 1000:+.0f} ms (median)"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.locality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=600_000, help="distinct keys")
    parser.add_argument("--rows", type=int, default=200_000, help="rows a batch")
    parser.add_argument("--batches", type=int, default=50, help="measured batches of each side")
    parser.add_argument("--warmup", type=int, default=3, help="batches before them that are not counted")
    parser.add_argument("--moves", type=int, default=4, help="times that a shard is moved afterwards")
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--wait", nargs="+", default=["1s"], help="values of spark.locality.wait to measure")
    add_files(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    options = _parse(argv)
    warnings.filterwarnings("ignore", category=UnboundedStateWarning)
    document, ratios = {}, []
    with ray_nodes():
        for wait in options.wait:
            configs = {
                "spark.locality.wait": wait,
                "spark.sql.shuffle.partitions": str(options.shards),
                "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            }
            with scratch(options) as root, session_on(f"statefleet-locality-{wait}", configs) as spark:
                document[wait] = results = _measure(spark, options, root)
            _report(wait, results, options.batches)
            ratios += ratios_of(results, (Target(UNPLACED, PLACED),), wait=wait)
    print_ratios(ratios, "wait")
    report_json(options, nodes=len(WORKERS), shards=options.shards, results=document, ratios=ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A node is killed in the middle of a batch: time until the batch is finished, with standbys, without, and without any state.

``python -m benchmarks.failover --json result.json``

Each side has three Ray nodes of this machine and a Spark session of its own, and loses one of the nodes for good. The same plan
without state shows the time that Ray and Spark need by themselves; the report has the time that the fleet adds. Sides take turns,
several times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from pyspark.sql import SparkSession
from ray.cluster_utils import Cluster

from benchmarks.harness import PLAIN, Variant, add_files, in_turn, report_json, scratch, write_rows
from benchmarks.nodes import WORKERS, ray_nodes, session_on
from benchmarks.workloads import SCHEMA, aggregate, keyed_rows
from coordinator.service.calls import RayActors
from spark_jobs.plan.operator_rules import UnboundedStateWarning
from statefleet.fleet import Fleet, connect
from store_actors.actor.deploy import store_metrics

STANDBYS, RELOAD = "standbys", "reload"
SIDES = (PLAIN, STANDBYS, RELOAD)
#: Seconds from the arrival of its input to the middle of a batch.
_INTO_THE_BATCH_S = 0.4
#: Counters of store actors for loaded shards: bytes, rows, and seconds.
_LOADED = ("bytes_loaded", "rows_loaded", "loading_s")


def _query(spark: SparkSession, fleet: Fleet, side: str, root: Path, shards: int) -> Variant:
    source = spark.readStream.schema(SCHEMA).parquet(str(Variant.input_folder(root, side)))
    if side == PLAIN:
        return Variant.start(side, root, source.repartition(shards, "key"), "update")
    return Variant.start(side, root, aggregate(fleet.stateful(source, name="bench", shards=shards)), "update")


def _total(fleet: Fleet, node_ids: set[str], counter: str) -> float:
    actors = [actor for actor in fleet.status()["store_actors"] if actor["node_id"] in node_ids]
    return sum(metrics[counter] for metrics in store_metrics(RayActors(), {"store_actors": actors}).values())


def _loaded(fleet: Fleet, node_ids: set[str]) -> dict[str, float]:
    return {counter: _total(fleet, node_ids, counter) for counter in _LOADED}


def _wait_for_standbys(fleet: Fleet, query: Variant, file: Path, nodes: set[str], shards: int) -> None:
    """Run a batch, and wait until the standby of every shard has it."""
    before = _total(fleet, nodes, "followed")
    query.run(file)
    deadline = time.monotonic() + 60
    while _total(fleet, nodes, "followed") < before + shards:
        if time.monotonic() > deadline:
            raise RuntimeError("the standbys did not follow a batch within a minute")
        time.sleep(0.05)


def _lose_a_node(cluster: Cluster, side: str, number: int, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    random = np.random.default_rng(number)
    files = root / "files"
    files.mkdir(parents=True)
    configs = {"spark.sql.shuffle.partitions": str(options.shards)}
    with session_on(f"statefleet-failover-{side}-{number}", configs) as spark:
        fleet = connect(f"file://{root}/fleet", standbys=int(side == STANDBYS))
        query = _query(spark, fleet, side, root, options.shards)

        def file(name: str) -> Path:
            return write_rows(files / f"{name}.parquet", keyed_rows(random.integers(0, options.keys, options.rows)))

        try:
            query.run(write_rows(files / "fill.parquet", keyed_rows(np.arange(options.keys, dtype=np.int64))))
            before_s = [query.run(file(f"before-{batch}")) for batch in range(options.batches)]
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            workers = {node for node, address in addresses.items() if address in WORKERS}
            lost = next(node for node in cluster.worker_nodes if node.node_id in workers)
            survivors = workers - {lost.node_id}
            if side == STANDBYS:
                _wait_for_standbys(fleet, query, file("followed"), workers, options.shards)
            before = _loaded(fleet, survivors)
            took_s = _killed_in_a_batch(cluster, lost, query, file("killed"))
            return {
                "batch_s": statistics.median(before_s),
                "kill_to_batch_s": took_s,
                **{kind: count - before[kind] for kind, count in _loaded(fleet, survivors).items()},
            }
        finally:
            query.query.stop()
            fleet.shutdown()


def _killed_in_a_batch(cluster: Cluster, lost: Any, query: Variant, file: Path) -> float:
    """Kill a node in the middle of a batch; return the seconds from then to the end of the batch."""
    finished: list[float] = []

    def run() -> None:
        query.run(file)
        finished.append(time.monotonic())

    running = threading.Thread(target=run)
    running.start()
    time.sleep(_INTO_THE_BATCH_S)
    killed = time.monotonic()
    cluster.remove_node(lost, allow_graceful=False)
    running.join()
    if not finished:
        raise RuntimeError("the batch in which a node was killed did not finish")
    return finished[0] - killed


def _report(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    medians = {
        side: statistics.median(run["kill_to_batch_s"] for run in runs) for side, runs in results.items() if runs
    }
    print(
        f"\nfrom the kill of one of {len(WORKERS)} nodes to the end of its batch; {options.keys:,} keys, median of runs"
    )
    for side, runs in results.items():
        each = ", ".join(f"{run['kill_to_batch_s']:.1f}" for run in runs)
        read, rows, seconds = (statistics.median(run[kind] for run in runs) for kind in _LOADED)
        rate = f" of {rows:,.0f} rows at {rows / seconds:,.0f} rows/s a store actor" if rows else ""
        print(
            f"  {side:<10} {medians[side]:6.1f} s ({each}); {read / 1e6:.1f} MB read{rate}; batches before {runs[0]['batch_s']:.1f} s"
        )
    added = {side: medians[side] - medians[PLAIN] for side in medians if side != PLAIN}
    for side, seconds in added.items():
        print(f"  {side} beyond what Ray and Spark need: {seconds:+.1f} s")
    return {"median_s": medians, "added_s": added}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keys", type=int, default=1_000_000, help="distinct keys")
    parser.add_argument("--rows", type=int, default=100_000, help="rows a batch")
    parser.add_argument("--batches", type=int, default=4, help="batches before the kill")
    parser.add_argument("--runs", type=int, default=2, help="how often each side loses a node")
    parser.add_argument("--shards", type=int, default=6)
    add_files(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    warnings.filterwarnings("ignore", category=UnboundedStateWarning)
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.runs):
        for side in in_turn(SIDES, number):
            with scratch(options) as root, ray_nodes() as cluster:
                results[side].append(_lose_a_node(cluster, side, number, options, root))
            print(f"  run {number}, {side}: {results[side][-1]['kill_to_batch_s']:.1f} s", flush=True)
    report_json(options, nodes=len(WORKERS), results=results, **_report(results, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())

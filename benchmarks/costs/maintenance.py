"""The cost of maintenance for a batch: the same aggregation with and without snapshots, side by side in one run.

``python -m benchmarks.costs maintenance --json result.json``

Two fleets have the state of one query each; batch by batch, in turn, each query gets the same file. One fleet never writes a
snapshot. The other writes one of every shard after a few deltas, far more often than by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from benchmarks.harness import Variant, add_options, report_json, session, write_rows
from benchmarks.workloads import aggregate, keyed_rows
from spark_jobs.fleet import Fleet, connect
from statefleet import Maintenance

_VARIANTS = {
    "without": Maintenance(min_deltas_for_snapshot=1 << 30),
    "with": Maintenance(interval_s=0.5, min_deltas_for_snapshot=4),
}


def _start(spark: SparkSession, name: str, root: Path, shards: int) -> tuple[Fleet, Variant]:
    fleet = connect(f"file://{root}/{name}/fleet", maintenance=_VARIANTS[name])
    source = spark.readStream.schema("key BIGINT, amount BIGINT").parquet(str(Variant.input_folder(root, name)))
    return fleet, Variant.start(name, root, aggregate(fleet.stateful(source, name="bench", shards=shards)), "update")


def _measure(
    pairs: Sequence[tuple[Fleet, Variant]], options: argparse.Namespace, root: Path
) -> dict[str, dict[str, float]]:
    random = np.random.default_rng(1)
    first = write_rows(root / "first.parquet", keyed_rows(random.permutation(options.keys).astype(np.int64)))
    for _, variant in pairs:
        variant.run(first)
    for number in range(options.batches + 3):
        keys = random.integers(0, options.keys, options.rows, dtype=np.int64)
        file = write_rows(root / f"batch-{number:04d}.parquet", keyed_rows(keys))
        for _, variant in pairs if number % 2 else pairs[::-1]:
            if number < 3:
                variant.run(file)
            else:
                variant.measure(file)
    result = {}
    for fleet, variant in pairs:
        variant.query.stop()
        (metrics,) = fleet.metrics().values()
        p50, p99 = np.percentile(variant.batch_s, [50, 99])
        result[variant.name] = {"p50_s": p50, "p99_s": p99, "snapshots": metrics["snapshots_written"]}
        print(
            f"  {variant.name:<8} p50 {p50:6.3f} s  p99 {p99:6.3f} s  {metrics['snapshots_written']} snapshots written"
        )
        fleet.shutdown()
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("--keys", type=int, default=2_000_000, help="distinct keys (%(default)s)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows a batch (%(default)s)")
    parser.add_argument("--batches", type=int, default=60, help="measured batches of each (%(default)s)")
    add_options(parser, executor_memory="2g")


def run(options: argparse.Namespace) -> None:
    """Run the comparison and print its ratios."""
    with session("statefleet-maintenance", options) as (spark, root):
        result = _measure([_start(spark, name, root, options.shards) for name in _VARIANTS], options, root)
    ratios = {key: result["with"][key] / result["without"][key] for key in ("p50_s", "p99_s")}
    print(
        f"with / without: p50 {ratios['p50_s']:.2f}, p99 {ratios['p99_s']:.2f}; {options.keys:,} keys, {options.rows:,} rows a batch"
    )
    report_json(options, **result, **{"with / without": ratios})

"""What maintenance costs a batch: the same aggregation with and without snapshots, side by side in one run.

``python -m benchmarks.maintenance --json result.json``

Two fleets hold one query each; batch by batch, in turn, each is given the same file. One never writes a snapshot, the other
writes one of every shard whenever a few deltas have piled up, far more often than by default.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.micro_batch import Variant, aggregate, write_input
from spark_jobs.fleet import Fleet, connect
from spark_jobs.session import start_session, stop_session
from statefleet import Maintenance

_VARIANTS = {
    "without": Maintenance(min_deltas_for_snapshot=1 << 30),
    "with": Maintenance(interval_s=0.5, min_deltas_for_snapshot=4),
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.maintenance", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--keys", type=int, default=2_000_000, help="distinct keys (%(default)s)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows a batch (%(default)s)")
    parser.add_argument("--batches", type=int, default=60, help="measured batches of each (%(default)s)")
    return parser.parse_args(argv)


def _start(spark: object, name: str, root: Path) -> tuple[Fleet, Variant]:
    folder = root / name / "input"
    folder.mkdir(parents=True)
    fleet = connect(f"file://{root}/{name}/fleet", maintenance=_VARIANTS[name])
    source = spark.readStream.schema("key BIGINT, amount BIGINT").parquet(str(folder))  # type: ignore[attr-defined]
    writer = aggregate(fleet.stateful(source, name="bench")).writeStream.outputMode("update").format("noop")
    return fleet, Variant(name, folder, writer.option("checkpointLocation", str(root / name / "checkpoint")).start())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    options = _parse(argv)
    spark = start_session("statefleet-maintenance", executor_cores=os.cpu_count() or 1, executor_memory="2g")
    root = Path(tempfile.mkdtemp(prefix="statefleet-bench-"))
    random = np.random.default_rng(1)
    try:
        pairs = [_start(spark, name, root) for name in _VARIANTS]
        first = write_input(root / "first.parquet", random.permutation(options.keys).astype(np.int64), 4)
        for _, variant in pairs:
            variant.run(first)
        for number in range(options.batches + 3):
            keys = random.integers(0, options.keys, options.rows, dtype=np.int64)
            file = write_input(root / f"batch-{number:04d}.parquet", keys, 4)
            for _, variant in pairs if number % 2 else pairs[::-1]:
                seconds = variant.run(file)
                if number >= 3:
                    variant.batch_s.append(seconds)
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
    finally:
        stop_session()
        shutil.rmtree(root, ignore_errors=True)
    ratios = {key: result["with"][key] / result["without"][key] for key in ("p50_s", "p99_s")}
    print(
        f"with / without: p50 {ratios['p50_s']:.2f}, p99 {ratios['p99_s']:.2f}; {options.keys:,} keys, {options.rows:,} rows a batch"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({**result, "with / without": ratios}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Median steady micro-batch time of one streaming aggregation on four state stores, side by side in one run.

``python -m benchmarks.micro_batch --json result.json``

Each variant is a streaming query of its own over its own folder of the same Parquet files; all live in one Spark session. Batch by
batch, in rotating order, each variant in turn is given the next file and must finish it before the next variant starts, so
slow drifts of the machine hit all alike. Only ratios of medians are meant to be quoted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from spark_jobs.fleet import Fleet, connect
from spark_jobs.session import start_session, stop_session

_PROVIDER = "org.apache.spark.sql.execution.streaming.state."
_SCHEMA = "key BIGINT, amount BIGINT"
_SPARK_STORES = {
    "hdfs": {"spark.sql.streaming.stateStore.providerClass": f"{_PROVIDER}HDFSBackedStateStoreProvider"},
    "rocksdb": {
        "spark.sql.streaming.stateStore.providerClass": f"{_PROVIDER}RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    },
}
VARIANTS = ("statefleet", "hdfs", "rocksdb", "stateless")
#: What the project promises: (ratio, variant over variant, keys, bound, whether the ratio must be above or below it).
_TARGETS = (
    ("hdfs", "statefleet", 5_000_000, 3.0, "at least"),
    ("rocksdb", "statefleet", 5_000_000, 8.0, "at least"),
    ("hdfs", "statefleet", 100_000, 1.0, "at least"),
    ("statefleet", "stateless", 5_000_000, 2.0, "at most"),
    ("statefleet", "stateless", 100_000, 2.0, "at most"),
)


@dataclass
class Variant:
    """One query of the comparison."""

    name: str
    folder: Path
    query: StreamingQuery
    batch_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0

    def run(self, file: Path) -> float:
        """Give the query one more file and wait for its batch; seconds as Spark measured them."""
        os.link(file, self.folder / file.name)
        self.query.processAllAvailable()
        batches = [p for p in self.query.recentProgress if p["numInputRows"] > 0]
        return float(batches[-1]["durationMs"]["triggerExecution"]) / 1000


def aggregate(frame: Any) -> DataFrame:
    """The aggregation that all stateful variants run."""
    result: DataFrame = frame.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    return result


def _pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The stateless plan's Python stage: Arrow in, the operator's output columns out, no state touched."""
    for batch in batches:
        ones = pa.array(np.ones(batch.num_rows, np.int64))
        yield pa.record_batch([batch.column("key"), ones, batch.column("amount")], names=["key", "n", "total"])


def _stateless(frame: DataFrame, shards: int) -> DataFrame:
    routed = frame.withColumn("route", F.hash("key")).repartition(shards, "route").drop("route")
    return routed.mapInArrow(_pass_through, "key BIGINT, n BIGINT, total BIGINT")


def _start(spark: SparkSession, fleet: Fleet, name: str, root: Path, shards: int) -> Variant:
    folder = root / name / "input"
    folder.mkdir(parents=True)
    source = spark.readStream.schema(_SCHEMA).parquet(str(folder))
    # A query keeps the configuration that the session has when it starts.
    for key, value in _SPARK_STORES.get(name, {}).items():
        spark.conf.set(key, value)
    if name == "statefleet":
        result = aggregate(fleet.stateful(source, name=f"bench-{root.name}", shards=shards))
    elif name == "stateless":
        result = _stateless(source, shards)
    else:
        result = aggregate(source)
    writer = result.writeStream.outputMode("update").format("noop")
    return Variant(name, folder, writer.option("checkpointLocation", str(root / name / "checkpoint")).start())


def write_input(file: Path, keys: np.ndarray[Any, np.dtype[np.int64]], parts: int) -> Path:
    """Parquet file of `keys` in as many row groups as there are cores to read them; moved in whole."""
    amounts = keys * 7 + 1
    pq.write_table(pa.table({"key": keys, "amount": amounts}), file, row_group_size=-(-len(keys) // parts))
    return file


def _measure(spark: SparkSession, fleet: Fleet, keys: int, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    files = root / "files"
    files.mkdir(parents=True)
    random = np.random.default_rng(keys)
    variants = [_start(spark, fleet, name, root, options.shards) for name in options.variants]
    try:
        every_key = write_input(files / "prefill.parquet", random.permutation(keys).astype(np.int64), 4)
        for variant in variants:
            variant.prefill_s = variant.run(every_key)
            print(f"  {variant.name:<10} first batch, {keys:,} new keys: {variant.prefill_s:.2f} s", flush=True)
        for number in range(options.warmup + options.batches):
            drawn = random.integers(0, keys, options.rows, dtype=np.int64)
            file = write_input(files / f"batch-{number:04d}.parquet", drawn, 4)
            turn = number % len(variants)
            for variant in variants[turn:] + variants[:turn]:
                seconds = variant.run(file)
                if number >= options.warmup:
                    variant.batch_s.append(seconds)
            print(f"  batch {number}: " + "  ".join(_last(variant) for variant in variants), flush=True)
    finally:
        for variant in variants:
            variant.query.stop()
    return {
        variant.name: {
            "median_s": statistics.median(variant.batch_s),
            "min_s": min(variant.batch_s),
            "max_s": max(variant.batch_s),
            "prefill_s": variant.prefill_s,
            "batch_s": variant.batch_s,
        }
        for variant in variants
    }


def _last(variant: Variant) -> str:
    return f"{variant.name} {variant.batch_s[-1]:.2f} s" if variant.batch_s else f"{variant.name} warming"


def _ratios(results: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    ratios = []
    for slow, fast, keys, bound, sense in _TARGETS:
        medians = results.get(keys, {})
        if slow in medians and fast in medians:
            value = medians[slow]["median_s"] / medians[fast]["median_s"]
            met = value >= bound if sense == "at least" else value <= bound
            ratios.append({"ratio": f"{slow} / {fast}", "keys": keys, "value": value, "target": f"{sense} {bound}",
                           "met": met})  # fmt: skip
    return ratios


def _report(results: dict[int, dict[str, Any]], ratios: list[dict[str, Any]], fairness: str) -> None:
    print(f"\n{fairness}\n")
    for keys, variants in results.items():
        print(f"{keys:,} keys; median (min .. max) seconds a batch")
        for name, row in variants.items():
            print(f"  {name:<10} {row['median_s']:7.2f}  ({row['min_s']:.2f} .. {row['max_s']:.2f})")
    print("\nratios of medians")
    for row in ratios:
        mark = "met" if row["met"] else "MISSED"
        print(f"  {row['ratio']:<24} {row['keys']:>9,} keys  {row['value']:6.2f}  target {row['target']}  {mark}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro_batch", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--keys", type=int, nargs="+", default=[5_000_000, 100_000], help="distinct keys")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows a batch")
    parser.add_argument("--batches", type=int, default=7, help="measured batches of each variant")
    parser.add_argument("--warmup", type=int, default=2, help="batches before them that are not counted")
    parser.add_argument("--shards", type=int, default=4, help="shards, and shuffle partitions of Spark's stores")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--executor-memory", default="6g")
    parser.add_argument("--folder", type=Path, help="where to put input and state (default: a temporary folder)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; exit code 0 even if a target is missed (the output says so)."""
    options = _parse(argv)
    cores = os.cpu_count() or 1
    spark = start_session(
        "statefleet-micro-batch",
        executor_cores=cores,
        executor_memory=options.executor_memory,
        configs={
            "spark.sql.shuffle.partitions": str(options.shards),
            "spark.sql.files.maxPartitionBytes": "4m",
            "spark.sql.files.openCostInBytes": "0",
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        },
    )
    root = Path(tempfile.mkdtemp(prefix="statefleet-bench-", dir=options.folder))
    fairness = (
        f"{cores} cores shared by all: one Spark executor with {cores} task slots for every variant; the fleet's actors reserve no "
        "core and are idle while Spark's own stores have their turn; one query runs at a time, and every variant reads the same "
        "files, shuffles into the same number of partitions and commits durably each batch (but the stateless one)."
    )
    try:
        fleet = connect(f"file://{root}/fleet")
        results: dict[int, dict[str, Any]] = {}
        for keys in options.keys:
            print(f"{keys:,} keys, {options.rows:,} rows a batch, {options.shards} partitions", flush=True)
            results[keys] = _measure(spark, fleet, keys, options, root / str(keys))
        ratios = _ratios(results)
        _report(results, ratios, fairness)
        if options.json is not None:
            facts = {"rows": options.rows, "shards": options.shards, "cores": cores, "machine": platform.machine()}
            document = {**facts, "fairness": fairness, "results": results, "ratios": ratios}
            options.json.write_text(json.dumps(document, indent=2))
        fleet.shutdown()
    finally:
        stop_session()
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

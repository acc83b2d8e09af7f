"""Median steady micro-batch time of one streaming aggregation on four state stores, side by side in one run.

``python -m benchmarks.micro_batch --json result.json``

Each variant is a streaming query over a folder of its own with the same Parquet files (:mod:`benchmarks.harness`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.harness import (
    FLEET,
    SMALL_SPLITS,
    SPARK_STORES,
    STATELESS,
    Target,
    Variant,
    add_options,
    fairness,
    in_turn,
    print_ratios,
    ratios_of,
    report_json,
    session,
    summary,
    use_store,
    write_rows,
)
from spark_jobs.fleet import Fleet, connect
from spark_jobs.session.settings import HAND_OVER

#: Columns of the input.
SCHEMA = "key BIGINT, amount BIGINT"
#: The fleet, whose tasks hand rows over without Python workers.
HANDED_OVER = "handed_over"
VARIANTS = (FLEET, HANDED_OVER, *SPARK_STORES, STATELESS)
#: The project's promises, by number of keys.
_TARGETS = {
    5_000_000: (
        Target("hdfs", FLEET, 3.0),
        Target("rocksdb", FLEET, 8.0),
        Target(FLEET, STATELESS, 2.0, is_least=False),
    ),
    100_000: (Target("hdfs", FLEET, 1.0), Target(FLEET, STATELESS, 2.0, is_least=False)),
}


def aggregate(frame: Any) -> DataFrame:
    """Return the aggregation that all stateful variants run."""
    result: DataFrame = frame.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    return result


def keyed_rows(keys: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Table:
    """Return input rows of keys."""
    return pa.table({"key": keys, "amount": keys * 7 + 1})


def _pass_through(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the operator's output columns without any state: the stateless plan's Python stage."""
    for batch in batches:
        ones = pa.array(np.ones(batch.num_rows, np.int64))
        yield pa.record_batch([batch.column("key"), ones, batch.column("amount")], names=["key", "n", "total"])


def stateless(frame: DataFrame, shards: int) -> DataFrame:
    """Return the fleet's plan of :func:`aggregate` without its state."""
    routed = frame.withColumn("route", F.hash("key")).repartition(shards, "route").drop("route")
    return routed.mapInArrow(_pass_through, "key BIGINT, n BIGINT, total BIGINT")


def _start(spark: SparkSession, fleet: Fleet, name: str, root: Path, shards: int) -> Variant:
    source = spark.readStream.schema(SCHEMA).parquet(str(Variant.input_folder(root, name)))
    use_store(spark, name)
    spark.conf.set(HAND_OVER, str(name == HANDED_OVER).lower())
    if name in (FLEET, HANDED_OVER):
        result = aggregate(fleet.stateful(source, name=f"bench-{name}-{root.name}", shards=shards))
    elif name == STATELESS:
        result = stateless(source, shards)
    else:
        result = aggregate(source)
    return Variant.start(name, root, result, "update")


def _measure(spark: SparkSession, fleet: Fleet, keys: int, options: argparse.Namespace, root: Path) -> dict[str, Any]:
    files = root / "files"
    files.mkdir(parents=True)
    random = np.random.default_rng(keys)
    variants = [_start(spark, fleet, name, root, options.shards) for name in options.variants]
    try:
        every_key = write_rows(files / "prefill.parquet", keyed_rows(random.permutation(keys).astype(np.int64)))
        for variant in variants:
            variant.fill_s.append(variant.run(every_key))
            print(f"  {variant.name:<10} first batch, {keys:,} new keys: {variant.fill_s[0]:.2f} s", flush=True)
        for number in range(options.warmup + options.batches):
            drawn = random.integers(0, keys, options.rows, dtype=np.int64)
            file = write_rows(files / f"batch-{number:04d}.parquet", keyed_rows(drawn))
            for variant in in_turn(variants, number):
                if number < options.warmup:
                    variant.run(file)
                else:
                    variant.measure(file)
            print(f"  batch {number}: " + "  ".join(_last(variant) for variant in variants), flush=True)
    finally:
        for variant in variants:
            variant.query.stop()
    return {variant.name: {**summary(variant.batch_s), "prefill_s": variant.fill_s[0]} for variant in variants}


def _last(variant: Variant) -> str:
    return f"{variant.name} {variant.batch_s[-1]:.2f} s" if variant.batch_s else f"{variant.name} warming"


def _report(results: dict[int, dict[str, Any]], ratios: list[dict[str, Any]]) -> None:
    print(f"\n{fairness()}\n")
    for keys, variants in results.items():
        print(f"{keys:,} keys; median (min .. max) seconds a batch")
        for name, row in variants.items():
            print(f"  {name:<10} {row['median_s']:7.2f}  ({row['min_s']:.2f} .. {row['max_s']:.2f})")
    print_ratios(ratios, "keys")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro_batch", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--keys", type=int, nargs="+", default=[5_000_000, 100_000], help="distinct keys")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows a batch")
    parser.add_argument("--batches", type=int, default=7, help="measured batches of each variant")
    parser.add_argument("--warmup", type=int, default=2, help="batches before them that are not counted")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add_options(parser, executor_memory="6g")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; exit code 0 even if a target is missed (the output says so)."""
    options = _parse(argv)
    with session("statefleet-micro-batch", options, SMALL_SPLITS) as (spark, root):
        fleet = connect(f"file://{root}/fleet")
        results: dict[int, dict[str, Any]] = {}
        for keys in options.keys:
            print(f"{keys:,} keys, {options.rows:,} rows a batch, {options.shards} partitions", flush=True)
            results[keys] = _measure(spark, fleet, keys, options, root / str(keys))
        fleet.shutdown()
    ratios = [row for keys, result in results.items() for row in ratios_of(result, _TARGETS.get(keys, ()), keys=keys)]
    _report(results, ratios)
    facts = {"rows": options.rows, "shards": options.shards, "fairness": fairness()}
    report_json(options, **facts, results=results, ratios=ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())

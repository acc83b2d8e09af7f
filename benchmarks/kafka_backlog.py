"""A backlog of Kafka caught up: records a second of one aggregation on the fleet and on Spark's own state stores.

``python -m benchmarks.kafka_backlog --records 5000000 --json result.json``

A topic gets all records first. Then each side's query reads it from its first record to its end, with a state and a checkpoint of its
own. One query runs at a time, in rotating order. The broker is a process of this machine, started for the measurement.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.harness import (
    FLEET,
    PLAIN,
    SPARK_STORES,
    add_options,
    fairness,
    in_turn,
    report_json,
    session,
    shuffled,
    use_side,
)
from benchmarks.workloads import aggregate
from spark_jobs.fleet import Fleet, connect
from spark_jobs.session.connectors import connector_settings
from tests.kafka_broker import KafkaBroker

_TOPIC = "backlog"
_SIDES = (FLEET, *SPARK_STORES, PLAIN)


def _fill(spark: SparkSession, broker: KafkaBroker, options: argparse.Namespace) -> None:
    """Send the records as JSON, spread over the topic's partitions."""
    broker.create_topic(_TOPIC, options.partitions)
    numbers = spark.range(options.records, numPartitions=options.partitions)
    rows = numbers.select(
        (F.abs(F.xxhash64("id")) % options.keys).alias("key"), (F.col("id") % 1000).alias("amount"), "id"
    )
    records = rows.select(
        F.to_json(F.struct("key", "amount")).alias("value"),
        (F.col("id") % options.partitions).cast("int").alias("partition"),
    )
    records.write.format("kafka").option("kafka.bootstrap.servers", broker.address).option("topic", _TOPIC).save()


def _source(spark: SparkSession, broker: KafkaBroker, options: argparse.Namespace) -> DataFrame:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", broker.address)
    reader = reader.option("subscribe", _TOPIC).option("startingOffsets", "earliest")
    values = reader.option("maxOffsetsPerTrigger", options.records_per_batch).load()
    columns = F.from_json(F.col("value").cast("string"), "key BIGINT, amount BIGINT")
    return values.select(columns.alias("record")).select("record.*")


def _catch_up(
    spark: SparkSession, fleet: Fleet, broker: KafkaBroker, side: str, root: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run a side's query to the end of the topic; return its seconds and batches."""
    use_side(spark, side, options.shards)
    source = _source(spark, broker, options)
    if side == FLEET:
        frame = aggregate(
            fleet.stateful(source, name=f"backlog-{root.name}", outputMode="update", shards=options.shards)
        )
    elif side == PLAIN:
        frame = shuffled(source, options.shards, "key")
    else:
        frame = aggregate(source)
    writer = frame.writeStream.outputMode("update").format("noop").trigger(availableNow=True)
    begun = time.monotonic()
    query = writer.option("checkpointLocation", str(root / side)).start()
    query.awaitTermination()
    seconds = time.monotonic() - begun
    batches = [progress for progress in query.recentProgress if progress["numInputRows"] > 0]
    # Spark keeps the progress of the last 100 batches.
    if len(batches) < 100:
        assert sum(progress["numInputRows"] for progress in batches) == options.records, "each record is read once"
    return {"seconds": seconds, "batches": len(batches)}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kafka_backlog", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--records", type=int, default=200_000, help="records of the backlog (%(default)s)")
    parser.add_argument("--keys", type=int, default=50_000, help="distinct keys (%(default)s)")
    parser.add_argument("--partitions", type=int, default=4, help="of the topic (%(default)s)")
    parser.add_argument("--records-per-batch", type=int, help="by default a tenth of the backlog")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one that is not counted (%(default)s)"
    )
    parser.add_argument("--sides", nargs="+", choices=_SIDES, default=list(_SIDES))
    add_options(parser, executor_memory="4g")
    options = parser.parse_args(argv)
    options.records_per_batch = options.records_per_batch or max(1, options.records // 10)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit code."""
    options = _parse(argv)
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    with session("statefleet-kafka-backlog", options, connector_settings(["kafka"])) as (spark, root):
        broker = KafkaBroker(root / "kafka")
        try:
            _fill(spark, broker, options)
            fleet = connect(f"file://{root}/fleet")
            for number in range(options.rounds + 1):
                folder = root / f"round-{number}"
                for side in in_turn(options.sides, number):
                    measured = _catch_up(spark, fleet, broker, side, folder, options)
                    if number > 0:
                        results[side].append(measured)
                    print(
                        f"  round {number}: {side:<10} {options.records / measured['seconds']:>10,.0f} records/s",
                        flush=True,
                    )
            fleet.shutdown()
        finally:
            broker.stop()
    print(f"\n{fairness()}\n\n{options.records:,} records, {options.keys:,} keys; median (min .. max) records a second")
    for side, rounds in results.items():
        rates = [options.records / measured["seconds"] for measured in rounds]
        print(f"  {side:<10} {statistics.median(rates):>10,.0f}  ({min(rates):,.0f} .. {max(rates):,.0f})")
    facts = {
        "records": options.records,
        "keys": options.keys,
        "partitions": options.partitions,
        "shards": options.shards,
    }
    report_json(options, **facts, records_per_batch=options.records_per_batch, fairness=fairness(), results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Records of topics: sent and read through Spark's connector."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.kafka_broker import KafkaBroker


def send_bytes(spark: SparkSession, broker: KafkaBroker, topic: str, values: Iterable[tuple[int, bytes]]) -> None:
    """Send values, each to the partition with its number."""
    rows = spark.createDataFrame(
        [(partition, bytearray(value)) for partition, value in values], "partition INT, value BINARY"
    )
    rows.coalesce(1).write.format("kafka").option("kafka.bootstrap.servers", broker.address).option(
        "topic", topic
    ).save()


def send_json(
    spark: SparkSession, broker: KafkaBroker, topic: str, values: Iterable[tuple[int, dict[str, Any]]]
) -> None:
    """Send values as JSON, each to the partition with its number."""
    send_bytes(spark, broker, topic, [(partition, json.dumps(value).encode()) for partition, value in values])


def stream_of(spark: SparkSession, servers: str, topic: str, columns: str, per_trigger: int = 1000) -> DataFrame:
    """Return a streaming DataFrame of a topic's JSON records."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
    reader = reader.option("subscribe", topic).option("startingOffsets", "earliest")
    values = reader.option("maxOffsetsPerTrigger", per_trigger).load()
    return values.select(F.from_json(F.col("value").cast("string"), columns).alias("value")).select("value.*")


def read_records(spark: SparkSession, broker: KafkaBroker, topic: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the records of a topic, as key and JSON, in the order of partitions and offsets."""
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", broker.address).option("subscribe", topic)
    rows = reader.load().orderBy("partition", "offset").collect()
    return [((row["key"] or b"").decode(), json.loads(row["value"])) for row in rows]


def newest(records: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the record with the largest ``batch`` of each key, as a reader of an upsert topic has to."""
    latest: dict[str, dict[str, Any]] = {}
    for key, value in records:
        if key not in latest or value["batch"] >= latest[key]["batch"]:
            latest[key] = value
    return latest

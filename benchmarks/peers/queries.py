"""The queries of :mod:`benchmarks.realtime` that any PySpark runs: an environment of another Spark needs no more of them."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

#: Columns of an event, and of a result: a key, the newest count of its events, and when the newest of them was due.
EVENT = "k LONG, due LONG"
RESULT = "k LONG, n LONG, due LONG"


def records(spark: SparkSession, address: str, topic: str, columns: str, *, is_stream: bool = False) -> DataFrame:
    """Return a topic's records, with the time of each as ``at``."""
    reader = (spark.readStream if is_stream else spark.read).format("kafka").option("subscribe", topic)
    found = reader.option("kafka.bootstrap.servers", address).option("startingOffsets", "earliest").load()
    value = F.from_json(F.col("value").cast("string"), columns).alias("value")
    return found.select(F.col("timestamp").alias("at"), value).select("at", "value.*")


def results_writer(results: DataFrame, address: str, topic: str, checkpoint: str) -> DataStreamWriter:
    """Return what writes results into a topic as they come."""
    values = results.select(F.to_json(F.struct("k", "n", "due")).alias("value"))
    writer = values.writeStream.format("kafka").option("kafka.bootstrap.servers", address).option("topic", topic)
    return writer.option("kafka.linger.ms", "0").option("checkpointLocation", checkpoint).outputMode("update")


def _newest(groups: Any) -> DataFrame:
    return groups.agg(F.count("*").alias("n"), F.max("due").alias("due"))


def counted(events: Any) -> DataFrame:
    """Count by key."""
    return _newest(events.groupBy("k"))


def by_window(events: Any) -> DataFrame:
    """Count by key and ten seconds; a window of a key is a key of the results."""
    timed = events.withColumn("ts", F.timestamp_micros("due")).withWatermark("ts", "10 seconds")
    counts = _newest(timed.groupBy(F.window("ts", "10 seconds"), "k"))
    return counts.select((F.unix_seconds("window.start") * 10_000_000 + F.col("k")).alias("k"), "n", "due")


def deduplicated(events: Any) -> DataFrame:
    """The first event of each key."""
    return events.dropDuplicates(["k"]).select("k", F.lit(1).alias("n"), "due")


#: By the name of their workload.
QUERIES = {"count": counted, "window": by_window, "deduplicate": deduplicated}

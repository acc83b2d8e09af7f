"""Kafka as a source of lines and as a sink of changed groups. Both need a session with Spark's connector, :data:`PACKAGE`."""

from __future__ import annotations

from collections.abc import Sequence

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.jvm.build import line_of

#: Spark's connector for the Spark that is installed, as ``spark.jars.packages`` names it.
PACKAGE = {
    "spark35": "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7",
    "spark4": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
}[line_of(pyspark.__version__)]


def read_topic(spark: SparkSession, servers: str, topic: str, records_per_trigger: int) -> DataFrame:
    """Return a streaming DataFrame of a topic from its first record on, with each record's ``value`` as a string."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", records_per_trigger)
    return reader.load().select(F.col("value").cast("string").alias("value"))


def send_newest(rows: DataFrame, batch_id: int, servers: str, topic: str, keys: Sequence[str]) -> None:
    """Send a batch's changed groups to a topic, as JSON: the key is the group, the value has all columns and ``batch``.

    Spark's Kafka sink has no transactions: a batch that is repeated sends its records again. They are the same records, so a reader
    counts each group once if it takes the record with the largest ``batch`` of each key. Not the last one: a task of a killed driver
    may send its records late, after those of a later batch.
    """
    records = rows.select(
        F.to_json(F.struct(*keys)).alias("key"),
        F.to_json(F.struct("*", F.lit(batch_id).cast("bigint").alias("batch"))).alias("value"),
    )
    records.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", topic).save()

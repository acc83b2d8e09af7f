"""A query in Spark's real-time mode, with Spark's own RocksDB store: an environment with PySpark from 4.3 runs this module."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from benchmarks.peers.queries import EVENT, QUERIES, records, results_writer
from benchmarks.shared import PARTITIONS, SPARK_STORES

#: The newest release for which there is a connector to Kafka on Maven Central; Spark 4.3 runs it.
_PACKAGE = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
_SETTINGS = {
    "spark.jars.packages": _PACKAGE,
    "spark.ui.enabled": "false",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": str(PARTITIONS),
    **SPARK_STORES["rocksdb"],
}


def main(workload: str, address: str, source: str, sink: str, folder: str) -> None:
    """Run a query until the process is ended."""
    # The tasks of both stages run at once, and none waits for a core.
    builder = SparkSession.builder.master("local[6]")
    for key, value in _SETTINGS.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    results = QUERIES[workload](records(spark, address, source, EVENT, is_stream=True).drop("at"))
    results_writer(results, address, sink, folder).trigger(realTime="5 minutes").start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])

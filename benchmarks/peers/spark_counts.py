"""Counts and sums by key on a Spark of its own; run by ``benchmarks.peers`` with the Python of an environment that has PySpark.

It imports nothing of this project. The arguments are the folder of the source, a folder of its own and, as JSON, Spark's configuration.
For each line of standard input it processes all input; then it writes the query's recent progress, as JSON, to standard output as a
line. The first line there is Spark's release.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def main() -> None:
    """Run the query until standard input ends."""
    source, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    builder = SparkSession.builder.master("local[*]")
    for name, value in {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = spark.readStream.schema("key BIGINT, amount BIGINT").option("maxFilesPerTrigger", 1).parquet(source)
    counts = rows.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    writer = counts.writeStream.outputMode("update").format("noop")
    query = writer.option("checkpointLocation", f"{folder}/checkpoint").start()
    print(spark.version, flush=True)
    for _ in sys.stdin:
        query.processAllAvailable()
        # Ids are no strings in Spark 4.
        print(json.dumps(query.recentProgress, default=str), flush=True)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()

"""Counts and sums by key on a Spark of its own; run by ``benchmarks.peers`` with the Python of an environment that has PySpark.

It imports nothing of this project. The arguments are a folder of its own, the number of shuffle partitions and, as JSON, Spark's
configuration. Each line of standard input is a file of the stream; once its batch is done, the seconds that Spark measured are
written to standard output as a line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def main() -> None:
    """Run the query until standard input ends."""
    folder, partitions, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    source = folder / "input"
    source.mkdir(parents=True)
    builder = SparkSession.builder.master("local[*]").config("spark.sql.shuffle.partitions", partitions)
    for name, value in {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows = spark.readStream.schema("key BIGINT, amount BIGINT").option("maxFilesPerTrigger", 1).parquet(str(source))
    counts = rows.groupBy("key").agg(F.count("*").alias("n"), F.sum("amount").alias("total"))
    writer = counts.writeStream.outputMode("update").format("noop")
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    print(spark.version, flush=True)
    for line in sys.stdin:
        file = Path(line.strip())
        os.link(file, source / file.name)
        before = (query.lastProgress or {}).get("batchId", -1)
        while (query.lastProgress or {}).get("batchId", -1) == before:
            query.processAllAvailable()
        batch = next(progress for progress in reversed(query.recentProgress) if progress["numInputRows"] > 0)
        print(batch["durationMs"]["triggerExecution"] / 1000, flush=True)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()

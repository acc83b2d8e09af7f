"""A Spark driver to be killed: reads a topic to its end, counts, and sends the changed groups to another topic.

``python -m tests.connectors.kafka_driver SERVERS FOLDER URI``; joins the Ray cluster of ``RAY_ADDRESS``. The topics are ``kills-in``
and ``kills-out``.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from pyspark.sql import functions as F

from spark_jobs.fleet import connect
from spark_jobs.jobs.kafka import send_newest
from spark_jobs.plan.bounds import UnboundedStateWarning
from spark_jobs.session.spark_session import start_session, stop_session

#: Records of a batch.
PER_TRIGGER = 200


def main(servers: str, folder: Path, uri: str) -> None:
    # A name of its own: a driver that was killed may still hold the former one.
    spark = start_session(f"kafka-driver-{os.getpid()}", executor_cores=2, connectors=["kafka"])
    warnings.simplefilter("ignore", UnboundedStateWarning)
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", "kills-in")
    reader = reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", PER_TRIGGER)
    values = reader.load().select(F.from_json(F.col("value").cast("string"), "id BIGINT, user STRING").alias("value"))
    records = connect(uri).stateful(values.select("value.*"), name="chaos", outputMode="update", shards=4)
    counts = records.groupBy("user").agg(F.count("*").alias("n"), F.sum("id").alias("ids"))
    query = counts.writeStream.outputMode("update").trigger(availableNow=True)
    query = query.foreachBatch(lambda rows, batch_id: send_newest(rows, batch_id, servers, "kills-out", ["user"]))
    query.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
    stop_session()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

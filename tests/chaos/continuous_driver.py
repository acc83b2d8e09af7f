"""A Spark driver to be killed: a continuous query from a topic to a topic, until it is told to stop.

``python -m tests.chaos.continuous_driver SERVERS QUERY PREFIX FOLDER URI``; joins the Ray cluster of ``RAY_ADDRESS``. `QUERY` is one of
:data:`QUERIES`, and the topics begin with `PREFIX`. It ends once ``FOLDER/stop`` is there.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_jobs.page_hits import PACKAGE
from spark_jobs.plan.operator_rules import UnboundedStateWarning
from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import Fleet, connect

SHARDS = 4
STATE = "chaos"
#: Columns of an event: its key, and when it was sent, in microseconds since 1970.
EVENT = "k BIGINT, sent BIGINT"


@dataclass(frozen=True)
class Query:
    """A query over events.

    Attributes
    ----------
    partitions
        Of its topics.
    keys
        Columns that name a result.
    """

    mode: str
    partitions: int
    keys: list[str]
    build: Callable[[Fleet, DataFrame], Any]


def counts(fleet: Fleet, events: DataFrame) -> Any:
    """Count the events of each key."""
    return fleet.stateful(events, name=STATE, shards=SHARDS).groupBy("k")


def windows(fleet: Fleet, events: DataFrame) -> Any:
    """Count the events of each key and second; a group is sent when it is final."""
    timed = events.withColumn("at", F.timestamp_micros("sent")).withWatermark("at", "0 seconds")
    return fleet.stateful(timed, name=STATE, shards=SHARDS).groupBy(F.window("at", "1 second"), "k")


QUERIES = {
    "counts": Query("update", 2, ["k"], counts),
    # Of two partitions one would be read first after a failure, and the rows of the other one were late.
    "windows": Query("append", 1, ["window", "k"], windows),
}


def main(servers: str, query_name: str, prefix: str, folder: Path, uri: str) -> None:
    query = QUERIES[query_name]
    # A name of its own: a driver that was killed may still hold the former one.
    spark = start_session(
        f"continuous-driver-{os.getpid()}", executor_cores=query.partitions, configs={"spark.jars.packages": PACKAGE}
    )
    warnings.simplefilter("ignore", UnboundedStateWarning)
    records = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
    records = records.option("subscribe", f"{prefix}-in").option("startingOffsets", "earliest")
    value = F.from_json(F.col("value").cast("string"), EVENT).alias("value")
    events = records.load().select(value).select("value.*")
    results = query.build(connect(uri), events).agg(F.count("*").alias("n"), F.max("sent").alias("sent"))
    sent = results.select(F.to_json(F.struct(*query.keys)).alias("key"), F.to_json(F.struct("*")).alias("value"))
    writer = sent.writeStream.format("kafka").option("kafka.bootstrap.servers", servers).outputMode(query.mode)
    writer = writer.option("topic", f"{prefix}-out").option("kafka.linger.ms", "0")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(continuous="1 second")
    running = writer.start()
    while not (folder / "stop").exists():
        # The error of a query that ends is this process's.
        running.awaitTermination(1)
    running.stop()
    stop_session()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]), sys.argv[5])

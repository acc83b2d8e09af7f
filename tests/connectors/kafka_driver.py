"""A Spark driver to be killed: reads topics to their end, and sends what its query emits to another topic.

``python -m tests.connectors.kafka_driver SERVERS QUERY PREFIX FOLDER URI``; joins the Ray cluster of ``RAY_ADDRESS``. `QUERY` is a
function of this module. The topics begin with `PREFIX`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.page_hits import PACKAGE, send_newest
from spark_jobs.plan.operator_rules import UnboundedStateWarning
from spark_jobs.session.spark_session import start_session, stop_session
from statefleet.fleet import Fleet, connect
from tests.connectors.topics import stream_of

#: Records of a topic that a batch reads.
PER_TRIGGER = 200
SHARDS = 4
#: Name of the state whose shards' versions tell how far a query is.
STATE = "chaos"


def counts(spark: SparkSession, fleet: Fleet, servers: str, prefix: str) -> DataFrame:
    """Count the records of each user; a changed group replaces what was sent of it."""
    records = stream_of(spark, servers, f"{prefix}-records", "id BIGINT, user STRING", PER_TRIGGER)
    by_user = fleet.stateful(records, name=STATE, outputMode="update", shards=SHARDS).groupBy("user")
    result: DataFrame = by_user.agg(F.count("*").alias("n"), F.sum("id").alias("ids"))
    return result


def paid_orders(spark: SparkSession, fleet: Fleet, servers: str, prefix: str) -> DataFrame:
    """Drop repeated orders, join each with its payment, and add up by minute and item; a group is sent when it is final."""
    orders = stream_of(spark, servers, f"{prefix}-orders", "id BIGINT, item STRING, at TIMESTAMP", PER_TRIGGER)
    payments = stream_of(spark, servers, f"{prefix}-payments", "order BIGINT, paid TIMESTAMP", PER_TRIGGER)
    once = fleet.stateful(orders.withWatermark("at", "1 minute"), name="once", shards=SHARDS)
    paid = fleet.stateful(once.dropDuplicatesWithinWatermark(["id"]), name="paid", shards=SHARDS).join(
        payments.withWatermark("paid", "1 minute"),
        F.expr("id = order AND paid BETWEEN at AND at + INTERVAL 30 SECONDS"),
    )
    by_minute = fleet.stateful(paid, name=STATE, shards=SHARDS).groupBy(F.window("paid", "1 minute"), "item")
    result: DataFrame = by_minute.agg(F.count("*").alias("n"), F.sum("id").alias("ids"))
    return result


#: Output mode of each query, and the columns that name its groups.
QUERIES = {counts: ("update", ["user"]), paid_orders: ("append", ["window", "item"])}


def main(servers: str, query_name: str, prefix: str, folder: Path, uri: str) -> None:
    # A name of its own: a driver that was killed may still hold the former one.
    spark = start_session(f"kafka-driver-{os.getpid()}", executor_cores=2, configs={"spark.jars.packages": PACKAGE})
    warnings.simplefilter("ignore", UnboundedStateWarning)
    (build,) = [query for query in QUERIES if query.__name__ == query_name]
    output_mode, keys = QUERIES[build]
    rows = build(spark, connect(uri), servers, prefix)
    writer = rows.writeStream.outputMode(output_mode).trigger(availableNow=True)
    writer = writer.foreachBatch(lambda rows, batch_id: send_newest(rows, batch_id, servers, f"{prefix}-out", keys))
    writer.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()
    stop_session()


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]), sys.argv[5])

"""Queries of the fleet from and to a real Kafka: late partitions, a broker that restarts, partitions that are added."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_jobs.page_hits import execute
from statefleet.fleet import Fleet
from tests.clocks import until
from tests.collector import collecting
from tests.connectors.topics import newest, read_records, send_bytes, send_json, stream_of
from tests.integration.counting_query import query_of
from tests.integration.followed import following
from tests.integration.streams import Run
from tests.kafka_broker import KafkaBroker

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning"),
]
NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)
CLICK = "user STRING, at TIMESTAMP"


def click(user: str, seconds: int) -> dict[str, Any]:
    return {"user": user, "at": (NOON + dt.timedelta(seconds=seconds)).isoformat()}


def by_minute(frame: Any) -> DataFrame:
    result: DataFrame = frame.groupBy(F.window("at", "1 minute"), "user").agg(F.count("*").alias("n"))
    return result.select("window.start", "user", "n")


def test_a_late_partition_counts_as_on_sparks_own_store(
    spark: SparkSession, fleet: Fleet, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    """One partition is an hour ahead of the other, which is read later: the rows that are late are late on both."""
    broker.create_topic(name, 2)
    send_json(spark, broker, name, [(0, click(f"u{n % 3}", 5 * n)) for n in range(60)])
    send_json(spark, broker, name, [(0, click("ahead", 3600 + n)) for n in range(40)])
    send_json(spark, broker, name, [(1, click(f"u{n % 3}", 60 * n)) for n in range(20)])
    clicks = stream_of(spark, broker.address, name, CLICK, per_trigger=20).withWatermark("at", "10 seconds")
    emitted, late = {}, {}
    for store, frame in (("fleet", fleet.stateful(clicks, name=name, shards=2)), ("spark", clicks)):
        run = Run(by_minute(frame), "append", tmp_path / store, available_now=True)
        run.wait()
        late[store] = sum(states[0][3] for states in run.states().values())
        emitted[store] = sorted(map(tuple, run.take()), key=repr)
    assert emitted["fleet"] == emitted["spark"]
    assert late["fleet"] == late["spark"] > 0
    assert len(emitted["fleet"]) > 10


def test_a_broker_that_restarts_and_partitions_that_are_added_lose_no_record(
    spark: SparkSession, fleet: Fleet, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    """The query goes on by itself; its sink has each user's count once."""
    output = f"{name}-counts"
    broker.create_topic(name, 2)
    broker.create_topic(output, 2)
    users = fleet.stateful(stream_of(spark, broker.address, name, CLICK), name=name, outputMode="update", shards=2)
    counts = users.groupBy("user").agg(F.count("*").alias("n"))

    def send(rows: DataFrame, batch_id: int) -> None:
        records = rows.select(
            F.col("user").alias("key"), F.to_json(F.struct("*", F.lit(batch_id).alias("batch"))).alias("value")
        )
        records.write.format("kafka").option("kafka.bootstrap.servers", broker.address).option("topic", output).save()

    query = counts.writeStream.outputMode("update").foreachBatch(send)
    query = query.option("checkpointLocation", str(tmp_path / "ck")).start()
    expected: Counter[str] = Counter()

    def feed(partitions: range) -> None:
        users = [f"u{n % 7}" for n in range(70)]
        expected.update(users)
        send_json(spark, broker, name, [(partitions[n % len(partitions)], click(u, n)) for n, u in enumerate(users)])
        query.processAllAvailable()
        sent = newest(read_records(spark, broker, output))
        assert {key: value["n"] for key, value in sent.items()} == expected

    try:
        feed(range(2))
        broker.stop()
        # The query asks for new records all the time, and is refused.
        time.sleep(3)
        broker.start()
        feed(range(2))
        broker.set_partitions(name, 5)
        feed(range(5))
        until(lambda: query_of(fleet, name)["behind_records"] == 0)
    finally:
        query.stop()


def test_the_job_page_hits_reads_and_writes_topics(
    spark: SparkSession, fleet: Fleet, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    """Its results are those of a batch, in its file and in its topic, and malformed records are kept; a second run reads the rest."""
    good = '10.0.0.1 - - [17/May/2015:{h:02d}:05:03 +0000] "GET /page{p} HTTP/1.1" 200 {size} "-" "-"'
    output = f"{name}-hits"
    broker.create_topic(name, 3)
    broker.create_topic(output, 1)
    options = page_hits_options(tmp_path, broker, name, output)
    expected: Counter[tuple[str, int]] = Counter()
    for round_number in range(2):
        lines = [good.format(h=n % 4, p=n % 5, size=n) for n in range(100)]
        expected.update((f"/page{n % 5}", n % 4) for n in range(100))
        send_bytes(spark, broker, name, [(n % 3, line.encode()) for n, line in enumerate([*lines, "nonsense"])])
        rows, malformed = execute(spark, fleet, options)
        assert (rows, malformed) == (101, round_number + 1)
    results = pq.read_table(tmp_path / "results.parquet").to_pylist()
    assert {(row["path"], row["hour"].hour): row["hits"] for row in results} == expected
    sent = newest(read_records(spark, broker, output))
    hours = {key: dt.datetime.fromisoformat(json.loads(key)["hour"]).astimezone(dt.UTC).hour for key in sent}
    assert {(value["path"], hours[key]): value["hits"] for key, value in sent.items()} == expected


def page_hits_options(folder: Path, broker: KafkaBroker, topic: str, output: str) -> argparse.Namespace:
    return argparse.Namespace(
        folder=folder, input=topic, name=topic, shards=2, kafka=broker.address, records_per_trigger=40, to=output, top=5
    )


@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"continuous": "1 second"}], ids=["batches", "epochs"])
def test_lineage_has_topics_by_their_servers(
    spark: SparkSession, fleet: Fleet, broker: KafkaBroker, tmp_path: Path, name: str, trigger: dict[str, Any]
) -> None:
    broker.create_topic(name, 1)
    broker.create_topic(f"{name}-counts", 1)
    send_json(spark, broker, name, [(0, click("u", 1))])
    with collecting() as collector, following(collector):
        users = fleet.stateful(stream_of(spark, broker.address, name, CLICK), name=name, shards=2)
        counts = users.groupBy("user").count().selectExpr("to_json(struct(*)) as value")
        writer = counts.writeStream.outputMode("update").format("kafka").trigger(**trigger)
        writer = writer.option("kafka.bootstrap.servers", broker.address).option("Topic", f"{name}-counts")
        query = writer.option("checkpointLocation", str(tmp_path / "ck")).start()
        running = collector.wait_for_event("RUNNING", name)
        query.stop()
        collector.wait_for_event("COMPLETE", name)
    of_kafka = f"kafka://{broker.address}"
    assert [(of["namespace"], of["name"]) for of in running["inputs"]] == [(of_kafka, name)]
    assert [(of["namespace"], of["name"]) for of in running["outputs"]] == [
        (of_kafka, f"{name}-counts"),
        (fleet.uri, name),
    ]

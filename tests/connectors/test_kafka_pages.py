"""The programs of docs/kafka.md, run as they stand beside a real broker."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro

import statefleet as sf
from tests.code_blocks import blocks_of
from tests.connectors.topics import send_bytes, send_json
from tests.integration.streams import Run
from tests.kafka_broker import KafkaBroker
from tests.page_programs import run_blocks

NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)
CLICKS = [("ann", 30), ("bob", 5), ("ann", 12)]


def iso(seconds: int) -> str:
    return (NOON + dt.timedelta(seconds=seconds)).isoformat()


def click_descriptors() -> descriptor_pb2.FileDescriptorSet:
    """Return what `protoc` writes of a message with a user and milliseconds."""
    file = descriptor_pb2.FileDescriptorProto(name="click.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Click")
    kinds = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="user", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    message.field.add(name="ms", number=2, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    return descriptor_pb2.FileDescriptorSet(file=[file])


def send_orders(spark: SparkSession, broker: KafkaBroker) -> None:
    broker.create_topic("orders", 3)
    broker.create_topic("payments", 2)
    broker.create_topic("revenue", 2)
    orders = [(n % 3, {"id": f"o{n}", "item": f"i{n % 2}", "at": iso(n)}) for n in range(30)]
    # Some orders come twice, in another partition.
    orders += [((n + 1) % 3, {"id": f"o{n}", "item": f"i{n % 2}", "at": iso(n)}) for n in range(0, 30, 3)]
    send_json(spark, broker, "orders", orders)
    payments = [(n % 2, {"order": f"o{n}", "paid": iso(n + 5), "amount": n}) for n in range(20)]
    send_json(spark, broker, "payments", payments)


def send_clicks(spark: SparkSession, broker: KafkaBroker, folder: Path) -> None:
    broker.create_topic("clicks-avro", 2)
    broker.create_topic("clicks-protobuf", 2)
    clicks: DataFrame = spark.createDataFrame(CLICKS, "user STRING NOT NULL, ms BIGINT NOT NULL")
    avro = clicks.select(F.concat(F.unhex(F.lit("0000000001")), to_avro(F.struct("user", "ms"))).alias("value"))
    avro.write.format("kafka").option("kafka.bootstrap.servers", broker.address).option("topic", "clicks-avro").save()
    descriptors = click_descriptors()
    (folder / "click.desc").write_bytes(descriptors.SerializeToString())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(descriptors.file[0])
    message: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Click"))
    values = [(n % 2, message(user=user, ms=ms).SerializeToString()) for n, (user, ms) in enumerate(CLICKS)]
    send_bytes(spark, broker, "clicks-protobuf", values)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
def test_the_programs_of_the_page_run(
    spark: SparkSession, fleet: sf.Fleet, broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sf, "start_session", lambda *_, **__: spark)
    monkeypatch.chdir(tmp_path)
    send_orders(spark, broker)
    send_clicks(spark, broker, tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    programs = blocks_of("tests/connectors/test_kafka_pages.py::test_the_programs_of_the_page_run")
    replacements = {
        "localhost:9092": broker.address,
        "file:///var/lib/statefleet": fleet.uri,
        "/data/revenue-checkpoint": str(tmp_path / "checkpoint"),
    }
    try:
        run_blocks(programs, scope, replacements)
        query = scope["query"]
        query.processAllAvailable()
        # Two minutes later, so that the first minute is closed.
        send_json(spark, broker, "orders", [(0, {"id": "later", "item": "i0", "at": iso(200)})])
        send_json(spark, broker, "payments", [(0, {"order": "later", "paid": iso(201), "amount": 1})])
        query.processAllAvailable()
    finally:
        for running in spark.streams.active:
            running.stop()
    totals = {(row["item"], row["orders"], row["amount"]) for row in scope["totals"].collect()}
    assert totals == {("i0", 10, sum(range(0, 20, 2))), ("i1", 10, sum(range(1, 20, 2)))}
    for counts in ("avro_counts", "protobuf_counts"):
        run = Run(scope[counts], "update", tmp_path / counts, available_now=True)
        assert sorted(map(tuple, run.take())) == [("ann", 2, 42), ("bob", 1, 5)]

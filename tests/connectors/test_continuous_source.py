"""The reader of Kafka in continuous queries (spark_jobs/jvm/common/ContinuousSource.scala).

The rule that Spark analyses a query's start with does not put the table into a query yet (``StartRule``): the tests do it themselves,
with queries that have no operator of the fleet.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from spark_jobs.plan.spark_version import SPARK
from tests.kafka_broker import KafkaBroker

pytestmark = pytest.mark.timeout(600)
EPOCH = "200 milliseconds"
_DEADLINE_S = 120


class Hooks:
    """What the fleet does at epochs: counts them, and has the tasks planned again once when it is told to."""

    class Java:
        implements = ["org.apache.spark.sql.statefleet.EpochHooks"]  # noqa: RUF012 - Py4J reads it so

    def __init__(self) -> None:
        self.ends: list[dict[str, int]] = []
        self.behind: list[int] = []
        self.asked = 0
        self.is_to_reconfigure = False

    def isToReconfigure(self) -> bool:
        self.asked += 1
        answer, self.is_to_reconfigure = self.is_to_reconfigure, False
        return answer

    def ended(self, end: Any) -> None:
        self.behind.append(sum(end.behind().apply(n) for n in range(end.behind().size())))

    def logged(self, end: Any) -> None:
        (offsets,) = json.loads(end.json()).values()
        self.ends.append({partition: int(offset) for partition, offset in offsets.items()})


def source(spark: SparkSession, broker: KafkaBroker, topic: str, **options: str) -> tuple[DataFrame, Hooks]:
    """Return the records of a topic, read by the fleet's reader, and its hooks."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", broker.address)
    frame = reader.option("subscribe", topic).option("startingOffsets", "earliest").options(**options).load()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    hooks = Hooks()
    tables = gateway.jvm.org.apache.spark.sql.statefleet.ContinuousTable
    plan = tables.under(frame._jdf.logicalPlan(), hooks)
    datasets = gateway.jvm.org.apache.spark.sql
    rows = (datasets.classic if SPARK.READS_STATE else datasets).Dataset.ofRows(spark._jsparkSession, plan)
    return DataFrame(rows, spark), hooks


@contextmanager
def running(frame: DataFrame, broker: KafkaBroker, output: str, checkpoint: Path) -> Iterator[StreamingQuery]:
    """A continuous query that sends its rows as JSON, each to the partition that it came from."""
    values = frame.select("partition", F.to_json(F.struct(*frame.columns)).alias("value"))
    writer = values.writeStream.format("kafka").option("kafka.bootstrap.servers", broker.address)
    writer = writer.option("topic", output).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(continuous=EPOCH).start()
    try:
        yield query
    finally:
        query.stop()


def wait(query: StreamingQuery, is_done: Callable[[], bool]) -> None:
    """Wait until something is so; the query's error is raised if it ends before."""
    deadline = time.monotonic() + _DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline
        assert not query.awaitTermination(1)


def is_logged(hooks: Hooks, **offsets: int) -> Callable[[], bool]:
    """Return whether Spark's commit log has an epoch that ends at offsets, each given as ``p`` and the partition."""
    end = {partition[1:]: offset for partition, offset in offsets.items()}
    return lambda: bool(hooks.ends) and hooks.ends[-1] == end


def records(spark: SparkSession, broker: KafkaBroker, topic: str, **options: str) -> dict[int, list[dict[str, Any]]]:
    """Return the records of a topic by partition, as Spark reads them in a batch, with every column but the time of their arrival."""
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", broker.address).option("subscribe", topic)
    rows = reader.options(**options).load().orderBy("partition", "offset")
    by_partition: dict[int, list[dict[str, Any]]] = {}
    for row in rows.select("partition", F.to_json(F.struct(*rows.columns)).alias("row")).collect():
        by_partition.setdefault(row["partition"], []).append(json.loads(row["row"]))
    return by_partition


def sent(spark: SparkSession, broker: KafkaBroker, output: str) -> dict[int, list[dict[str, Any]]]:
    """Return the rows that queries sent, by partition, in the order in which they were sent."""
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", broker.address).option("subscribe", output)
    rows = reader.load().orderBy("partition", "offset").select("partition", F.col("value").cast("string"))
    by_partition: dict[int, list[dict[str, Any]]] = {}
    for row in rows.collect():
        by_partition.setdefault(row["partition"], []).append(json.loads(row["value"]))
    return by_partition


def send(spark: SparkSession, broker: KafkaBroker, topic: str, count: int, partitions: int = 2) -> None:
    """Send records to partitions by turns, from the driver: a continuous query has the cores of the executor."""
    producer = new_producer(spark, broker)
    records = spark.sparkContext._gateway.jvm.org.apache.kafka.clients.producer  # type: ignore[union-attr]
    for n in range(count):
        producer.send(records.ProducerRecord(topic, n % partitions, None, str(n)))
    producer.close()


def new_producer(spark: SparkSession, broker: KafkaBroker, **settings: str) -> Any:
    """Return a producer of texts, in the driver."""
    serializer = "org.apache.kafka.common.serialization.StringSerializer"
    common = {"bootstrap.servers": broker.address, "key.serializer": serializer, "value.serializer": serializer}
    kafka: Any = spark.sparkContext._gateway.jvm.org.apache.kafka  # type: ignore[union-attr]
    return kafka.clients.producer.KafkaProducer(common | settings)


def first_error(spark: SparkSession, query: StreamingQuery) -> str:
    """Return the error of the first attempt of a query's task: the query's own speaks of the last, which Spark refuses to run."""
    with pytest.raises(StreamingQueryException, match="does not support task retry") as raised:
        query.awaitTermination(_DEADLINE_S)
    found = re.search(r"Task 0 in stage (\d+)\.0 failed", str(raised.value))
    assert found
    tasks = spark.sparkContext._jsc.sc().statusStore().taskList(int(found[1]), 0, 9)
    errors = [tasks.apply(n).errorMessage() for n in range(tasks.size())]
    return "\n".join(error.get() for error in errors if error.isDefined())


def test_each_record_comes_once_and_in_order_over_epochs_new_plans_and_a_restart(
    spark: SparkSession, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    """Each epoch that is logged tells its end; rows have every column that Spark's own reader gives, headers as well."""
    output = f"{name}-out"
    broker.create_topic(name, 2)
    broker.create_topic(output, 2)
    keyed = spark.range(40).selectExpr(
        "CAST(id % 2 AS INT) AS partition",
        "CAST(CAST(id AS STRING) AS BINARY) AS key",
        "CAST(NULL AS BINARY) AS value",
        "array(struct('h' AS key, CAST(CAST(id AS STRING) AS BINARY) AS value)) AS headers",
    )
    writer = keyed.coalesce(1).write.format("kafka").option("kafka.bootstrap.servers", broker.address)
    writer.option("topic", name).save()
    frame, hooks = source(spark, broker, name, includeHeaders="true")
    with running(frame, broker, output, tmp_path / "ck") as query:
        wait(query, is_logged(hooks, p0=20, p1=20))
        send(spark, broker, name, 2000)
        wait(query, is_logged(hooks, p0=1020, p1=1020))
        hooks.is_to_reconfigure = True
        wait(query, lambda: not hooks.is_to_reconfigure)
        send(spark, broker, name, 100, partitions=1)
        wait(query, is_logged(hooks, p0=1120, p1=1020))
    ends = hooks.ends
    assert hooks.asked >= len(ends) > 3
    assert all(first[p] <= second[p] for first, second in pairwise(ends) for p in first)

    send(spark, broker, name, 200)
    frame, hooks = source(spark, broker, name, includeHeaders="true")
    with running(frame, broker, output, tmp_path / "ck") as query:
        wait(query, is_logged(hooks, p0=1220, p1=1120))
    assert sent(spark, broker, output) == records(spark, broker, name, includeHeaders="true")


def test_offsets_without_records_are_no_loss(
    spark: SparkSession, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    """Markers of transactions and records of those that were aborted take offsets; an epoch ends one past its last record."""
    output = f"{name}-out"
    broker.create_topic(name, 1)
    broker.create_topic(output, 1)
    kafka: Any = spark.sparkContext._gateway.jvm.org.apache.kafka  # type: ignore[union-attr]
    producer = new_producer(spark, broker, **{"transactional.id": name})
    producer.initTransactions()

    def transaction(count: int, is_committed: bool) -> None:
        producer.beginTransaction()
        for n in range(count):
            producer.send(kafka.clients.producer.ProducerRecord(name, 0, "k", str(n)))
        producer.flush()
        producer.commitTransaction() if is_committed else producer.abortTransaction()

    options = {"kafka.isolation.level": "read_committed"}
    frame, hooks = source(spark, broker, name, **options)
    with running(frame, broker, output, tmp_path / "ck") as query:
        transaction(3, is_committed=True)
        wait(query, is_logged(hooks, p0=3))
        transaction(4, is_committed=False)
        transaction(2, is_committed=True)
        # A marker at 3, four records and a marker, then two records.
        wait(query, is_logged(hooks, p0=11))
        transaction(5, is_committed=False)
        count = hooks.asked
        wait(query, lambda: hooks.asked > count + 3)
        assert hooks.ends[-1] == {"0": 11}
    frame, hooks = source(spark, broker, name, **options)
    with running(frame, broker, output, tmp_path / "ck") as query:
        transaction(2, is_committed=True)
        wait(query, is_logged(hooks, p0=20))
    producer.close()
    assert [row["offset"] for row in sent(spark, broker, output)[0]] == [0, 1, 2, 9, 10, 18, 19]
    assert sent(spark, broker, output) == records(spark, broker, name, **options)


def test_lost_records_end_the_query_unless_it_is_told_to_go_on(
    spark: SparkSession, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    """Records are deleted before they were read; Spark's own hint says what to do, and then the first that is left is read."""
    output = f"{name}-out"
    broker.create_topic(name, 1)
    broker.create_topic(output, 1)
    send(spark, broker, name, 10, partitions=1)
    frame, hooks = source(spark, broker, name)
    with running(frame, broker, output, tmp_path / "ck") as query:
        wait(query, is_logged(hooks, p0=10))
    send(spark, broker, name, 20, partitions=1)
    broker.delete_records(name, before=25)
    frame, hooks = source(spark, broker, name)
    with running(frame, broker, output, tmp_path / "ck") as query:
        assert "failOnDataLoss" in first_error(spark, query)
    frame, hooks = source(spark, broker, name, failOnDataLoss="false")
    with running(frame, broker, output, tmp_path / "ck") as query:
        wait(query, is_logged(hooks, p0=30))
        send(spark, broker, name, 5, partitions=1)
        wait(query, is_logged(hooks, p0=35))
    assert [row["offset"] for row in sent(spark, broker, output)[0]] == [*range(10), *range(25, 35)]


def test_a_topic_that_was_made_again_is_read_from_its_first_record(
    spark: SparkSession, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    output = f"{name}-out"
    broker.create_topic(name, 1)
    broker.create_topic(output, 1)
    send(spark, broker, name, 10, partitions=1)
    frame, hooks = source(spark, broker, name)
    with running(frame, broker, output, tmp_path / "ck") as query:
        wait(query, is_logged(hooks, p0=10))
    broker.delete_topic(name)
    broker.create_topic(name, 1)
    send(spark, broker, name, 4, partitions=1)
    frame, hooks = source(spark, broker, name)
    with running(frame, broker, output, tmp_path / "ck") as query:
        assert "failOnDataLoss" in first_error(spark, query)
    frame, hooks = source(spark, broker, name, failOnDataLoss="false")
    with running(frame, broker, output, tmp_path / "ck") as query:
        wait(query, is_logged(hooks, p0=4))
    assert [row["offset"] for row in sent(spark, broker, output)[0]] == [*range(10), *range(4)]


def executors(cluster: str) -> list[Path]:
    """Return the folders in ``/proc`` of the executors of a Ray cluster, which are its workers for Java."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if f"-Dray.address={cluster}" in words and "io.ray.runtime.runner.worker.DefaultWorker" in words:
                found.append(process)
    return found


def reading_threads(cluster: str) -> int:
    """Return how many threads of executors read for a continuous query; Linux keeps 15 letters of their names."""
    count = 0
    for process in executors(cluster):
        for thread in process.glob("task/*/comm"):
            with suppress(OSError):
                count += thread.read_text().startswith("continuous-rea")
    return count


def connections(cluster: str, broker: KafkaBroker) -> int:
    """Return how many connections executors have to the broker."""
    port = f":{int(broker.address.rpartition(':')[2]):04X}"
    count = 0
    for process in executors(cluster):
        sockets = set()
        for descriptor in process.glob("fd/*"):
            with suppress(OSError):
                sockets.add(str(descriptor.readlink()))
        lines = [line.split() for file in ("tcp", "tcp6") for line in (process / "net" / file).read_text().splitlines()]
        count += sum(line[2].endswith(port) and f"socket:[{line[9]}]" in sockets for line in lines if len(line) > 9)
    return count


def test_the_end_of_an_epoch_says_how_far_the_topic_is_ahead(
    spark: SparkSession, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    broker.create_topic(name, 1)
    send(spark, broker, name, 2000, partitions=1)
    frame, hooks = source(spark, broker, name)
    # A millisecond a record, and more: several epochs.
    slow = frame.where("aggregate(sequence(0L, 30000L + offset), 0L, (sum, number) -> sum + number) > 0")
    query = slow.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "ck"))
    running_query = query.trigger(continuous=EPOCH).start()
    try:
        wait(running_query, is_logged(hooks, p0=2000))
        wait(running_query, lambda: hooks.behind[-1] == 0)
    finally:
        running_query.stop()
    assert 0 < max(hooks.behind) <= 2000
    # Nothing is known of the topic before the first poll.
    after = hooks.behind[hooks.behind.index(max(hooks.behind)) :]
    assert after == sorted(after, reverse=True)


def test_a_stopped_query_leaves_no_consumer(
    cluster: str, spark: SparkSession, broker: KafkaBroker, tmp_path: Path, name: str
) -> None:
    """Its executors have no thread that reads, and no more connections to the broker than before, a second after it was stopped."""
    broker.create_topic(name, 2)
    before = connections(cluster, broker)
    frame, hooks = source(spark, broker, name)
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "ck"))
    running_query = query.trigger(continuous=EPOCH).start()
    try:
        send(spark, broker, name, 10)
        wait(running_query, is_logged(hooks, p0=5, p1=5))
        assert reading_threads(cluster) == 2
        assert connections(cluster, broker) > before
    finally:
        running_query.stop()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and (reading_threads(cluster) or connections(cluster, broker) > before):
        time.sleep(0.05)
    assert (reading_threads(cluster), connections(cluster, broker) <= before) == (0, True)

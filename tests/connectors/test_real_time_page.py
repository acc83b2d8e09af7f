"""The programs of docs/real-time.md, run as they stand beside a real broker: the query, also in micro-batches and back, and those
that send changes, and what a function emits, exactly once.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import statefleet as sf
from statefleet.reads.state import LiveState
from tests.clocks import until
from tests.code_blocks import Block, blocks_of
from tests.conftest import NewUri
from tests.connectors.topics import read_records, send_json, stream_of
from tests.integration.streams import lose_store_actors, stopping
from tests.kafka_broker import KafkaBroker
from tests.page_programs import run_blocks

NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)
CARDS = 5
Totals = dict[tuple[str, str], tuple[int, int]]


def payments(numbers: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield records, each with its partition: a payment every ten seconds."""
    for number in numbers:
        at = NOON + dt.timedelta(seconds=10 * number)
        yield number % 2, {"card": f"card-{number % CARDS}", "amount": number, "at": at.isoformat()}


def totals(numbers: range) -> Totals:
    """Return payments and amounts by window and card."""
    found: Totals = {}
    for number in numbers:
        group = (NOON + dt.timedelta(minutes=number // 60 * 10)).strftime("%H:%M"), f"card-{number % CARDS}"
        count, amount = found.get(group, (0, 0))
        found[group] = count + 1, amount + number
    return found


def query_blocks() -> list[Block]:
    """Return the page's program whose query runs."""
    return blocks_of(
        "tests/connectors/test_real_time_page.py::"
        "test_the_program_of_the_page_runs_and_its_query_goes_to_micro_batches_and_back"
    )


def newest(spark: SparkSession, broker: KafkaBroker) -> Totals:
    """Return the newest record of each group in the topic of results."""
    found: Totals = {}
    for _, value in read_records(spark, broker, "spent"):
        group = group_of(value)
        found[group] = max(found.get(group, (0, 0)), (value["payments"], value["amount"]))
    return found


def group_of(value: dict[str, Any]) -> tuple[str, str]:
    """Return window and card of a row, or of a record."""
    start = value["window"]["start"]
    at = start if isinstance(start, dt.datetime) else dt.datetime.fromisoformat(start)
    return at.astimezone(dt.UTC).strftime("%H:%M"), value["card"]


@pytest.mark.timeout(600)
def test_the_program_of_the_page_runs_and_its_query_goes_to_micro_batches_and_back(
    spark: SparkSession, fleet: sf.Fleet, broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sf, "start_session", lambda *_, **__: spark)
    broker.create_topic("payments", 2)
    broker.create_topic("spent", 2)
    folder = tmp_path / "checkpoint"
    replacements = {
        "localhost:9092": broker.address,
        "file:///var/lib/statefleet": fleet.uri,
        "/data/spent-checkpoint": str(folder),
    }
    scope: dict[str, Any] = {"__name__": "__main__"}
    ends = iter(range(60, 1000, 60))

    def comes(query: Any) -> None:
        """Send more, and wait for the results of all that was sent."""
        end = next(ends)
        send_json(spark, broker, "payments", list(payments(range(end - 60, end))))
        until(lambda: query.exception() or newest(spark, broker) == totals(range(end)), within_s=120, every_s=0.5)
        assert query.exception() is None

    run_blocks(query_blocks(), scope, replacements)
    with stopping(scope["query"]) as query:
        comes(query)
        comes(query)
    for trigger in ({"processingTime": "0 seconds"}, {"continuous": "1 second"}):
        with stopping(scope["started"](**trigger)) as query:
            comes(query)
    with stopping(scope["started"](availableNow=True)) as query:
        query.awaitTermination(120)
    state = fleet.state("spent").scan().to_arrow().to_pylist()
    kept = {
        (row["window"]["start"].astimezone(dt.UTC).strftime("%H:%M"), row["card"]): (row["payments"], row["amount"])
        for row in state
    }
    # The watermark has closed the first windows.
    assert kept.items() <= totals(range(240)).items()
    assert ("12:30", "card-0") in kept
    last = max((folder / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    offsets = json.loads(last.read_text().splitlines()[-1])
    assert sum(offsets["payments"].values()) == 240


# -- changes, sent once ----------------------------------------------------------------------------------------------

#: Steps of a follower, in their order.
STEPS = ("init_transactions", "begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction")

DEATHS = [(step, is_done) for step in STEPS for is_done in (False, True)]


class Died(Exception):
    """The follower's process is gone."""


class MortalProducer:
    """A producer whose program dies before or after a step; what it left open stays open.

    Parameters
    ----------
    death
        Number of the call in :data:`STEPS`, counted over all of them, and whether it is made; None to live on.
    """

    def __init__(self, producer: Any, death: tuple[str, bool] | None) -> None:
        self._producer, self._death = producer, death

    def __getattr__(self, step: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            is_last = self._death is not None and step == self._death[0]
            if not is_last or self._death == (step, True):
                getattr(self._producer, step)(*args)
            if is_last:
                raise Died(step)

        return call


class Followers:
    """Runs a follower of the page again and again, in this process."""

    def __init__(self, blocks: list[Block], places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._blocks, self._places, self._monkeypatch = blocks, places, monkeypatch
        #: Producers of those that died, by where.
        self.dead: dict[tuple[str, bool], Any] = {}

    def run(self, death: tuple[str, bool] | None, passes: int = 1) -> None:
        """Run the follower until it dies, or for some passes of its loop."""
        make = confluent_kafka.cimpl.Producer

        def mortal(settings: dict[str, Any]) -> MortalProducer:
            producer = make(settings)
            if death is not None:
                self.dead[death] = producer
            return MortalProducer(producer, death)

        self._monkeypatch.setattr(confluent_kafka, "Producer", mortal)
        scope: dict[str, Any] = {"__name__": "__main__", "passes": iter(range(passes))}
        try:
            run_blocks(self._blocks, scope, self._places | {"while True:": "for _ in passes:"})
        except Died:
            assert death is not None
        else:
            assert death is None


def await_groups(broker: KafkaBroker, topic: str) -> None:
    """Wait until the broker keeps positions of groups, for which it makes a topic when it is first asked for one."""
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "first"})

    def answers() -> bool:
        try:
            consumer.committed([TopicPartition(topic, 0)], timeout=5)
        except KafkaException:
            return False
        return True

    until(answers, within_s=60)
    consumer.close()


def all_records(broker: KafkaBroker, topic: str, isolation: str = "read_committed") -> list[dict[str, Any]]:
    """Return the values of a topic as a reader gets them, partition by partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": f"reader-{isolation}",
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe([topic])
    values, ended = [], set()
    while len(ended) < 2:
        message = consumer.poll(30)
        assert message is not None, "the broker does not answer"
        if message.error():
            ended.add(message.partition())
        else:
            values.append(json.loads(message.value()))
    consumer.close()
    return values


def newest_changes(state: LiveState) -> Totals:
    """Return what the changes of a state leave of each group, also of those that are closed."""
    changes = state.changes(since=0).to_arrow().sort_by("_commit_version").to_pylist()
    return {group_of(row): (row["payments"], row["amount"]) for row in changes}


@pytest.mark.timeout(600)
def test_a_follower_that_dies_between_any_two_steps_sends_each_change_once(
    spark: SparkSession, new_uri: NewUri, broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sf, "start_session", lambda *_, **__: spark)
    uri = new_uri()
    fleet = sf.connect(uri, maintenance=sf.Maintenance(retain_s=3600))
    for topic in ("once-payments", "once-early", "spent-once"):
        broker.create_topic(topic, 2)
    await_groups(broker, "spent-once")
    places = {
        "localhost:9092": broker.address,
        "file:///var/lib/statefleet": uri,
        "/data/spent-checkpoint": str(tmp_path / "checkpoint"),
        '"subscribe", "payments"': '"subscribe", "once-payments"',
        '"topic", "spent"': '"topic", "once-early"',
    }
    query: dict[str, Any] = {"__name__": "__main__"}
    run_blocks(query_blocks(), query, places)
    state = fleet.state("spent")
    ends = iter(range(20, 1000, 20))

    def counted() -> int:
        """Send more, and return the number of payments once an epoch with all of them counts."""
        end = next(ends)
        send_json(spark, broker, "once-payments", list(payments(range(end - 20, end))))
        until(
            lambda: query["query"].exception() or newest_changes(state) == totals(range(end)), within_s=120, every_s=0.3
        )
        assert query["query"].exception() is None
        return end

    blocks = blocks_of(
        "tests/connectors/test_real_time_page.py::test_a_follower_that_dies_between_any_two_steps_sends_each_change_once"
    )
    followers = Followers(blocks, places, monkeypatch)
    with stopping(query["query"]):
        # The state is there from its first epoch on.
        commits = tmp_path / "checkpoint" / "commits"
        until(lambda: query["query"].exception() or (commits.exists() and any(commits.iterdir())), within_s=120)
        counted()
        followers.run(None)
        counted()
        for death in DEATHS:
            followers.run(death)
            counted()
        followers.run(None)
    # The query is killed in an epoch, goes on, and so does the follower.
    query["query"] = query["started"](continuous="1 second")
    with stopping(query["query"]):
        counted()
        followers.run(None, passes=3)
        sent = counted()
        followers.run(None)
    with pytest.raises(KafkaException):
        followers.dead["commit_transaction", False].commit_transaction()
    records = all_records(broker, "spent-once")
    assert len(all_records(broker, "spent-once", "read_uncommitted")) > len(records), (
        "some died with records on their way"
    )
    changes = Counter(json.dumps(row) for row in records if "_commit_version" in row)
    begun = min(json.loads(row)["_commit_version"] for row in changes)
    all_changes = state.changes(since=begun - 1).to_arrow().to_pylist()
    assert changes == Counter(json.dumps(row, default=str) for row in all_changes)
    # Those of a group are in their order, and the last one has all its payments.
    last: Totals = {}
    for row in records:
        assert row["payments"] >= last.get(group_of(row), (0, 0))[0]
        last[group_of(row)] = row["payments"], row["amount"]
    assert last == totals(range(sent))
    fleet.shutdown()


# -- what a function emits, held until it counts -----------------------------------------------------------------------


def numbered(keys: pa.Table, rows: pa.Table, state: Any) -> pa.Table:
    """Emit each payment, and how many its card had before it."""
    sizes = np.diff(state.offsets)
    before = state.get("n", 0)
    state.update({"n": pc.add(before, pa.array(sizes))})
    nth = np.arange(rows.num_rows) - np.repeat(state.offsets[:-1] - before.to_numpy(), sizes)
    return pa.table({"card": rows["card"], "amount": rows["amount"], "nth": nth})


@pytest.mark.timeout(600)
def test_what_a_function_emits_is_sent_once_by_a_program_that_holds_it(
    spark: SparkSession, new_uri: NewUri, broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = new_uri()
    fleet = sf.connect(uri)
    for topic in ("held-payments", "held-early", "held-once"):
        broker.create_topic(topic, 2)
    await_groups(broker, "held-early")
    payment = stream_of(spark, broker.address, "held-payments", "card STRING, amount BIGINT")
    emitted = (
        fleet.stateful(payment, name="held", shards=2)
        .groupBy("card")
        .applyInArrowWithState(numbered, "card STRING, amount BIGINT, nth BIGINT", "n BIGINT", "update", "NoTimeout")
    )
    ordered = sf.with_result_order(emitted).select("card", F.to_json(F.struct("*")).alias("value"))
    writer = ordered.withColumnRenamed("card", "key").writeStream.format("kafka").outputMode("update")
    writer = writer.option("kafka.bootstrap.servers", broker.address).option("topic", "held-early")
    writer = writer.option("checkpointLocation", str(tmp_path)).trigger(continuous="3 seconds")
    places = {"localhost:9092": broker.address, "file:///var/lib/statefleet": uri, '"spent"': '"held-early"'}
    places = {'state("spent")': 'state("held")', '"spent-held"': '"held-once"'} | places
    blocks = blocks_of(
        "tests/connectors/test_real_time_page.py::test_what_a_function_emits_is_sent_once_by_a_program_that_holds_it"
    )
    followers, sent = Followers(blocks, places, monkeypatch), 0

    def emits(query: StreamingQuery) -> None:
        """Send more, and wait until they are emitted."""
        nonlocal sent
        send_json(spark, broker, "held-payments", list(payments(range(sent, sent + 20))))
        sent += 20
        until(
            lambda: (
                query.exception()
                or {value["amount"] for _, value in read_records(spark, broker, "held-early")} == set(range(sent))
            ),
            within_s=120,
        )
        assert query.exception() is None

    for deaths in (DEATHS[:5], DEATHS[5:]):
        # At its end the query is stopped in an epoch, which the next run repeats.
        with stopping(writer.start()) as query:
            until(lambda: query.exception() or any(tmp_path.glob("commits/[0-9]*")), within_s=120)
            for number, death in enumerate(deaths):
                emits(query)
                if number % 2:
                    lose_store_actors(fleet)
                followers.run(death, passes=600)
            emits(query)
    with stopping(writer.start()) as query:
        emits(query)
        counts = fleet.state("held")
        until(lambda: query.exception() or sum(row["n"] for row in counts.scan().to_arrow().to_pylist()) == sent)
    followers.run(None)
    assert len(all_records(broker, "held-early")) > sent, "epochs were repeated"
    once = all_records(broker, "held-once")
    assert Counter(value["amount"] for value in once) == Counter(range(sent))
    for card in range(CARDS):
        nth = [value["nth"] for value in once if value["card"] == f"card-{card}"]
        assert nth == list(range(len(nth)))
    fleet.shutdown()

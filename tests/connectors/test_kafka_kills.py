"""Jobs from topics to a topic are killed at random moments and started again: every record is counted once.

``pytest tests/connectors/test_kafka_kills.py -m soak -s`` kills each 20 times. ``CHAOS_SEED`` chooses other moments.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from statefleet.fleet import connect
from tests.chaos.driver_process import Supervisor, versions, wait_past
from tests.conftest import NewUri
from tests.connectors.kafka_driver import PER_TRIGGER, SHARDS
from tests.connectors.topics import newest, read_records, send_json
from tests.kafka_broker import KafkaBroker

#: Batches between two kills.
BATCHES_A_KILL = 4
PARTITIONS = 4
NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)
#: A topic's records, each with its partition.
Records = list[tuple[int, dict[str, Any]]]
#: Number and sum of the ids of each group.
Totals = dict[tuple[str, ...], tuple[int, int]]


def totals_of(ids: Iterable[tuple[tuple[str, ...], int]]) -> Totals:
    numbers = defaultdict[tuple[str, ...], list[int]](list)
    for group, number in ids:
        numbers[group].append(number)
    return {group: (len(those), sum(those)) for group, those in numbers.items()}


def records_of_users(count: int, chance: random.Random) -> tuple[dict[str, Records], Totals]:
    """Return a topic of records of users, and the totals of each user."""
    users = [f"u{chance.randrange(97)}" for _ in range(count)]
    records = [(chance.randrange(PARTITIONS), {"id": n, "user": user}) for n, user in enumerate(users)]
    return {"records": records}, totals_of(((user,), n) for n, user in enumerate(users))


def orders_and_payments(count: int, chance: random.Random) -> tuple[dict[str, Records], Totals]:
    """Return a topic of orders, of which some come twice, and one of their payments; and the totals of each minute and item.

    The last order, an hour later, makes all other groups final.
    """
    orders: Records = []
    payments: Records = []
    ids = []
    for number in range(count):
        at, item = NOON + dt.timedelta(seconds=0.3 * number), f"i{chance.randrange(5)}"
        paid = at + dt.timedelta(seconds=5)
        order = {"id": number, "item": item, "at": at.isoformat()}
        orders.append((number % PARTITIONS, order))
        if number % 5 == 0:
            orders.append((chance.randrange(PARTITIONS), order))
        payments.append((number % PARTITIONS, {"order": number, "paid": paid.isoformat()}))
        ids.append(((paid.strftime("%H:%M"), item), number))
    last = (NOON + dt.timedelta(hours=1, seconds=0.3 * count)).isoformat()
    orders.append((0, {"id": count, "item": "last", "at": last}))
    payments.append((0, {"order": count, "paid": last}))
    return {"orders": orders, "payments": payments}, totals_of(ids)


def minute_and_item(value: dict[str, Any]) -> tuple[str, ...]:
    start = dt.datetime.fromisoformat(value["window"]["start"]).astimezone(dt.UTC)
    return start.strftime("%H:%M"), value["item"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("query", "make", "group_of"),
    [
        ("counts", records_of_users, lambda value: (value["user"],)),
        ("paid_orders", orders_and_payments, minute_and_item),
    ],
    ids=["counts", "paid_orders"],
)
def test_every_record_is_counted_once(
    cluster: str,
    broker: KafkaBroker,
    spark: SparkSession,
    new_uri: NewUri,
    tmp_path: Path,
    name: str,
    kills: int,
    query: str,
    make: Callable[[int, random.Random], tuple[dict[str, Records], Totals]],
    group_of: Callable[[dict[str, Any]], tuple[str, ...]],
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    chance = random.Random(seed)
    topics, expected = make((kills + 1) * BATCHES_A_KILL * PER_TRIGGER, chance)
    for topic, records in topics.items():
        broker.create_topic(f"{name}-{topic}", PARTITIONS)
        send_json(spark, broker, f"{name}-{topic}", records)
    output = f"{name}-out"
    broker.create_topic(output, PARTITIONS)
    uri = new_uri()
    fleet = connect(uri)
    program = ("tests.connectors.kafka_driver", broker.address, query, name)
    supervisor = Supervisor(tmp_path, uri, cluster, program=program)
    killed_after = []
    try:
        for number in range(kills):
            reached = min(versions(fleet), default=0)
            wait_past(fleet, supervisor, max(reached, number * BATCHES_A_KILL))
            # Somewhere in the batches that follow, in their sends as well.
            time.sleep(2 * chance.random())
            killed_after.append(min(versions(fleet)))
            supervisor.driver.kill()
            # A killed driver's code is not 0: the supervisor starts another.
            assert not supervisor.is_done()
        while not supervisor.is_done():
            time.sleep(0.2)
            assert supervisor.starts == kills + 1, (tmp_path / "driver.log").read_text()[-3000:]
        sent = read_records(spark, broker, output)
        values = newest(sent).values()
        assert {group_of(value): (value["n"], value["ids"]) for value in values} == expected
        assert len(values) == len(expected)
        # A batch that is sent again has the same values, so a reader may take any of its records.
        batches_of = defaultdict[str, dict[int, Any]](dict)
        for key, value in sent:
            assert batches_of[key].setdefault(value["batch"], value) == value
        if query == "paid_orders":
            assert all(len(batches) == 1 for batches in batches_of.values()), "a final group is sent by one batch"
        batches = max(value["batch"] for _, value in sent) + 1
        assert versions(fleet) == [batches] * SHARDS
    finally:
        supervisor.driver.__exit__()
        fleet.shutdown()
    repeats = len(sent) - sum(map(len, batches_of.values()))
    read = sum(map(len, topics.values()))
    print(f"\nseed {seed}: {read:,} records of {query} counted once by {batches} batches; killed after {killed_after}; "
          f"{repeats:,} of {len(sent):,} records sent were repeats")  # fmt: skip

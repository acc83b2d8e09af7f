"""A job from a topic to a topic is killed at random moments and started again: every record is counted once.

``pytest tests/connectors/test_kafka_kills.py -m soak -s`` kills it 20 times. ``CHAOS_SEED`` chooses other moments.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_jobs.fleet import connect
from tests.chaos.driver_process import Supervisor, versions, wait_past
from tests.conftest import NewUri
from tests.connectors.kafka_driver import PER_TRIGGER
from tests.connectors.topics import newest, read_records, send_json
from tests.kafka_broker import KafkaBroker

#: Batches between two kills.
BATCHES_A_KILL = 4
PARTITIONS = 4


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_every_record_is_counted_once(
    cluster: str, broker: KafkaBroker, spark: SparkSession, new_uri: NewUri, tmp_path: Path, kills: int
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "1"))
    chance = random.Random(seed)
    for topic in ("kills-in", "kills-out"):
        broker.create_topic(topic, PARTITIONS)
    records = [{"id": n, "user": f"u{chance.randrange(97)}"} for n in range((kills + 1) * BATCHES_A_KILL * PER_TRIGGER)]
    send_json(spark, broker, "kills-in", [(chance.randrange(PARTITIONS), record) for record in records])
    ids = defaultdict[str, list[int]](list)
    for record in records:
        ids[record["user"]].append(record["id"])
    expected = {user: (len(numbers), sum(numbers)) for user, numbers in ids.items()}
    uri = new_uri()
    fleet = connect(uri)
    supervisor = Supervisor(tmp_path, uri, cluster, program=("tests.connectors.kafka_driver", broker.address))
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
        sent = read_records(spark, broker, "kills-out")
        counted = {value["user"]: (value["n"], value["ids"]) for value in newest(sent).values()}
        assert counted == expected
        batches = max(value["batch"] for _, value in sent) + 1
        assert versions(fleet) == [batches] * PARTITIONS
    finally:
        supervisor.driver.__exit__()
        fleet.shutdown()
    repeated = len(sent) - len({(key, value["batch"]) for key, value in sent})
    print(f"\nseed {seed}: {len(records):,} records counted once by {batches} batches; killed after {killed_after}; "
          f"{repeated:,} of {len(sent):,} records sent were repeats")  # fmt: skip

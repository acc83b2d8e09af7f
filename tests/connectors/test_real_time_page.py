"""The program of docs/real-time.md, run as it stands beside a real broker, and its query in micro-batches and back."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import statefleet as sf
from tests.clocks import until
from tests.code_blocks import blocks_of
from tests.connectors.topics import read_records, send_json
from tests.integration.streams import stopping
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


def newest(spark: SparkSession, broker: KafkaBroker) -> Totals:
    """Return the newest record of each group in the topic of results."""
    found: Totals = {}
    for _, value in read_records(spark, broker, "spent"):
        at = dt.datetime.fromisoformat(value["window"]["start"]).astimezone(dt.UTC).strftime("%H:%M")
        group = at, value["card"]
        found[group] = max(found.get(group, (0, 0)), (value["payments"], value["amount"]))
    return found


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
    programs = blocks_of(
        "tests/connectors/test_real_time_page.py::"
        "test_the_program_of_the_page_runs_and_its_query_goes_to_micro_batches_and_back"
    )
    ends = iter(range(60, 1000, 60))

    def comes(query: Any) -> None:
        """Send more, and wait for the results of all that was sent."""
        end = next(ends)
        send_json(spark, broker, "payments", list(payments(range(end - 60, end))))
        until(lambda: query.exception() or newest(spark, broker) == totals(range(end)), within_s=120, every_s=0.5)
        assert query.exception() is None

    run_blocks(programs, scope, replacements)
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

"""What a driver reports of its executors, and of a batch that takes long, is shown while that batch runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import statefleet as sf
from tests.integration.streams import Feed, Run

#: Until a report must have come, in seconds: a batch is reported after three, at the next look.
_PATIENCE_S = 60.0


def test_a_batch_that_is_held_up_in_its_sink_shows_while_it_runs_and_no_longer(
    spark: SparkSession, fleet: sf.Fleet, tmp_path: Path, name: str
) -> None:
    shown: list[dict[str, Any]] = []
    feed = Feed(spark, tmp_path / "in", pa.schema([("k", pa.int64())]))

    def running() -> dict[str, Any] | None:
        found: dict[str, Any] | None = next(
            one["running_batch"] for one in fleet.status()["queries"] if one["name"] == name
        )
        return found

    def hold_up(batch_id: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while batch_id == 1 and not shown and time.monotonic() < deadline:
            if (batch := running()) is not None:
                shown.append(batch)
            time.sleep(0.2)

    counts = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").count()
    run = Run(counts, "update", tmp_path / "ck", on_batch=hold_up)
    try:
        for key in range(3):
            feed.add([(key,)])
            run.wait()
        assert [one["batch_id"] for one in shown] == [1]
        assert f"batch 1 of {name} has been running for" in shown[0]["text"]
        assert not shown[0]["is_overdue"], "too few batches are known"
        assert running() is None
        executors = fleet.status()["executors"]
        assert [one["alive"] for one in executors] == [True]
    finally:
        run.stop()

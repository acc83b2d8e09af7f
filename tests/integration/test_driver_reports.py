"""The status shows what a driver reports of its executors, and of a batch that takes long while that batch runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa

import statefleet as sf
from tests.integration.streams import Feed, Run

#: Until a report must have come, in seconds: a batch is reported after three, at the next look.
_PATIENCE_S = 60.0


def test_a_batch_that_is_held_up_in_its_sink_shows_while_it_runs_and_no_longer(
    fleet: sf.Fleet, tmp_path: Path, name: str
) -> None:
    reports: list[dict[str, Any]] = []
    feed = Feed(tmp_path / "in", pa.schema([("k", pa.int64())]))

    def running() -> dict[str, Any] | None:
        report: dict[str, Any] | None = next(
            query["running_batch"] for query in fleet.status()["queries"] if query["name"] == name
        )
        return report

    def hold_up(batch_id: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while batch_id == 1 and not reports and time.monotonic() < deadline:
            if (batch := running()) is not None:
                reports.append(batch)
            time.sleep(0.2)

    counts = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").count()
    with Run(counts, "update", tmp_path / "ck", on_batch=hold_up) as run:
        for key in range(3):
            feed.add([(key,)])
            run.wait()
        assert [report["batch_id"] for report in reports] == [1]
        assert f"batch 1 of {name} has been running for" in reports[0]["text"]
        assert not reports[0]["is_overdue"], "too few batches are known"
        assert running() is None
        executors = fleet.status()["executors"]
        assert [executor["alive"] for executor in executors] == [True]

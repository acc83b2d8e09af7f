"""A source that is silent, and the watermark of the query."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from spark_jobs.plan.spark_errors import InvalidArgumentError
from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run, short_list

ROWS = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("k", pa.string())])
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)


def at(*minutes: float) -> list[tuple[Any, ...]]:
    return [(NOON + timedelta(minutes=minute), "k") for minute in minutes]


class Windows:
    """Rows of two sources, counted in windows of a minute."""

    def __init__(self, fleet: Fleet, folder: Path, name: str, **options: Any) -> None:
        self.feeds = [Feed(folder / source, ROWS) for source in ("left", "right")]
        left, right = (feed.stream().withWatermark("at", "0 seconds") for feed in self.feeds)
        rows = fleet.stateful(left.union(right), name=name, **options)
        self.counts = rows.groupBy(F.window("at", "1 minute")).count().selectExpr("minute(window.start) m", "count")

    def batch(self, run: Run, left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
        """Return the windows that are closed by more rows of the sources."""
        for feed, rows in zip(self.feeds, (left, right), strict=True):
            if rows:
                feed.add(rows)
        return sorted((row["m"], row["count"]) for row in run.take())


def late(run: Run) -> int:
    return sum(states[0][3] for states in run.states().values())


@pytest.mark.parametrize("silent", short_list([0, 1], [1]))
def test_a_silent_source_holds_the_watermark_until_it_is_idle_and_comes_back(
    silent: int, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    windows = Windows(fleet, tmp_path, name, idle_after="3 seconds")

    def of_other(run: Run, rows: list[tuple[Any, ...]], of_silent: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
        sides = (of_silent, rows) if silent == 0 else (rows, of_silent)
        return windows.batch(run, *sides)

    with Run(windows.counts, "append", tmp_path / "ck") as run:
        assert of_other(run, at(0.5), at(0.6)) == []
        # Not idle yet.
        assert of_other(run, at(5.5), []) == []
        time.sleep(4)
        assert of_other(run, at(7.5), []) == [(0, 2), (5, 1)]
        assert late(run) == 0
        # It is back, with a late row, and holds the watermark again.
        assert of_other(run, at(9.5), at(6.5, 7.6)) == []
        assert late(run) == 1
        assert of_other(run, at(12.5), at(8.5)) == [(7, 2)]
    # A run that begins again takes no source for idle at once.
    with Run(windows.counts, "append", tmp_path / "ck") as run:
        assert of_other(run, at(20.5), []) == []
        time.sleep(4)
        assert of_other(run, at(21.5), []) == [(8, 1), (9, 1), (12, 1), (20, 1)]


@pytest.mark.replay
def test_without_the_option_it_is_waited_for_and_alone_nothing_is_idle(fleet: Fleet, tmp_path: Path, name: str) -> None:
    windows = Windows(fleet, tmp_path, name)
    with Run(windows.counts, "append", tmp_path / "ck") as run:
        assert windows.batch(run, at(0.5), at(0.6)) == []
        time.sleep(1)
        assert windows.batch(run, at(5.5), []) == []


@pytest.mark.parametrize("idle_after", ["soon", "0 seconds", "-1 minute", 5])
def test_an_interval_is_checked_when_the_query_is_built(
    idle_after: Any, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidArgumentError, match="interval"):
        Windows(fleet, tmp_path, name, idle_after=idle_after)

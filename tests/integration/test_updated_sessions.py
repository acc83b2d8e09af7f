"""Session windows in update mode, beside Spark's own batch query, as Spark has none on streams."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run, short_list

ROWS = pa.schema([("at", pa.timestamp("us", tz="UTC")), ("k", pa.string()), ("v", pa.int64())])
NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
Session = tuple[datetime, datetime]


def sessions(rows: Any) -> DataFrame:
    grouped = rows.groupBy(F.session_window("at", "10 seconds").alias("w"), "k")
    result: DataFrame = grouped.agg(F.count("*").alias("n"), F.sum("v").alias("s")).selectExpr(
        "k", "w.start", "w.end", "n", "s"
    )
    return result


def as_a_sink_has_it(table: dict[tuple[str, Session], tuple[Any, ...]], emitted: Iterable[Row]) -> None:
    """Write sessions as the page says: what lies within one of the same key makes room for it."""
    for row in emitted:
        for key, (start, end) in list(table):
            if key == row["k"] and row["start"] <= start and end <= row["end"]:
                del table[key, (start, end)]
        table[row["k"], (row["start"], row["end"])] = tuple(row)


@pytest.mark.parametrize("seed", short_list(range(3), [0]))
@pytest.mark.parametrize("watermark", [None, "1 hour"])
def test_a_sink_has_the_sessions_of_a_batch(
    seed: int, watermark: str | None, fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed, dice = Feed(tmp_path / "in", ROWS), random.Random(seed)
    rows = feed.stream() if watermark is None else feed.stream().withWatermark("at", watermark)
    table: dict[tuple[str, Session], tuple[Any, ...]] = {}
    for _ in range(2):
        with Run(sessions(fleet.stateful(rows, name=name)), "update", tmp_path / "ck") as run:
            for _ in range(3):
                times = [NOON + timedelta(seconds=dice.randrange(200)) for _ in range(dice.randrange(1, 12))]
                feed.add([(at, dice.choice("abc"), dice.randrange(9)) for at in times])
                as_a_sink_has_it(table, run.take())
                expected = [tuple(row) for row in sessions(feed.batch()).collect()]
                assert sorted(table.values()) == sorted(expected)


def test_a_session_that_is_closed_is_not_emitted_again_and_late_rows_are_dropped(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    rows = fleet.stateful(feed.stream().withWatermark("at", "5 seconds"), name=name)
    with Run(sessions(rows), "update", tmp_path / "ck") as run:
        for second, expected in ((0, [1]), (5, [2]), (60, [1]), (3, []), (62, [2])):
            feed.add([(NOON + timedelta(seconds=second), "a", 1)])
            assert [row["n"] for row in run.take()] == expected

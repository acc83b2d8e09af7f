"""State of the user's own functions where workers die (case F5 of Spark's suites) and behind other operators."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run

LETTERS = pa.schema([("k", pa.string())])


@pytest.mark.replay
def test_workers_that_die_at_random_change_no_count(fleet: Fleet, tmp_path: Path, name: str) -> None:
    """F5: each call of the function may kill its worker; Spark repeats the task, and the query is restarted if need be."""
    feed = Feed(tmp_path / "in", LETTERS)
    chance = random.Random(5)
    batches = [[chance.choice("abcdefghij") for _ in range(100)] for _ in range(5)]

    def count(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        # Workers are forked: each would draw the same numbers from a generator of its own.
        if random.SystemRandom().random() < 1 / 30:
            os.kill(os.getpid(), signal.SIGKILL)
        total = (state.get[0] if state.exists else 0) + sum(len(pdf) for pdf in pdfs)
        state.update((total,))
        yield pd.DataFrame({"k": [key[0]], "n": [total]})

    def start() -> Run:
        grouped = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k")
        frame = grouped.applyInPandasWithState(
            count, "k string, n long", "n long", "update", GroupStateTimeout.NoTimeout
        )
        return Run(frame, "update", tmp_path / "ck")

    for letters in batches:
        feed.add([(letter,) for letter in letters])
    runs = [start()]
    try:
        for _ in range(20):
            try:
                runs[-1].wait()
                break
            except StreamingQueryException:
                runs[-1].stop()
                runs.append(start())
    finally:
        runs[-1].stop()
    largest: Counter[str] = Counter()
    for rows in (rows for run in runs for rows in run.batches.values()):
        largest |= Counter({row["k"]: row["n"] for row in rows})
    assert largest == sum((Counter(letters) for letters in batches), Counter())


def test_a_function_is_called_of_windows_that_are_over_by_an_expression(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    """Spark has no function after an aggregation, and none of an expression's groups."""

    def largest(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        most = max([int(pdf["count"].max()) for pdf in pdfs] + list(state.getOption or ()))
        state.update((most,))
        yield pd.DataFrame({"k": [key[0]], "most": [most]})

    feed = Feed(tmp_path / "in", pa.schema([("k", pa.string()), ("s", pa.int64())]))
    rows = feed.stream().withColumn("t", F.timestamp_seconds("s")).withWatermark("t", "0 seconds")
    windows = fleet.stateful(rows, name=f"{name}-windows", outputMode="append", shards=2)
    counts = windows.groupBy(F.window("t", "10 seconds"), "k").count()
    grouped = fleet.stateful(counts, name=name, outputMode="append", shards=2).groupBy(F.upper("k"))
    timeout = GroupStateTimeout.NoTimeout
    with Run(
        grouped.applyInPandasWithState(largest, "k string, most long", "n long", "append", timeout),
        "append",
        tmp_path / "ck",
    ) as run:
        for new, expected in (
            ([("a", 1), ("a", 2), ("A", 3)], []),
            ([("a", 11)], [("A", 2)]),
            ([("a", 21), ("b", 22), ("b", 23), ("b", 24)], [("A", 2)]),
            ([("b", 31)], [("A", 2), ("B", 3)]),
        ):
            feed.add(new)
            assert sorted(tuple(row) for row in run.take()) == expected


def test_zeros_of_both_signs_are_one_key(fleet: Fleet, tmp_path: Path, name: str) -> None:
    """Announced: Spark's own function has them in one call if they come in one batch, and as keys of their own if not."""

    def count(key: Any, pdfs: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        total = sum(map(len, pdfs)) + (state.get[0] if state.exists else 0)
        state.update((total,))
        yield pd.DataFrame({"n": [total]})

    feed = Feed(tmp_path / "in", pa.schema([("x", pa.float64())]))
    grouped = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("x")
    frame = grouped.applyInPandasWithState(count, "n long", "n long", "update", GroupStateTimeout.NoTimeout)
    with Run(frame, "update", tmp_path / "ck") as run:
        for expected, zero in enumerate((0.0, -0.0), start=1):
            feed.add([(zero,)])
            assert [tuple(row) for row in run.take()] == [(expected,)]

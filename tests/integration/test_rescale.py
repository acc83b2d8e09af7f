"""Rescales of queries that run, at restarts and in between, beside Spark; every operator is in `tests/unit/test_rescaled_shards.py`.

Random programs of every operator that Spark has, too, are rescaled in :mod:`tests.integration.test_random_programs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from coordinator.model.errors import InvalidRequestError
from statefleet.cli import main
from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.streams import Feed, Run, lose_store_actors

ROWS = pa.schema([("k", pa.string()), ("v", pa.int64())])


def numbers(first: int) -> list[tuple[str, int]]:
    return [(f"k{i % 37}", i) for i in range(first, first + 200)]


def totals(fleet: Fleet, feed: Feed, name: str, shards: int | None) -> DataFrame:
    grouped = fleet.stateful(feed.stream(), name=name, shards=shards).groupBy("k")
    return grouped.agg(F.count("*").alias("n"), F.sum("v").alias("s"))


def seen(rows: list[Any]) -> dict[str, tuple[int, int]]:
    return {row["k"]: (row["n"], row["s"]) for row in rows}


def expected(feed: Feed) -> dict[str, tuple[int, int]]:
    return seen(feed.batch().groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("s")).collect())


def shards_of(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    return next(query["shards"] for query in fleet.status()["queries"] if query["name"] == name)


@pytest.mark.parametrize("asked_for", [(4, 3), pytest.param((4, None, 3, 5, 1, None), marks=pytest.mark.replay)])
def test_a_state_goes_on_with_any_number_after_restarts_and_online_and_says_so(
    fleet: Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], asked_for: tuple[int | None, ...]
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    emitted: dict[str, tuple[int, int]] = {}
    for round_, shards in enumerate(asked_for):
        feed.add(numbers(round_ * 1000))
        with Run(totals(fleet, feed, name, shards), "update", tmp_path / "ck") as run:
            emitted |= seen(run.take())
            assert emitted == expected(feed)
            present = len(shards_of(fleet, name))
            assert shards is None or present == shards
            # Online: from one of the next batches on, of which the second is one for sure.
            dry = fleet.rescale(name, 2 * present, dry_run=True)
            assert dry.sources == tuple((shard % present,) for shard in range(2 * present))
            assert main(["rescale", fleet.uri, name, "--shards", str(2 * present)]) == 0
            assert f"{present} to {2 * present} shards" in capsys.readouterr().out
            for more in (1, 2, 3):
                feed.add(numbers(round_ * 1000 + more * 200))
                emitted |= seen(run.take())
                assert emitted == expected(feed)
            statuses = shards_of(fleet, name)
            assert [status["partition_id"] for status in statuses] == list(range(2 * present))
            assert sum(status["state_rows"] for status in statuses) == len(emitted)
            progress = run.query.recentProgress[-1]["stateOperators"][0]
            assert (progress["numShufflePartitions"], progress["numRowsTotal"]) == (2 * present, len(emitted))
            assert fleet.explain_placement(name, 2 * present - 1).location is not None
            with pytest.raises(InvalidRequestError, match="no such shard"):
                fleet.explain_placement(name, 2 * present)


@pytest.mark.replay
def test_new_shards_outlive_the_store_actors_that_made_them_and_a_backlog(
    fleet: Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Restarted with a backlog of several batches and other shards; each time every store actor is killed right after the first one."""
    feed = Feed(tmp_path / "in", ROWS)
    emitted: dict[str, tuple[int, int]] = {}
    for round_, shards in enumerate((2, 6, 4, 5)):
        for part in range(3):
            feed.add(numbers(round_ * 1000 + part * 200))

        def lose_all(batch_id: int, first: int = 3 * round_) -> None:
            if batch_id == first:
                lose_store_actors(fleet)

        with Run(
            totals(fleet, feed, name, shards), "update", tmp_path / "ck", on_batch=lose_all, available_now=True
        ) as run:
            emitted |= seen(run.take())
        assert emitted == expected(feed)
        assert len(shards_of(fleet, name)) == shards
    # No run is active now; Spark reports that with a delay.
    until(lambda: main(["rescale", fleet.uri, name, "--shards", "10"]) != 0, 30, every_s=0.2)
    assert "no run of the state's query goes on" in capsys.readouterr().err

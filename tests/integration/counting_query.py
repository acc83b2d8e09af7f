"""A query that counts by key, whose batches are a test's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyspark.sql import functions as F

from statefleet.fleet import Fleet
from tests.integration.streams import Feed, Run, shuffled

ROWS = pa.schema([("k", pa.int64()), ("s", pa.string())])


def query_of(fleet: Fleet, name: str) -> dict[str, Any]:
    """Return the status of the query of a state."""
    (query,) = [entry for entry in fleet.status()["queries"] if entry["name"] == name]
    return query


class CountingQuery:
    """Counts rows by key, and has the largest text of each if it has `texts`; leaving it as a context stops it.

    Its small batches are of one task, or each shard has one if `is_shuffled`.
    """

    def __init__(
        self,
        fleet: Fleet,
        folder: Path,
        name: str,
        *,
        shards: int,
        keys: int = 100,
        texts: bool = True,
        is_shuffled: bool = False,
    ) -> None:
        self.fleet, self.name = fleet, name
        self._feed, self._every_key = Feed(folder / "in", ROWS), keys
        rows = shuffled(self._feed.stream(), "k") if is_shuffled else self._feed.stream()
        grouped = fleet.stateful(rows, name=name, shards=shards).groupBy("k")
        largest = [F.max("s").alias("s")] if texts else []
        self._frame, self._checkpoint = grouped.agg(F.count("*").alias("n"), *largest), folder / "ck"
        self.run = Run(self._frame, "update", self._checkpoint)
        self.batches = 0
        self._expected: Counter[int] = Counter()
        self._keys = range(0)

    def add(self, keys: int | None = None, text: str = "x") -> None:
        """Begin another batch, with a row of each key: none repeats, as such rows could be combined before the shuffle."""
        self._keys = range(keys or self._every_key)
        self._expected.update(self._keys)
        self._feed.add([(key, f"{text}{self.batches}") for key in self._keys])

    def check(self) -> None:
        """Wait for the newest batch, and compare what it emits."""
        emitted = Counter((row["k"], row["n"]) for row in self.run.take())
        assert emitted == Counter((key, self._expected[key]) for key in self._keys), "each key once"
        self.batches += 1

    def batch(self) -> None:
        """Run another batch, with a row of every key."""
        self.add()
        self.check()

    def again(self) -> None:
        """Start it again after it failed."""
        self.run.stop()
        self.run = Run(self._frame, "update", self._checkpoint)

    def shards(self) -> list[dict[str, Any]]:
        """Return the status of its shards."""
        shards: list[dict[str, Any]] = query_of(self.fleet, self.name)["shards"]
        return shards

    def failed_tasks(self) -> int:
        tracker = self._feed.spark.sparkContext.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(str(self.run.query.runId)))
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return sum(stage.numFailedTasks for stage in stages if stage is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run.stop()

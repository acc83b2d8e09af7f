"""A query that counts by key on a cluster of several nodes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from coordinator.service.calls import RayActors
from statefleet.cli import main
from statefleet.fleet import Fleet
from store_actors.actor.deploy import store_metrics
from tests.cluster.looking import address_of, query_of
from tests.integration.streams import Feed, Run

EVENTS = pa.schema([("v", pa.int64()), ("text", pa.string())])
SHARDS = 6
KEYS = 300


class CountingQuery:
    """Counts by key on the cluster, with the results that there should be."""

    def __init__(self, spark: SparkSession, fleet: Fleet, folder: Path, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.feed = Feed(folder / "in", EVENTS)
        marked = fleet.stateful(self.feed.stream(), name=name, shards=SHARDS)
        counts = marked.groupBy("v").agg(F.count("*").alias("n"), F.max("text").alias("text"))
        self.run = Run(counts, "update", folder / "ck")
        self.batches = 0

    def batch(self) -> None:
        """Run another batch, with a row of every key."""
        self.feed.add([(key, f"text {key} of {self.batches}") for key in range(KEYS)])
        self.run.wait()
        self.batches += 1
        emitted = Counter(row["n"] for row in self.run.batches[max(self.run.batches)])
        assert emitted == {self.batches: KEYS}

    def nodes(self) -> list[str]:
        return [address_of(shard["node_id"]) for shard in query_of(self.fleet, self.name)["shards"]]

    def run_until(self, is_there: Callable[[], bool], failure: str) -> float:
        """Run batches until something is so; return how long it took."""
        begun = time.monotonic()
        while not is_there():
            assert time.monotonic() - begun < 90, f"{failure}: shards are at {self.nodes()}"
            self.batch()
            time.sleep(0.3)
        return time.monotonic() - begun

    def deltas_read(self) -> int:
        return sum(metrics["deltas_loaded"] for metrics in store_metrics(RayActors(), self.fleet.status()).values())

    def statefleet(self, capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> Any:
        """Return what a command prints as JSON."""
        capsys.readouterr()
        assert main([command, self.fleet.uri, *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

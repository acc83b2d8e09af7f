"""A query whose state is larger than its store actor's memory limit."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from coordinator.model.errors import MemoryLimitError
from coordinator.model.maintenance import Maintenance
from statefleet import cli
from statefleet.fleet import Fleet, connect
from tests.clocks import until
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

ROWS = pa.schema([("k", pa.int64()), ("bit", pa.int64())])
#: Keys a batch, of 4 KiB of state each, and batches.
KEYS, BATCHES = 10_000, 14


@pytest.mark.replay
def test_a_state_larger_than_the_limit_gives_what_it_gives_without_one(
    spark: SparkSession, new_uri: NewUri, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = new_uri()
    with pytest.raises(MemoryLimitError, match="too small") as caught:
        connect(uri, memory_limit="64MiB")
    limit = int(caught.value.context["least"]) + (256 << 20)  # type: ignore[call-overload]
    often = Maintenance(interval_s=1, min_deltas_for_snapshot=4)
    fleet = connect(uri, memory_limit=limit, maintenance=often)
    feed = Feed(tmp_path / "in", ROWS)

    def start(on: Fleet) -> Run:
        grouped = on.stateful(feed.stream(), name=name, shards=4).groupBy("k")
        counted = grouped.agg(F.bitmap_count(F.bitmap_construct_agg("bit")).alias("bits"))
        return Run(counted, "update", tmp_path / "ck")

    run = start(fleet)
    try:
        for batch in range(BATCHES):
            feed.add([(key, 1) for key in range(batch * KEYS, (batch + 1) * KEYS)])
            assert {row["bits"] for row in run.take()} == {1}
        run.stop()
        # A new run goes on from what is in memory and in files.
        run = start(fleet)
        feed.add([(key, 2) for key in range(0, BATCHES * KEYS, 10)])
        emitted = run.take()
        assert len(emitted) == BATCHES * KEYS // 10
        assert {row["bits"] for row in emitted} == {2}
        (metrics,) = fleet.metrics().values()
        assert metrics["memory_limit"] == limit
        assert metrics["resident_bytes"] <= limit
        assert metrics["spilled_bytes"] > 50 << 20
        until(lambda: fleet.status()["store_actors"][0]["memory_limit"] == limit)
        assert cli.main(["status", uri]) == 0
        assert "spilled" in capsys.readouterr().out
    finally:
        run.stop()
        fleet.shutdown()
    # Another fleet loads it all below the same limit.
    fleet = connect(uri, memory_limit=limit, maintenance=often)
    run = start(fleet)
    try:
        feed.add([(key, 3) for key in range(0, BATCHES * KEYS, 5)])
        emitted = run.take()
        assert {row["bits"] for row in emitted if row["k"] % 10 == 0} == {3}
        assert {row["bits"] for row in emitted if row["k"] % 10 != 0} == {2}
    finally:
        run.stop()
        fleet.shutdown()

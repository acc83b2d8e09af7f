"""Snapshots, retention and cleaning beside a running query, and recovery of a whole fleet from what is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from coordinator.model.errors import InvalidRequestError
from coordinator.model.maintenance import Maintenance
from coordinator.storage.uris import open_object_store
from statefleet import cli
from statefleet.fleet import Fleet, connect
from tests.clocks import until
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run

VALUES = pa.schema([("v", pa.int64())])


def data_files(fleet: Fleet, name: str, suffix: str) -> list[str]:
    return [info.path for info in open_object_store(fleet.uri).list(f"{name}/0") if info.path.endswith(suffix)]


def versions(files: list[str], shard: int) -> list[int]:
    return [int(file.rsplit("/", 1)[1].partition("-")[0]) for file in files if f"/0/{shard}/" in file]


def deltas_since_snapshot(fleet: Fleet, name: str, shard: int) -> int:
    newest = max(versions(data_files(fleet, name, ".snapshot"), shard), default=0)
    return sum(version > newest for version in versions(data_files(fleet, name, ".delta"), shard))


@pytest.mark.replay
def test_a_query_keeps_few_files_and_a_new_fleet_reads_them(
    spark: SparkSession, new_uri: NewUri, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # A commit may take half the grace period, also on a busy machine.
    often = Maintenance(interval_s=0.5, min_deltas_for_snapshot=3, min_versions_to_retain=4, grace_s=8.0)
    uri = new_uri()
    fleet = connect(uri, maintenance=often)
    feed = Feed(tmp_path / "in", VALUES)

    def start(on: Fleet) -> Run:
        counts = on.stateful(feed.stream(), name=name, shards=2).groupBy("v").count()
        return Run(counts, "update", tmp_path / "ck")

    with start(fleet) as run:
        for batch in range(12):
            feed.add([(batch,), (batch % 3,)])
            run.wait()
        # A snapshot is due at three; on a busy machine it comes late.
        for shard in range(2):
            until(lambda shard=shard: deltas_since_snapshot(fleet, name, shard) < 3)  # type: ignore[misc]
        # 12 versions of 2 shards were committed; 4 versions and the deltas since a snapshot below them are left.
        until(lambda: len(data_files(fleet, name, ".delta")) <= 2 * (4 + 2 * 3 + 1))
        assert cli.main(["gc", uri, "--dry-run"]) == 0
        assert "would be" in capsys.readouterr().out
        assert sum(actor_metrics["maintenance_failures"] for actor_metrics in fleet.metrics().values()) == 0
    fleet.shutdown()
    again = connect(uri, maintenance=often)
    run = start(again)
    try:
        feed.add([(batch,) for batch in range(12)])
        emitted = {row["v"]: row["count"] for row in run.take()}
        assert emitted == {v: 2 + (4 if v < 3 else 0) for v in range(12)}
        (metrics,) = again.metrics().values()
        assert metrics["snapshots_loaded"] == 2
        assert metrics["deltas_loaded"] <= 2 * 2
    finally:
        run.stop()
        again.shutdown()


@pytest.mark.parametrize("bad", ["", "..", "a/b", "_probe"])
def test_a_name_that_is_no_folder_is_refused_on_every_path(fleet: Fleet, bad: str) -> None:
    columns = {"keys": pa.schema([("k", pa.string())]), "values": VALUES}
    uses: list[Callable[[], object]] = [
        lambda: fleet.state_store(bad, **columns),
        lambda: fleet.read_state_store(bad, **columns),
        lambda: fleet.clean(bad),
    ]
    for use in uses:
        with pytest.raises(InvalidRequestError, match="a state's name is a folder"):
            use()
    with pytest.raises(InvalidRequestError, match="a store's name is a folder"):
        fleet.state_store("fine", stores={bad: (columns["keys"], VALUES)})

"""A state is dropped while the fleet runs, and another query has its name at once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import statefleet as sf
from coordinator.storage.uris import open_object_store
from statefleet.cli import main
from tests.integration.streams import Feed, Run

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

EVENTS = pa.schema([("user", pa.string()), ("amount", pa.int64())])


def test_a_dropped_state_frees_its_name_for_a_query_of_another_kind(
    fleet: sf.Fleet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("a", 1), ("b", 2)])
    first = Run(fleet.stateful(feed.stream(), name=name, shards=2).groupBy("user").count(), "update", tmp_path / "ck")
    first.take_batches()
    with pytest.raises(sf.InvalidRequestError, match="a query that uses the state runs"):
        fleet.drop(name)
    attached = sf.attach(fleet.uri)
    with pytest.raises(sf.InvalidRequestError, match="a query that uses the state runs"):
        attached.drop(name)
    first.stop()
    assert attached.drop(name, dry_run=True, is_over=True).versions == 1
    with pytest.raises(sf.InvalidRequestError, match="offline only the object store is read"):
        sf.attach(fleet.uri, offline=True).drop(name)
    assert main(["drop", fleet.uri, name, "--dry-run", "--over"]) == 0
    assert "1 versions, 2 files" in capsys.readouterr().out
    assert main(["drop", fleet.uri, name, "--yes", "--over"]) == 0
    folders = {info.path.split("/")[1] for info in open_object_store(fleet.uri).list(name)}
    assert folders <= {"manifest", "checkpoints"}
    with pytest.raises(sf.InvalidRequestError, match="no such state"):
        fleet.state(name).scan().to_arrow()
    # Other keys, other aggregates, another checkpoint, in store actors that may have the former shards yet.
    grouped = fleet.stateful(feed.stream(), name=name, shards=2).groupBy("amount").agg(F.max("user").alias("most"))
    second = Run(grouped, "update", tmp_path / "ck2")
    second.take_batches()
    second.stop()
    rows = sorted(tuple(row.values()) for row in fleet.state(name).scan().to_arrow().to_pylist())
    assert rows == [(1, "a"), (2, "b")]
    assert attached.drop(name, is_over=True).state_name == name
    assert name not in fleet.states()

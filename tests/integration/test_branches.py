"""Branches: another query continues a version of a state, on the same input or on its own, and the first one is not affected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import statefleet as sf
from coordinator.storage.uris import open_object_store
from statefleet.cli import main
from tests.integration.streams import Feed, Run

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

EVENTS = pa.schema([("user", pa.string()), ("amount", pa.int64())])


def events(batch: int) -> list[tuple[Any, ...]]:
    return [(f"u{number % 20}", batch + 1) for number in range(50)]


def counted(fleet: sf.Fleet, feed: Feed, name: str, shards: int | None = None) -> DataFrame:
    grouped = fleet.stateful(feed.stream(), name=name, shards=shards).groupBy("user")
    return grouped.agg(F.count("*").alias("n"), F.sum("amount").alias("total"))


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())


@pytest.fixture
def parent(fleet: sf.Fleet, spark: SparkSession, tmp_path: Path, name: str) -> Any:
    """A query after four batches, and its input."""
    feed = Feed(tmp_path / "in", EVENTS)
    for batch in range(4):
        feed.add(events(batch))
    run = Run(counted(fleet, feed, name, 4), "update", tmp_path / "checkpoint")
    yield feed, run, run.take_batches()
    run.stop()


def test_another_query_goes_on_from_a_version_with_the_input_after_it(
    fleet: sf.Fleet, parent: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    feed, run, emitted = parent
    what_if, checkpoint = f"{name}-if", str(tmp_path / "what-if")
    branch = fleet.branch(name, what_if, version=2, checkpoint=checkpoint, from_checkpoint=str(tmp_path / "checkpoint"))
    assert (branch.parent, branch.version, branch.query_id, branch.shared_files) == (name, 2, "", 8)
    assert [file.path for file in open_object_store(fleet.uri).list(f"{what_if}/0")] == []
    then = rows_of(fleet.state(name).at(2).scan().to_arrow())
    assert rows_of(fleet.state(what_if).scan().to_arrow()) == then
    assert rows_of(sf.attach(fleet.uri, offline=True).state(what_if).scan().to_arrow()) == then
    # Other shards than the first query has: none of the rows is written again for that, either.
    branch_run = Run(counted(fleet, feed, what_if, 3), "update", Path(checkpoint))
    # Files that the first query's source took note of come in one batch, as at any restart.
    assert branch_run.take_batches() == {2: emitted[3]}
    feed.add(events(9))
    assert list(run.take_batches().values()) == list(branch_run.take_batches().values()) != []
    branch_run.stop()
    assert fleet.state(what_if).get({"user": "u7"}) == fleet.state(name).get({"user": "u7"})
    # It has an owner now, and asking again finds it.
    assert main(["branch", fleet.uri, name, "--as", what_if, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["query_id"] not in ("", branch.query_id)
    parent_checkpoint = str(tmp_path / "checkpoint")
    assert fleet.branch(name, what_if, version=2, checkpoint=checkpoint, from_checkpoint=parent_checkpoint).version == 2
    with pytest.raises(sf.InvalidRequestError, match="there is a state of that name"):
        fleet.branch(name, what_if, version=3)
    for target, source in ((parent_checkpoint, parent_checkpoint), (checkpoint, None)):
        with pytest.raises(sf.InvalidRequestError, match="the new checkpoint has something else"):
            fleet.branch(name, what_if, checkpoint=target, from_checkpoint=source)


@pytest.mark.usefixtures("parent")
def test_a_branch_takes_other_input(fleet: sf.Fleet, tmp_path: Path, name: str) -> None:
    before = fleet.state(name).get({"user": "u7"})
    what_if = f"{name}-if"
    fleet.branch(name, what_if, checkpoint=str(tmp_path / "what-if"))
    feed = Feed(tmp_path / "other", EVENTS)
    feed.add([("u7", 100), ("new", 1)])
    branch_run = Run(counted(fleet, feed, what_if), "update", tmp_path / "what-if")
    assert branch_run.take_batches() == {4: [("new", 1, 1), ("u7", before["n"] + 1, before["total"] + 100)]}
    branch_run.stop()
    assert fleet.state(name).get({"user": "u7"}) == before
    for version in (7, 0):
        with pytest.raises(sf.VersionNotFoundError):
            fleet.branch(name, f"{name}-never", version=version)
    assert f"{name}-never" not in sf.attach(fleet.uri).states()
    with pytest.raises(sf.InvalidRequestError, match="does not tell of this batch"):
        fleet.branch(
            name, what_if, checkpoint=str(tmp_path / "third"), from_checkpoint=str(tmp_path / "what-if" / "nowhere")
        )
    assert not (tmp_path / "third").exists()


def test_a_branch_of_a_programs_state_begins_with_what_each_partition_has(fleet: sf.Fleet, name: str) -> None:
    columns = {"keys": pa.schema([("user", pa.string())]), "values": pa.schema([("best", pa.int64())])}
    for partition in range(2):
        for best in range(2 + partition):
            with fleet.state_store(name, partition, shards=2, **columns) as store:
                store.put(user=f"u{partition}", best=best)
                store.commit()
    with pytest.raises(sf.InvalidRequestError, match="a branch begins with the newest version of each"):
        fleet.branch(name, f"{name}-if", version=1)
    fleet.branch(name, f"{name}-if")
    with fleet.state_store(f"{name}-if", 0, shards=2, **columns) as store:
        assert store.get("u0") == {"best": 1}
        store.put(user="u0", best=9)
        store.commit()
    rows = {state: rows_of(fleet.state(state).scan().to_arrow()) for state in (name, f"{name}-if")}
    assert rows == {name: [("u0", 1), ("u1", 2)], f"{name}-if": [("u0", 9), ("u1", 2)]}

"""Reads of a global group, of a processor's variables and timers, and of a state whose shards were split and merged.

Rows of each kind of operator are read in `test_view_columns.py`.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import statefleet as sf
from tests.integration.streams import Feed, Run

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

VISITS = pa.schema(
    [("user", pa.string()), ("page", pa.string()), ("ts", pa.timestamp("us", tz="UTC")), ("ms", pa.int64())]
)
NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)
ROWS = [("ann", "/", 0, 30), ("ann", "/a", 5, 70), ("bob", "/", 20, 10), (None, "/b", 1, 40), ("ann", "/", 60, 50)]


@pytest.fixture
def visits(spark: Any, tmp_path: Path) -> Feed:
    feed = Feed(tmp_path / "in", VISITS)
    feed.add([(user, page, NOON + dt.timedelta(seconds=second), ms) for user, page, second, ms in ROWS])
    return feed


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def run(frame: Any, mode: str = "update") -> None:
        runs.append(Run(frame, mode, tmp_path / f"checkpoint-{len(runs)}"))
        runs[-1].wait()

    yield run
    for run_of_query in runs:
        run_of_query.stop()


@pytest.mark.replay
def test_the_one_global_group(fleet: sf.Fleet, visits: Feed, name: str, running: Any) -> None:
    running(fleet.stateful(visits.stream(), name=f"{name}-all").groupBy().agg(F.sum("ms").alias("total")))
    whole = fleet.state(f"{name}-all")
    assert whole.get({}) == {"total": 200}
    total = whole.find({})
    assert total.rows == ({"total": 200},)
    assert total.shard is not None
    assert whole.at(total.version).scan(partition_id=True).to_arrow().to_pylist() == [
        {"total": 200, "partition_id": total.shard}
    ]
    assert fleet.state(f"{name}-all").keys == ()


class Pages(sf.StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "page string, ms bigint")
        self.all = handle.getListState("all", "page string")
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in sorted(rows, key=lambda row: row.ts):
            self.last.update((row.page, row.ms))
            self.all.appendValue((row.page,))
        self.handle.registerTimer(int(NOON.timestamp() * 1000) + 3_600_000)
        return []


def test_state_variables_and_timers_of_a_processor(fleet: sf.Fleet, visits: Feed, name: str, running: Any) -> None:
    users = fleet.stateful(visits.stream().withWatermark("ts", "1 hour"), name=name, shards=3).groupBy("user")
    running(users.transformWithState(Pages(), "user string", "update", "EventTime"))
    last = fleet.state(name, "last")
    assert last.parts == ("default", "value.last", "list.all")
    assert fleet.state(name, "value.last").get({"user": "bob"}) == last.get({"user": "bob"})
    row = last.get({"user": "ann"})
    assert row is not None
    assert (row["page"], row["ms"]) == ("/", 50)
    pages = fleet.state(name, "all")
    assert sorted(row["page"] for row in pages.get_all({"user": "ann"})) == ["/", "/", "/a"]
    assert pages.get_all({"user": "eve"}) == []
    with pytest.raises(sf.InvalidRequestError, match="several rows"):
        pages.get({"user": "ann"})
    (timer,) = fleet.state(name, "default").get_all({"user": "bob"})
    assert timer["timer"] == NOON + dt.timedelta(hours=1)
    stores = {row["stateStoreName"]: row for row in fleet.state_metadata(name).to_pylist()}
    assert {store: row["_numColsPrefixKey"] for store, row in stores.items()} == {
        "default": 1,
        "value.last": 0,
        "list.all": 1,
    }
    assert json.loads(stores["default"]["operatorProperties"])["stateVariables"] == [
        {"stateName": "last", "stateVariableType": "ValueState"},
        {"stateName": "all", "stateVariableType": "ListState"},
    ]


def test_a_state_is_read_across_its_rescales(fleet: sf.Fleet, visits: Feed, name: str, tmp_path: Path) -> None:
    for rescales, shards in enumerate((2, 5, 3)):
        if rescales:
            visits.add([("ann", "/", NOON, 1), (f"new{rescales}", "/", NOON, 1)])
        grouped = fleet.stateful(visits.stream(), name=name, shards=shards).groupBy("user")
        run = Run(grouped.agg(F.sum("ms").alias("total")), "update", tmp_path / "checkpoint")
        run.wait()
        run.stop()
        state = fleet.state(name)
        # Asks the coordinator: the shards that were there before do not tell that others have taken over.
        assert state.version == rescales + 1
        assert state.get({"user": "ann"}) == {"user": "ann", "total": 150 + rescales}
        assert state.get({"user": None}) == {"user": None, "total": 40}
        assert state.scan().to_arrow().num_rows == 3 + rescales
    for state in (fleet.state(name), sf.attach(fleet.uri, offline=True).state(name)):
        for version in (1, 2, 3):
            assert state.at(version).get({"user": "ann"}) == {"user": "ann", "total": 149 + version}
            assert state.at(version).scan().to_arrow().num_rows == 2 + version
        differing = sorted((row["user"], row["_change_type"]) for row in state.diff(2, 3).to_pylist())
        assert differing == [("ann", "delete"), ("ann", "insert"), ("new2", "insert")]
        with pytest.raises(sf.VersionNotFoundError, match="rescaled since"):
            state.changes(0).to_arrow()

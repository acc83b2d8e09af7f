"""The example that serves live state: a real Ray Serve, whose answers are checked at the versions that they are stamped with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import requests
from pyspark.sql import functions as F
from ray import serve
from starlette.requests import Request

import statefleet as sf
from statefleet.examples.serve_live_state import LiveStateService, app
from tests.clocks import until
from tests.conftest import NewUri
from tests.integration.streams import Feed, Run
from tests.processes import free_ports

pytestmark = pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")

EVENTS = pa.schema([("user", pa.string()), ("amount", pa.int64())])
USERS = 20


@pytest.fixture
def address(fleet: sf.Fleet) -> Iterator[str]:
    """Yield the address at which the fleet's states are served."""
    (port,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app({"uri": fleet.uri}), route_prefix="/live")
    yield f"http://127.0.0.1:{port}/live"
    serve.shutdown()


def test_answers_are_of_the_query_shard_and_version_that_they_tell(
    fleet: sf.Fleet, address: str, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    counts = fleet.stateful(feed.stream(), name=name, shards=3).groupBy("user").agg(F.sum("amount").alias("total"))
    run = Run(counts, "update", tmp_path / "checkpoint")

    def answer(user: str) -> tuple[int, dict[str, Any]]:
        got = requests.get(f"{address}/{name}", params={"user": user}, timeout=30)
        return got.status_code, got.json()

    bodies: list[dict[str, Any]] = []
    for batch in range(2):
        feed.add([(f"u{number}", 10**batch) for number in range(USERS)])
        run.wait()
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(answer, [f"u{number}" for number in range(USERS)]))
        assert {status for status, _ in answers} == {200}
        bodies += [body for _, body in answers]
    run.stop()
    state = fleet.state(name)
    assert {body["state"] for body in bodies} == {name}
    assert {body["query"] for body in bodies} == {
        next(q["query_id"] for q in fleet.status()["queries"] if q["name"] == name)
    }
    assert {body["version"] for body in bodies} == {1, 2}
    at = {version: state.at(version) for version in (1, 2)}
    shards = {
        (version, shard): {row["user"] for table in at[version].scan().of_shard(shard) for row in table.to_pylist()}
        for version in at
        for shard in range(3)
    }
    for body in bodies:
        (row,) = body["rows"]
        assert at[body["version"]].get({"user": row["user"]}) == row
        assert row["user"] in shards[body["version"], body["shard"]]
    status, missing = answer("nobody")
    assert (status, missing["version"], missing["shard"] in range(3)) == (404, 2, True)
    posted = requests.post(f"{address}/{name}", json={"user": "u1"}, timeout=30)
    assert posted.json()["rows"] == [{"user": "u1", "total": 11}]
    for path, status, text in (
        (f"{name}?name=u1", 400, "a value for each key column"),
        (f"{name}/left?user=u1", 400, "only one part"),
        ("nothing?user=u1", 404, "no such state"),
    ):
        got = requests.get(f"{address}/{path}", timeout=30)
        assert (got.status_code, text in got.json()["error"]) == (status, True), got.text
    assert requests.post(f"{address}/{name}", data="[1]", timeout=30).status_code == 400


@pytest.mark.replay
def test_a_fleet_that_is_gone_is_unavailable_and_comes_back(spark: Any, new_uri: NewUri) -> None:
    uri = new_uri()
    service = LiveStateService(uri, deadline_s=5.0)

    def answer(path: str, query: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        text = "&".join(f"{name}={value}" for name, value in query.items())
        scope = {"type": "http", "method": "GET", "path": path, "query_string": text.encode(), "headers": []}
        got = asyncio.run(service(Request(scope)))
        return got.status_code, json.loads(bytes(got.body))

    status, body = answer("/scores", {"user": "ann"})
    assert (status, "no fleet of this URI runs" in body["error"]) == (503, True)
    fleet = sf.connect(uri)
    columns = {"keys": pa.schema([("user", pa.string())]), "values": pa.schema([("best", pa.int64())])}
    with fleet.state_store("scores", **columns) as store:
        store.put(user="ann", best=7)
        store.commit()
    status, body = answer("/scores", {"user": "ann"})
    assert (status, body["rows"], body["version"]) == (200, [{"user": "ann", "best": 7}], 1)
    (pid,) = (actor["pid"] for actor in fleet.status()["store_actors"])
    fleet.shutdown()
    # Until then it answers.
    until(lambda: not Path(f"/proc/{pid}").exists())
    service._deadline_s = 1.0
    status, body = answer("/scores", {"user": "ann"})
    assert (status, "in time" in body["error"]) == (503, True)
    # Also for the look-up that is waiting still.
    fleet = sf.connect(uri)
    service._deadline_s = 60.0
    assert answer("/scores", {"user": "ann"})[0] == 200
    service._threads.shutdown(wait=True)
    fleet.shutdown()

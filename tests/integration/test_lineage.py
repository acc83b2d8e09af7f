"""Traces and lineage of real queries at a collector: of two states, restarted, failing, and of epochs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

import statefleet as sf
from coordinator.model.maintenance import Maintenance
from coordinator.service.actor import CoordinatorActor
from coordinator.service.calls import NAMESPACE
from coordinator.service.deploy import coordinator_name, options_on_head
from coordinator.storage.options import split_options
from tests.clocks import until
from tests.collector import Collector, attributes, below, collecting
from tests.conftest import NewUri
from tests.integration.followed import following
from tests.integration.streams import Feed, Run

ROWS = pa.schema([("k", pa.int64()), ("v", pa.int64())])


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced_fleet(spark: Any, new_uri: NewUri, collector: Collector) -> Iterator[sf.Fleet]:
    """A fleet whose coordinator has the variables of OpenTelemetry: Ray, whose environment it has otherwise, runs already."""
    uri = new_uri()
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    options: dict[str, Any] = {**options_on_head(coordinator_name(uri)), "runtime_env": {"env_vars": variables}}
    actor = ray.remote(CoordinatorActor).options(**options, max_concurrency=1000)
    handle = actor.remote(uri, split_options(uri, None)[0], Maintenance(), NAMESPACE)
    ray.get(handle.ping.remote())
    connected = sf.connect(uri)
    yield connected
    connected.shutdown()


@pytest.fixture(autouse=True)
def followed(collector: Collector) -> Iterator[None]:
    with following(collector):
        yield


def versions(event: dict[str, Any], fleet: sf.Fleet) -> dict[str, str]:
    """Return the versions of the states that an event has."""
    states = [output for output in event["outputs"] if output["namespace"] == fleet.uri]
    return {state["name"]: state["facets"]["version"]["datasetVersion"] for state in states}


def batches(collector: Collector, state: str) -> list[Any]:
    """Return the spans of a state's batches, in their order."""
    spans = [span for span in list(collector.spans) if span.name == f"batch {state}"]
    return sorted(spans, key=lambda span: span.start_time_unix_nano)


def test_a_query_of_two_states_is_traced_and_followed_through_a_restart(
    traced_fleet: sf.Fleet, collector: Collector, tmp_path: Path, name: str
) -> None:
    fleet, feed, second = traced_fleet, Feed(tmp_path / "in", ROWS), f"{name}-of-counts"

    def query() -> Any:
        distinct = fleet.stateful(feed.stream(), name=name, shards=3).dropDuplicates(["k", "v"])
        return fleet.stateful(distinct, name=second, shards=2).groupBy("k").count()

    def run(rows: list[tuple[int, int]]) -> str:
        feed.add(rows)
        with Run(query(), "update", tmp_path / "ck") as running:
            running.wait()
            return str(running.query.runId)

    run_ids = [run([(number % 5, number) for number in range(20)]), run([(1, 1), (1, 99)])]

    # The query has no name.
    until(lambda: len(collector.of("COMPLETE", second)) == 2, 30)
    assert [event["run"]["runId"] for event in collector.of("START", second)] == run_ids
    first, last = collector.of("COMPLETE", second)
    assert [event["run"]["runId"] for event in (first, last)] == run_ids
    version = fleet.state(second).version
    assert versions(last, fleet) == {name: str(version), second: str(version)}
    assert [(of["namespace"], of["name"]) for of in last["inputs"]] == [("file", str(tmp_path / "in"))]

    until(lambda: len(batches(collector, second)) == version, 30)
    spans = list(collector.spans)
    for state, shards in ((name, 3), (second, 2)):
        of_state = batches(collector, state)
        assert [attributes(span)["statefleet.version"] for span in of_state] == list(range(1, version + 1))
        assert [attributes(span)["statefleet.run"] for span in of_state] == [
            run_ids[0],
            *run_ids[1:] * (version - 1),
        ]
        for batch in of_state:
            of_batch = below(spans, batch)
            assert {attributes(span)["statefleet.shard"] for span in of_batch} == set(range(shards))
            for shard in of_batch:
                (commit,) = below(spans, shard)
                assert commit.trace_id == shard.trace_id == batch.trace_id
                assert batch.start_time_unix_nano <= shard.start_time_unix_nano <= shard.end_time_unix_nano
                assert shard.end_time_unix_nano <= batch.end_time_unix_nano
                assert commit.end_time_unix_nano == shard.end_time_unix_nano
                assert attributes(shard)["statefleet.store_actor"] in {
                    actor["actor_name"] for actor in fleet.status()["store_actors"]
                }
    rows = [attributes(span)["statefleet.rows_in"] for span in batches(collector, name)]
    assert (rows[0], sum(rows)) == (20, 22)
    # Both states of a batch are in one trace.
    assert [span.trace_id for span in batches(collector, name)] == [
        span.trace_id for span in batches(collector, second)
    ]


def test_a_query_that_fails_is_a_run_that_failed(
    traced_fleet: sf.Fleet, collector: Collector, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    feed.add([(1, 1)])
    counts = traced_fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").agg(F.max("v"))

    def fail(batch_id: int) -> None:
        raise ValueError("the sink is full")

    running = Run(counts, "update", tmp_path / "ck", before_batch=fail)
    with pytest.raises(StreamingQueryException):
        running.query.awaitTermination(60)
    failed = collector.wait_for_event("FAIL", name)
    assert failed["run"]["runId"] == str(running.query.runId)
    assert failed["run"]["facets"]["errorMessage"]["message"]


@pytest.mark.replay
def test_a_collector_that_is_gone_costs_no_batch(
    traced_fleet: sf.Fleet, collector: Collector, tmp_path: Path, name: str
) -> None:
    feed = Feed(tmp_path / "in", ROWS)
    collector.delay_s, collector.status, before = 5.0, 500, collector.requests
    try:
        with Run(
            traced_fleet.stateful(feed.stream(), name=name, shards=2).groupBy("k").count(), "update", tmp_path / "ck"
        ) as running:
            for number in range(4):
                feed.add([(number, 1)])
                running.wait()
        until(lambda: collector.requests > before, 30)
    finally:
        collector.delay_s, collector.status = 0.0, 200
    assert sorted(row.k for row in running.take()) == [0, 1, 2, 3]


@pytest.mark.replay
def test_epochs_are_traced_and_followed(
    traced_fleet: sf.Fleet, collector: Collector, tmp_path: Path, name: str, spark: Any
) -> None:
    rate = spark.readStream.format("rate").option("rowsPerSecond", 50).option("numPartitions", 1).load()
    counts = traced_fleet.stateful(rate.selectExpr("value % 5 k"), name=name, shards=2).groupBy("k").count()
    writer = counts.writeStream.outputMode("update").format("noop").queryName(f"query-{name}")
    query = writer.trigger(continuous="1 second").option("checkpointLocation", str(tmp_path / "ck")).start()
    try:
        running = collector.wait_for_event("RUNNING", f"query-{name}")
        until(lambda: len(batches(collector, name)) >= 2, 30)
    finally:
        query.stop()
    complete = collector.wait_for_event("COMPLETE", f"query-{name}")
    assert running["run"]["runId"] == complete["run"]["runId"] == str(query.runId)
    assert int(versions(complete, traced_fleet)[name]) > 1
    assert "Rate" in complete["inputs"][0]["name"]
    assert len(below(list(collector.spans), batches(collector, name)[0])) == 2

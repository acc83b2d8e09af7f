"""Metrics as Prometheus gets them from Ray, and the logs of a fleet's actors, beside what the fleet itself says."""

from __future__ import annotations

import json
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

import statefleet as sf
from coordinator.model.metric_table import FLEET, METRICS
from coordinator.model.names import fleet_id_of
from tests.integration.streams import Feed, Run

CANARY = "canary-92c1f0"
#: Labels by which a value is looked up.
Labels = dict[str, str]


def scraped() -> list[Any]:
    """Return what this machine's Ray exports of fleets, as Prometheus reads it."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [sample for family in families for sample in family.samples if sample.name.startswith("ray_statefleet_")]


def value(samples: list[Any], name: str, labels: Labels) -> list[float]:
    return [
        sample.value for sample in samples if sample.name == f"ray_{name}" and labels.items() <= sample.labels.items()
    ]


def until(condition: Callable[[list[Any]], bool]) -> list[Any]:
    """Return the samples once they satisfy `condition`: Ray collects them every ten seconds."""
    deadline = time.monotonic() + 60
    while not condition(samples := scraped()):
        assert time.monotonic() < deadline, sorted({sample.name for sample in samples})
        time.sleep(0.5)
    return samples


@pytest.fixture(scope="module")
def counted(spark: SparkSession, fleet: sf.Fleet, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the name of a state of some versions, with a row that came too late."""
    folder, name = tmp_path_factory.mktemp("metrics"), f"t-{uuid.uuid4().hex[:8]}"
    feed = Feed(folder / "in", pa.schema([("ts", pa.timestamp("us", "UTC")), ("user", pa.string())]))
    stream = fleet.stateful(feed.stream().withWatermark("ts", "1 second"), name=name, shards=2)
    feed.add([(1_700_000_000_000_000 + 1_000_000 * number, f"{CANARY}-{number % 7}") for number in range(40)])
    run = Run(stream.groupBy("ts", "user").count(), "update", folder / "ck")
    run.wait()
    feed.add([(1_700_000_000_000_000, f"{CANARY}-late"), (1_700_000_060_000_000, f"{CANARY}-0")])
    run.wait()
    run.stop()
    return name


def test_prometheus_gets_the_figures_that_the_fleet_shows(fleet: sf.Fleet, counted: str) -> None:
    (query,) = [entry for entry in fleet.status()["queries"] if entry["name"] == counted]
    labels_of_state = {FLEET: fleet_id_of(fleet.uri), "state": counted}
    commits = query["num_shards"] * query["version"]
    # A batch is counted after its commits. Ray leaves out a gauge whose last report is old, as on a busy machine; it keeps counters.
    samples = until(
        lambda scrape: (
            value(scrape, "statefleet_commits_total", labels_of_state) == [commits]
            and value(scrape, "statefleet_batches_total", labels_of_state) == [query["version"]]
            and value(scrape, "statefleet_batch_seconds_count", labels_of_state) == [query["version"]]
            and value(scrape, "statefleet_state_rows", labels_of_state) != []
        )
    )
    for gauge in ("rows", "bytes"):
        assert value(samples, f"statefleet_state_{gauge}", labels_of_state) == [query[f"state_{gauge}"]]
    assert value(samples, "statefleet_state_version", labels_of_state) == [query["version"]]
    assert value(samples, "statefleet_watermark_timestamp_seconds", labels_of_state) == [query["watermark_ms"] / 1000]
    assert value(samples, "statefleet_rows_late_total", labels_of_state) == [query["rows_late"]] == [1]
    leases = sum(value(samples, "statefleet_leases_total", labels_of_state))
    assert leases == sum(shard["operations"] for shard in query["shards"])
    # Counters of a store actor: each incarnation has its own series. Each process is asked at times of its own.
    of_fleet = {FLEET: labels_of_state[FLEET]}
    actors = fleet.metrics().values()
    for name, field in (("store_commits", "commits"), ("written_bytes", "bytes_written")):
        counts = {actor[field] for actor in actors}
        samples = until(lambda now: counts <= set(value(now, f"statefleet_{name}_total", of_fleet)))  # noqa: B023
    assert sum(value(samples, "statefleet_object_store_requests_total", {**of_fleet, "operation": "put_if_absent"})) > 0
    known_labels = {f"ray_{metric.name}": {FLEET, *metric.labels} for metric in METRICS}
    for sample in samples:
        labels = known_labels.get(sample.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count"))
        assert labels is not None, sample.name
        assert labels <= sample.labels.keys()


def test_logs_of_the_actors_are_json_lines_without_values(fleet: sf.Fleet, counted: str) -> None:
    session = Path(ray._private.worker._global_node.get_session_dir_path())  # type: ignore[attr-defined]
    status = fleet.status()
    lines: list[dict[str, Any]] = []
    for pid in (status["coordinator"]["pid"], *(actor["pid"] for actor in status["store_actors"] if actor["alive"])):
        (file,) = session.glob(f"logs/worker-*-{pid}.err")
        text = file.read_text()
        assert CANARY not in text
        lines += [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert {"coordinator", "store_actor"} <= {line["process"] for line in lines}
    for line in lines:
        assert {"time", "level", "logger", "message", "fleet", "pid"} <= line.keys()
        assert line["fleet"] == fleet_id_of(fleet.uri)

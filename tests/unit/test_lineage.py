"""Lineage: events of runs at a real collector, by OpenLineage's client; what fails there costs no query."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.runtime import extras
from spark_jobs.driver import lineage, lineage_events
from spark_jobs.driver.datasets import datasets_of, input_datasets, output_datasets
from spark_jobs.driver.driver_calls import DriverCalls
from spark_jobs.driver.lineage import is_configured, open_lineage
from spark_jobs.driver.lineage_events import QueryLineage
from tests.clocks import until
from tests.collector import Collector, collecting

FLEET = "file:///var/lib/statefleet"
FILES = {"description": "FileStreamSource[file:/data/clicks]"}
QUERY, RUN = str(uuid.uuid4()), str(uuid.uuid4())


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Collector]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    lineage._warn.cache_clear()
    with collecting() as collector:
        monkeypatch.setenv("OPENLINEAGE_URL", collector.url)
        yield collector
    # The client adds variables of its own.
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE__")]:
        del os.environ[name]


@pytest.fixture
def sent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueryLineage]:
    opened = open_lineage()
    assert opened is not None
    yield opened
    monkeypatch.setattr(lineage_events, "_END_S", 0.0)
    opened.close()


def begin(to: QueryLineage, state: str, run: str = RUN, query: str = QUERY, kafka: Any = ()) -> None:
    operator = {"uri": FLEET, "state": state}
    to.take({"asked": "begin", "query_id": query, "run_id": run, "operator": operator, "kafka": kafka})


def start(
    to: QueryLineage, name: str | None, *states: str, run: str = RUN, query: str = QUERY, kafka: Any = ()
) -> None:
    to.take({"asked": "query_started", "query_id": query, "run_id": run, "name": name})
    for state in states:
        begin(to, state, run, query, kafka)


def progress(to: QueryLineage, batch: int, run: str = RUN, source: Any = FILES, sink: str = "ForeachBatchSink") -> None:
    of = {"id": QUERY, "runId": run, "batchId": batch, "sources": [source], "sink": {"description": sink}}
    to.take({"asked": "query_progress", "progress": json.dumps(of)})


def end(to: QueryLineage, error: str | None = None, run: str = RUN) -> None:
    to.take({"asked": "query_ended", "run_id": run, "error": error})


def versions(event: dict[str, Any]) -> dict[str, str | None]:
    """Return the versions of the states that an event has."""
    return {
        output["name"]: output["facets"].get("version", {}).get("datasetVersion")
        for output in event["outputs"]
        if output["namespace"] == FLEET
    }


# -- events -------------------------------------------------------------------------------------------------------


def test_a_run_starts_runs_and_completes_with_its_inputs_outputs_and_versions(
    sent: QueryLineage, collector: Collector
) -> None:
    start(sent, "counts", "clicks")
    progress(sent, 0, sink="FileSink[s3a://bucket/out/counts]")
    progress(sent, 1)
    progress(sent, 2, sink="FileSink[s3a://bucket/out/counts]")
    end(sent)
    complete = collector.wait_for_event("COMPLETE", "counts")
    assert [event["eventType"] for event in collector.events] == ["START", "RUNNING", "COMPLETE"]
    started, running, _ = collector.events
    assert {event["run"]["runId"] for event in collector.events} == {RUN}
    assert {event["job"]["namespace"] for event in collector.events} == {FLEET}
    assert started["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    assert (versions(started), versions(running), versions(complete)) == (
        {"clicks": None},
        {"clicks": "1"},
        {"clicks": "3"},
    )
    for event in (running, complete):
        assert [(of["namespace"], of["name"]) for of in event["inputs"]] == [("file", "/data/clicks")]
        assert [(of["namespace"], of["name"]) for of in event["outputs"]] == [
            ("s3://bucket", "out/counts"),
            (FLEET, "clicks"),
        ]


def test_versions_are_sent_again_after_a_while(
    sent: QueryLineage, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(sent, "counts", "clicks")
    progress(sent, 0)
    progress(sent, 1)
    monkeypatch.setattr(lineage_events, "_BETWEEN_S", 0.0)
    progress(sent, 2)
    until(lambda: len(collector.of("RUNNING", "counts")) == 2, 30)
    assert [versions(event)["clicks"] for event in collector.of("RUNNING", "counts")] == ["1", "3"]


def test_a_query_of_two_states_is_one_run_that_has_both(sent: QueryLineage, collector: Collector) -> None:
    start(sent, None, "views", "clicks")
    progress(sent, 6)
    end(sent)
    # Without a name it is that of the state which Spark plans first.
    assert versions(collector.wait_for_event("COMPLETE", "views")) == {"views": "7", "clicks": "7"}
    assert len(collector.of("START", "views")) == 1


def test_a_run_that_fails_says_why_in_a_line(sent: QueryLineage, collector: Collector) -> None:
    start(sent, "counts", "clicks")
    end(sent, "org.apache.spark.SparkException: lost\n\tat row with values")
    failed = collector.wait_for_event("FAIL", "counts")
    assert failed["run"]["facets"]["errorMessage"]["message"] == "org.apache.spark.SparkException: lost"
    assert versions(failed) == {"clicks": None}


def test_a_restarted_query_is_another_run_of_the_same_job(sent: QueryLineage, collector: Collector) -> None:
    again = str(uuid.uuid4())
    start(sent, "counts", "clicks")
    progress(sent, 0)
    # Spark says of the first run that it ended when the second one has begun.
    start(sent, "counts", "clicks", run=again)
    end(sent)
    progress(sent, 1, run=again)
    end(sent, run=again)
    until(lambda: len(collector.of("COMPLETE", "counts")) == 2, 30)
    assert [(event["run"]["runId"], versions(event)["clicks"]) for event in collector.of("COMPLETE", "counts")] == [
        (RUN, "1"),
        (again, "2"),
    ]


def test_a_run_of_epochs_goes_by_its_query(sent: QueryLineage, collector: Collector) -> None:
    start(sent, "counts")
    begin(sent, "clicks", run="of-epochs")
    progress(sent, 0)
    assert collector.wait_for_event("RUNNING", "counts")["run"]["runId"] == RUN


def test_queries_without_states_are_not_sent(sent: QueryLineage, collector: Collector) -> None:
    start(sent, "other")
    progress(sent, 0)
    end(sent)
    begin(sent, "not-followed-from-its-start", query=str(uuid.uuid4()))
    progress(sent, 0, run="unknown")
    start(sent, "counts", "clicks")
    collector.wait_for_event("START", "counts")
    assert len(collector.events) == 1


def test_runs_that_the_program_leaves_are_aborted(
    sent: QueryLineage, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage_events, "_END_S", 0.1)
    start(sent, "counts", "clicks")
    progress(sent, 4)
    sent.close()
    assert [versions(event) for event in collector.of("ABORT", "counts")] == [{"clicks": "5"}]


def test_the_namespace_of_jobs_is_that_of_the_environment(
    sent: QueryLineage, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
    start(sent, "counts", "clicks")
    assert collector.wait_for_event("START", "counts")["job"]["namespace"] == "shop"


def test_a_message_that_is_not_understood_costs_a_line(sent: QueryLineage, caplog: pytest.LogCaptureFixture) -> None:
    sent.take({"asked": "query_progress", "progress": "{"})
    assert "an event of lineage could not be made" in caplog.text


# -- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("FileStreamSource[file:/data/clicks]", [("file", "/data/clicks")]),
        ("FileStreamSource[file:///data/clicks]", [("file", "/data/clicks")]),
        ("FileStreamSource[s3a://bucket/in/clicks]", [("s3://bucket", "in/clicks")]),
        ("FileStreamSource[hdfs://name:8020/in]", [("hdfs://name:8020", "/in")]),
        ("DeltaSource[abfss://c@a.dfs.core.windows.net/t]", [("abfss://c@a.dfs.core.windows.net", "t")]),
        ("FileSink[gs://bucket]", [("gs://bucket", "/")]),
        ("KafkaV2[Subscribe[clicks, views]]", [("kafka://b:9092", "clicks"), ("kafka://c:9092", "views")]),
        ("KafkaSource[Subscribe[views]]", [("kafka://c:9092", "views")]),
        ("ForeachBatchSink", []),
        ("org.apache.spark.sql.execution.streaming.ConsoleTable$@5bf7", []),
    ],
)
def test_paths_and_topics_have_the_names_of_the_conventions(description: str, expected: list[tuple[str, str]]) -> None:
    kafka = [
        {"subscribe": "other,clicks", "servers": "b:9092,b2:9092"},
        {"subscribe": "views", "servers": "c:9092"},
        {"subscribe": None, "servers": "d:9092"},
    ]
    assert datasets_of(description, kafka) == expected


def test_the_topic_of_a_sink_is_an_output_if_the_query_names_it() -> None:
    source = {"subscribe": "clicks", "topic": None, "servers": "a:9092"}
    kafka = "org.apache.spark.sql.kafka010.KafkaSourceProvider$KafkaTable@1f3a"
    assert output_datasets(kafka, [source]) == []
    assert output_datasets(kafka, [source, {"subscribe": None, "topic": None, "servers": "b:9092"}]) == []
    named = {"subscribe": None, "topic": "counts", "servers": "b:9092,c:9092"}
    assert output_datasets(kafka, [source, named]) == [("kafka://b:9092", "counts")]


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("RateStreamV2[rowsPerSecond=1]", "RateStreamV2[rowsPerSecond=1]"),
        ("MemoryStream[value#12,ts#13L]", "MemoryStream[value,ts]"),
        ("org.apache.iceberg.spark.source.SparkMicroBatchStream@1f3a", "org.apache.iceberg.spark.source.SparkMicroBatchStream"),
        ("KafkaV2[SubscribePattern[click.*]]", "KafkaV2[SubscribePattern[click.*]]"),
    ],
)  # fmt: skip
def test_other_sources_have_a_name_that_stays(description: str, name: str) -> None:
    assert input_datasets(description) == [("spark", name)]


# -- a collector in trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "fails"])
def test_a_collector_in_trouble_costs_a_line_and_no_time(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps({
        "type": "http", "url": collector.url, "timeout": 0.5, "retry": {"total": 1, "backoff_factor": 0.1, "status_forcelist": [500]},
    }))  # fmt: skip
    if trouble == "refuses":
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps({"type": "http", "url": address}))
    collector.delay_s, collector.status = (60 if trouble == "hangs" else 0), (500 if trouble == "fails" else 200)
    monkeypatch.setattr(lineage_events, "_BETWEEN_S", 0.0)
    opened = open_lineage()
    assert opened is not None
    begun = time.monotonic()
    start(opened, "counts", "clicks")
    for batch in range(2 * lineage_events._WAITING):
        progress(opened, batch)
    end(opened)
    assert time.monotonic() - begun < 5
    until(lambda: "an event of lineage could not be sent" in caplog.text, 60)
    assert "an event of lineage is dropped" in caplog.text
    # The program's end does not wait for it long.
    begun = time.monotonic()
    opened.close()
    assert time.monotonic() - begun < lineage_events._END_S + lineage_events._LAST_EVENTS_S + 2
    assert collector.events == []


# -- off ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "files", "is_on"),
    [
        ({}, [], False),
        ({"OPENLINEAGE_URL": "http://c:5000"}, [], True),
        ({"OPENLINEAGE__TRANSPORT__TYPE": "console"}, [], True),
        ({"OPENLINEAGE_NAMESPACE": "shop"}, [], False),
        ({"OPENLINEAGE_URL": "http://c:5000", "OPENLINEAGE_DISABLED": "true"}, [], False),
        ({}, ["openlineage.yml"], True),
        ({}, [".openlineage/openlineage.yml"], True),
        ({"OPENLINEAGE_CONFIG": "no-such-file"}, [], False),
    ],
)
def test_it_is_on_where_openlineages_client_is_configured(
    environment: dict[str, str], files: list[str], is_on: bool, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert is_configured(environment, tmp_path, tmp_path) is is_on


def test_without_a_configuration_nothing_is_imported_and_no_thread_runs(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from spark_jobs.driver.driver_calls import DriverCalls\n"
        "before = threading.active_count()\n"
        "assert not DriverCalls().follow()\n"
        "assert not [name for name in sys.modules if name.startswith('openlineage')]\n"
        "assert threading.active_count() == before\n"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)


def test_a_folder_that_was_deleted_configures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert not DriverCalls().follow()
    assert not caplog.records


def test_without_the_extra_one_line_says_what_to_install(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "spark_jobs.driver.lineage_events")
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    monkeypatch.setattr(extras, "_requirements", lambda extra: ["'openlineage-python'"])
    before, driver = threading.active_count(), DriverCalls()
    assert [driver.follow() for _ in range(3)] == [False] * 3
    (line,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith(
        "no lineage is sent: OpenLineage's client is not installed here; pip install 'openlineage-python'"
    )
    assert threading.active_count() == before


def test_a_configuration_that_is_wrong_is_logged(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps({"type": "no-such-transport"}))
    assert open_lineage() is None
    assert "no lineage is sent: OpenLineage's client does not start" in caplog.text

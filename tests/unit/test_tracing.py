"""Traces: spans of a batch, its shards and their commits at a real collector; what fails there costs no batch."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256

import pytest
from msgspec import structs

from coordinator.model.commits import CommitEntry
from coordinator.runtime import extras
from coordinator.service.tracing import is_configured, keep_tracing, open_traces
from coordinator.telemetry.batch_spans import MAX_SHARDS, TracedBatch, TracedShard, batch_span, trace_id
from coordinator.telemetry.slow_batches import PartitionTime
from tests.clocks import until
from tests.collector import Collector, attributes, below, collecting
from tests.unit.ledger_harness import ENTRY, task
from tests.unit.service_harness import METADATA, SHARDS, QueriedCoordinator

URI = "memory://"
COMMIT = structs.replace(
    ENTRY, run_id="run-1", version=42, rows_in=10, rows_late=1, file_bytes=100, apply_ms=30, write_ms=20, watermark_ms=7
)


def traced(
    shards: int = 2, *, planned_ms: int | None = 1_000, run: str = "run-1", state: str = "clicks"
) -> TracedBatch:
    """Return a batch whose shard `n` took 10 `n` ms more than the first."""
    return TracedBatch(state, "query", planned_ms, 2_000, [shard_of(number, run) for number in range(shards)])


def shard_of(number: int, run: str, asked_ms: int | None = 1_100) -> TracedShard:
    commit = structs.replace(COMMIT, partition_id=number, run_id=run, committed_at_ms=1_150 + 10 * number)
    return TracedShard(number, f"actor-{number}", [commit], PartitionTime(asked_ms, 1_110, 1_210 + 10 * number))


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield collector


def send(batches: Sequence[TracedBatch]) -> float:
    """Send batches, and return how many seconds that took."""
    export = open_traces(URI)
    assert export is not None
    begun = time.monotonic()
    for batch in batches:
        export.send(batch)
    return time.monotonic() - begun


# -- which spans --------------------------------------------------------------------------------------------------


def test_a_batch_has_its_shards_and_these_their_commits() -> None:
    span = batch_span(traced())
    assert (span.name, span.begin_ms, span.end_ms) == ("batch clicks", 1_000, 2_000)
    assert span.attributes["statefleet.version"] == 42
    assert span.attributes["statefleet.batch"] == 41
    assert (span.attributes["statefleet.rows_in"], span.attributes["statefleet.delta_bytes"]) == (20, 200)
    last, first = span.children
    assert [shard.attributes["statefleet.shard"] for shard in (first, last)] == [0, 1]
    assert (last.name, last.begin_ms, last.end_ms) == ("shard", 1_100, 1_220)
    assert last.attributes["statefleet.store_actor"] == "actor-1"
    (commit,) = last.children
    assert (commit.name, commit.begin_ms, commit.end_ms) == ("commit", 1_190, 1_220)
    assert commit.attributes["statefleet.file"] == "file"


def test_a_shard_with_a_lease_of_the_commit_before_begins_with_its_rows() -> None:
    batch = traced(1)._replace(shards=[shard_of(0, "run-1", asked_ms=None)])
    assert batch_span(batch).children[0].begin_ms == 1_150


def test_the_stores_of_a_shard_are_one_commit() -> None:
    shard = shard_of(0, "run-1")
    other = structs.replace(shard.commits[0], store_name="b", file_bytes=5, apply_ms=0, write_ms=0, rows_in=10)
    (span,) = batch_span(traced()._replace(shards=[shard._replace(commits=[*shard.commits, other])])).children
    assert span.attributes["statefleet.rows_in"] == 10
    assert [commit.attributes["statefleet.delta_bytes"] for commit in span.children] == [105]


def test_a_batch_that_an_earlier_run_may_have_planned_begins_with_its_first_shard() -> None:
    assert batch_span(traced(planned_ms=None)).begin_ms == 1_100


def test_clocks_that_disagree_make_no_negative_span() -> None:
    late = shard_of(0, "run-1", asked_ms=9_000)
    (span,) = batch_span(traced(1)._replace(shards=[late])).children
    assert (span.begin_ms, span.end_ms) == (9_000, 9_000)


def test_of_a_thousand_shards_the_slowest_have_spans() -> None:
    span = batch_span(traced(1_000))
    assert span.attributes["statefleet.shards"] == 1_000
    assert span.attributes["statefleet.rows_in"] == 10_000
    shards = {child.attributes["statefleet.shard"] for child in span.children}
    assert shards == set(range(1_000 - MAX_SHARDS, 1_000))


def test_states_of_a_query_share_a_trace_in_a_batch_and_runs_do_not() -> None:
    ids = [trace_id(traced(state=state)) for state in ("clicks", "views")]
    assert ids == [int.from_bytes(sha256(b"run-1/41").digest()[:16])] * 2
    assert trace_id(traced(run="run-2")) not in ids


async def test_a_coordinator_traces_each_batch_once_with_the_times_that_it_knows() -> None:
    coordinator = QueriedCoordinator(created=METADATA)
    next_batch = asyncio.create_task(coordinator._metrics.next_traced())
    await asyncio.sleep(0)

    async def run_batch(run: str, batch: int) -> list[CommitEntry]:
        commits = [await coordinator.commit(run=run, batch=batch, shard=shard) for shard in range(SHARDS)]
        for _ in range(2):  # as after a lost answer
            await coordinator.batch_result(task(run, batch), range(SHARDS))
        return commits

    commits = await run_batch("run-1", 0)
    batch = await next_batch
    assert (batch.state, batch.query_id, batch.planned_ms) == ("clicks", "query", None)
    assert [shard.shard for shard in batch.shards] == list(range(SHARDS))
    assert [shard.commits[0].attempt_id for shard in batch.shards] == [commit.attempt_id for commit in commits]
    for shard in batch.shards:
        assert shard.actor == "a"
        assert shard.time.asked_ms is not None
        assert shard.time.counted_ms is not None
        assert shard.time.asked_ms <= shard.time.counted_ms <= batch.ended_ms
    # The query is restarted, and runs its batch again.
    await run_batch("run-2", 0)
    again = await coordinator._metrics.next_traced()
    assert {shard.commits[0].run_id for shard in again.shards} == {"run-2"}
    assert coordinator._metrics._not_traced.empty()


async def test_batches_beyond_those_that_wait_are_not_traced() -> None:
    coordinator = QueriedCoordinator()
    queue = coordinator._metrics._not_traced = asyncio.Queue(3)
    for batch in range(5):
        await coordinator.commit(batch=batch)
        await coordinator.batch_result(structs.replace(task("run-1", batch), state_name="s"), range(1))
    assert queue.full()
    versions = [(await coordinator._metrics.next_traced()).shards[0].commits[0].version for _ in range(3)]
    assert versions == [1, 2, 3]


# -- to a collector -----------------------------------------------------------------------------------------------


def test_spans_arrive_with_their_parents_times_and_attributes(collector: Collector) -> None:
    send([traced()])
    spans = collector.wait_for_spans(5)
    (batch,) = [span for span in spans if not span.parent_span_id]
    assert batch.trace_id == trace_id(traced()).to_bytes(16)
    assert {span.trace_id for span in spans} == {batch.trace_id}
    assert (batch.start_time_unix_nano, batch.end_time_unix_nano) == (1_000_000_000, 2_000_000_000)
    assert attributes(batch)["statefleet.state"] == "clicks"
    shards = below(spans, batch)
    assert [shard.name for shard in shards] == ["shard", "shard"]
    for shard in shards:
        (commit,) = below(spans, shard)
        assert attributes(commit)["statefleet.shard"] == attributes(shard)["statefleet.shard"]
    (resource,) = collector.resources
    assert resource["service.name"] == "statefleet"
    assert resource["statefleet.uri"] == URI


def test_the_environment_names_the_service_and_samples(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "clicks-of-shop")
    send([traced()])
    collector.wait_for_spans(5)
    assert collector.resources[0]["service.name"] == "clicks-of-shop"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    send([traced()])
    time.sleep(0.3)
    assert len(collector.spans) == 5


def test_a_thousand_shards_are_bounded_and_quick(collector: Collector) -> None:
    took_s = send([traced(1_000)])
    spans = collector.wait_for_spans(1 + 2 * MAX_SHARDS)
    assert len(below(spans, next(span for span in spans if not span.parent_span_id))) == MAX_SHARDS
    assert took_s < 2


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "fails"])
def test_a_collector_in_trouble_costs_a_line_and_no_time(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    if trouble == "refuses":
        with socket.create_server(("127.0.0.1", 0)) as free:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    collector.delay_s, collector.status = (60 if trouble == "hangs" else 0), (500 if trouble == "fails" else 200)
    # More spans than the SDK keeps.
    assert send([traced(100) for _ in range(30)]) < 5
    until(lambda: any(record.name.endswith("trace_exporter") for record in caplog.records), 30)
    time.sleep(2)
    lines = [record for record in caplog.records if record.name.endswith("trace_exporter")]
    assert len(lines) == 1
    assert collector.spans == []


async def test_a_batch_that_cannot_be_traced_does_not_keep_the_next_from_it(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    export, queue = open_traces(URI), asyncio.Queue[TracedBatch]()
    assert export is not None
    queue.put_nowait(traced()._replace(shards=[]))
    queue.put_nowait(traced())
    tracing = asyncio.create_task(keep_tracing(export, queue.get))
    await asyncio.to_thread(collector.wait_for_spans, 5)
    assert "a batch could not be traced" in caplog.text
    tracing.cancel()


# -- off ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_it_is_on_where_opentelemetrys_variables_say_so(environment: dict[str, str], is_on: bool) -> None:
    assert is_configured(environment) is is_on


def test_without_a_collector_nothing_is_imported_and_no_thread_runs() -> None:
    program = (
        "import sys, threading\n"
        "import coordinator.service.coordinator\n"
        "from coordinator.service.tracing import open_traces\n"
        "assert open_traces('memory://') is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": "/usr/bin"})


def test_without_the_extra_a_line_says_what_to_install_and_batches_go_on(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "coordinator.service.trace_export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setattr(extras, "_requirements", lambda extra: ["'opentelemetry-sdk'"])
    before = threading.active_count()
    assert open_traces(URI) is None
    assert [record.message for record in caplog.records] == [
        "batches are not traced: OpenTelemetry's exporter is not installed here; pip install 'opentelemetry-sdk' "
        "(Statefleet's extra traces)" + caplog.records[0].message.partition("extra traces)")[2]
    ]
    assert threading.active_count() == before


def test_a_value_that_the_sdk_does_not_take_is_logged(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    assert open_traces(URI) is None
    assert "OpenTelemetry's exporter does not start" in caplog.text

"""The watermark of a batch: Spark's own, or that of its rows for an operator that closes early."""

from __future__ import annotations

from dataclasses import replace

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import ActorLocation, StateStoreId
from coordinator.model.leases import Lease
from coordinator.model.schema import EventTime, StateSchema
from coordinator.model.watermarks import Watermarks
from spark_jobs.worker.batch import BatchHeader, EventTimes, event_times
from tests.unit.aggregate_machine import SCHEMA

HEADER = BatchHeader("query", "run", 5, 0, late_ms=1_000, evict_ms=2_000, time_ms=9_000)


def grant(before: Watermarks) -> LeaseGrant:
    location = ActorLocation("a", "a-1", "node", "host", 1)
    return LeaseGrant(Lease(StateStoreId("memory:///s", 0, 0), "run", 1, location), 5, before)


def early(schema: StateSchema) -> StateSchema:
    return replace(schema, event_time=EventTime(("s/0",)))


def test_sparks_watermarks_are_used_unchanged() -> None:
    times = event_times(SCHEMA, grant(Watermarks(1_000)), HEADER, {0: 99_000})
    assert times == EventTimes(late_ms=1_000, seen_ms=2_000, after=Watermarks(2_000))


def test_an_operator_that_closes_early_uses_the_watermark_of_the_batch() -> None:
    times = event_times(early(SCHEMA), grant(Watermarks(1_500)), HEADER, {0: 99_000})
    assert (times.late_ms, times.seen_ms, times.after.input_ms) == (1_500, 1_500, 99_000)


def test_rows_that_were_closed_early_stay_closed_once_sparks_watermark_is_used() -> None:
    times = event_times(SCHEMA, grant(Watermarks(50_000, 50_000, {"s/0": 50_000})), HEADER, {})
    assert (times.late_ms, times.after.input_ms) == (50_000, 50_000)

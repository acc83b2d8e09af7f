"""The rows of a shard as Spark's shuffle gives them to the task of a user's function, and the watermarks of a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.state_ledger import LeaseGrant
from coordinator.model.identities import StateStoreId
from coordinator.model.leases import Lease
from coordinator.model.watermarks import Watermarks
from spark_jobs.worker.exchange import END_COLUMN, ROUTE_COLUMN, unpack
from store_actors.client.operator_task import BatchHeader, event_times
from tests.unit.ledger_harness import actor

HEADER = BatchHeader("query", "run", 3, 2, late_ms=5, evict_ms=7, time_ms=9)
SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string())])
SENT = pa.schema([*SCHEMA, (END_COLUMN, pa.binary()), (ROUTE_COLUMN, pa.int32())])
END = [{END_COLUMN: json.dumps(asdict(HEADER)).encode(), ROUTE_COLUMN: 0}]

Rows = list[dict[str, object]]


def rows_of(numbers: Sequence[int]) -> Rows:
    return [{"k": number, "s": None if number % 3 else f"{number}", ROUTE_COLUMN: 1} for number in numbers]


def sent(rows: Rows, *sizes: int) -> list[pa.RecordBatch]:
    """Return rows in batches of these sizes; the last batch has the others."""
    batches, begin = [], 0
    for size in (*sizes, len(rows)):
        batches.append(pa.RecordBatch.from_pylist(rows[begin : begin + size], SENT))
        begin += size
    return batches


@given(st.integers(0, 5), st.lists(st.integers(0, 3), max_size=4))
def test_a_shard_has_all_rows_before_the_end_however_they_are_cut(count: int, sizes: list[int]) -> None:
    rows = rows_of(range(count))
    received = unpack(sent(rows + END, *sizes), SCHEMA, "s")
    assert received.header == HEADER
    assert received.rows.rows_read == count
    assert received.rows.raw == pa.Table.from_pylist(rows, SCHEMA)


@pytest.mark.parametrize("rows", [[], rows_of([1]), rows_of([1, 2, 3])])
def test_rows_without_their_end_are_an_error(rows: Rows) -> None:
    with pytest.raises(EOFError, match=r"ended in the middle of a batch.*\[state=`s`\]"):
        unpack(sent(rows, 1), SCHEMA, "s")


def test_rows_after_the_end_are_an_error() -> None:
    with pytest.raises(EOFError, match="rows follow the end"):
        unpack(sent(END + rows_of([1]), 1), SCHEMA, "s")


def test_rows_that_arrow_could_not_count_together_stay_in_pieces() -> None:
    rows = rows_of([0, 3, 6, 9])
    size = pa.Table.from_pylist(rows[:2], SCHEMA).nbytes
    whole, cut = (unpack(sent(rows + END, 2), SCHEMA, "s", most).rows.raw for most in (1 << 30, size))
    assert whole.column("s").num_chunks == 1
    assert [len(chunk) for chunk in cut.column("s").chunks] == [2, 2]
    assert cut == whole


def test_timestamps_keep_their_instant_in_any_session_time_zone() -> None:
    schema = pa.schema([("k", pa.timestamp("us", tz="UTC"))])
    columns = [
        pa.array([1_700_000_000_000_000, None], pa.timestamp("us", tz="Europe/Berlin")),
        pa.array([None, END[0][END_COLUMN]]),
    ]
    raw = unpack([pa.record_batch(columns, names=["k", END_COLUMN])], schema, "s").rows.raw
    assert raw.column("k").cast(pa.int64()).to_pylist() == [1_700_000_000_000_000]
    assert raw.schema == schema


# -- watermarks ----------------------------------------------------------------------------------------------------


def grant_of(before: Watermarks) -> LeaseGrant:
    return LeaseGrant(Lease(StateStoreId("memory:///s", 0, 0), "run", 1, actor("a")), 5, before)


def test_sparks_watermarks_are_used_unchanged() -> None:
    times = event_times(grant_of(Watermarks(1_000)), late_ms=1_000, evict_ms=2_000)
    assert (times.late_ms, times.seen_ms, times.after) == (1_000, 2_000, Watermarks(2_000))


def test_watermarks_never_go_back() -> None:
    times = event_times(grant_of(Watermarks(50_000, 50_000)), late_ms=1_000, evict_ms=2_000)
    assert (times.late_ms, times.after.input_ms) == (50_000, 50_000)

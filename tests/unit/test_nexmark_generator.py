"""Nexmark's events: the same data in every run, and from any event on."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.nexmark.files import write_batch, write_events
from benchmarks.nexmark.generator import AUCTIONS, BIDS, PERSONS, Events, Nexmark
from coordinator.model.errors import InvalidRequestError

Column = npt.NDArray[np.int64]


def ints(batch: pa.RecordBatch, name: str) -> Column:
    """Return a column as integers; times in milliseconds."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        column = pc.cast(column, pa.timestamp("ms", tz="UTC"))
    return np.asarray(column.cast(pa.int64()))


@pytest.mark.parametrize(
    ("nexmark", "first", "digest"),
    [
        (Nexmark(seed=1), 0, "66c47a0f434c3679731457300a0cf3243c316329b9aa6f84d705c16516e6794b"),
        (Nexmark(seed=1), 10**6, "9a8e8293339415ef648a8ed41257193d1bf9d0a6e73a755f2188ebaa2f7e6261"),
        (
            Nexmark(seed=2, rate=7, out_of_order=100),
            10**6,
            "d4d07d2ec038d9e801a0b3e0389012c49eae7ff1638d6063c0f37794fae7c4ff",
        ),
    ],
)
def test_a_thousand_events_never_change(nexmark: Nexmark, first: int, digest: str) -> None:
    """Shares and skews of the data model were measured when these were written down. If one changes, every number measured with these
    data is of other data.
    """
    events = nexmark.events(first, first + 1000)
    assert [batch.schema for batch in events] == [PERSONS, AUCTIONS, BIDS]
    text = json.dumps([batch.to_pylist() for batch in events], default=lambda time: time.isoformat())
    assert hashlib.sha256(text.encode()).hexdigest() == digest


@pytest.mark.parametrize("rate", [1, 7, 999, 10_000, 10_000_000])
def test_the_rate_is_the_event_time(rate: int) -> None:
    start = 1_000_000_000_000_000
    events = Nexmark(rate=rate, start=start, extra=False).events(10_000, 11_000)
    for batch in events:
        numbers = ints(batch, "eventNumber")
        assert ints(batch, "dateTime").tolist() == [start // 1000 + int(n) * 1000 // rate for n in numbers]


streams = st.builds(
    Nexmark,
    seed=st.integers(0, 2**64),
    rate=st.integers(1, 10**7),
    out_of_order=st.sampled_from([1, 3, 5, 100, 299, 1000]),
    extra=st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(streams, st.integers(0, 10**9), st.lists(st.integers(0, 700), min_size=2, max_size=5))
def test_any_range_equals_the_same_range_of_a_longer_run(nexmark: Nexmark, first: int, cuts: list[int]) -> None:
    edges = [first, *sorted(first + cut for cut in cuts)]
    parts = [nexmark.events(a, b) for a, b in itertools.pairwise(edges)]
    whole = nexmark.events(edges[0], edges[-1])
    for name, batch in whole._asdict().items():
        assert pa.Table.from_batches([getattr(part, name) for part in parts]) == pa.table(batch)


@pytest.mark.parametrize("group", [3, 5, 100, 1000])
def test_out_of_order_events_are_shuffled_within_their_groups_and_otherwise_the_same(group: int) -> None:
    shuffled = Nexmark(out_of_order=group, extra=False)
    arrivals = shuffled.arrivals(0, 6000)
    assert np.array_equal(np.sort(arrivals.reshape(-1, group)), np.arange(6000).reshape(-1, group))
    assert not np.array_equal(arrivals, np.arange(6000))
    in_order = Nexmark(extra=False).events(0, 6000)
    out_of_order = shuffled.events(0, 6000)
    assert ints(out_of_order.bids, "eventNumber").tolist() != ints(in_order.bids, "eventNumber").tolist()
    for batch, same in zip(out_of_order, in_order, strict=True):
        assert pa.table(batch).sort_by("eventNumber") == pa.table(same)


@pytest.mark.parametrize(
    "wrong", [{"rate": 0}, {"start": 1}, *({"out_of_order": group} for group in (-1, 0, 2, 952, 953, 1906))], ids=str
)
def test_a_stream_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="Nexmark stream"):
        Nexmark(**wrong)


@pytest.mark.parametrize(("first", "last"), [(-1, 5), (5, 4), (0, 2**24 + 1), (2**42, 2**42 + 1)])
def test_a_range_that_cannot_be_is_refused(first: int, last: int) -> None:
    with pytest.raises(InvalidRequestError, match="range of events"):
        Nexmark().events(first, last)


def test_files_are_one_per_stream_and_batch_with_increasing_times_in_any_order_of_writing(tmp_path: Path) -> None:
    nexmark = Nexmark(out_of_order=100)
    for batch in (3, 4, 0, 1, 2):
        write_batch(tmp_path, batch, nexmark.events(250 * batch, min(250 * (batch + 1), 1010)))
    for name, whole in nexmark.events(0, 1010)._asdict().items():
        files = sorted((tmp_path / name).iterdir())
        assert [file.name for file in files] == [f"batch-{n:08d}.parquet" for n in range(5)]
        times = [file.stat().st_mtime_ns for file in files]
        assert times == sorted(set(times))
        assert pa.concat_tables([pq.read_table(file) for file in files]) == pa.table(whole)


def test_a_stream_without_events_in_a_batch_has_a_file_without_rows(tmp_path: Path) -> None:
    write_events(tmp_path, Nexmark(), 100, 20)
    rows = [[pq.read_metadata(f).num_rows for f in sorted((tmp_path / s).iterdir())] for s in Events._fields]
    assert rows == [[1, 0, 1, 0, 0], [3, 0, 3, 0, 0], [16, 20, 16, 20, 20]]


def test_batches_without_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="at least one event"):
        write_events(tmp_path, Nexmark(), 10, 0)

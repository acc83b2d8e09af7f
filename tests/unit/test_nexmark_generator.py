"""Nexmark's events: the shares and skews of its data model, and the same data in every run and from any event on."""

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

from benchmarks.nexmark.chance import below, draw
from benchmarks.nexmark.files import write_batch, write_events
from benchmarks.nexmark.generator import AUCTIONS, BIDS, PERSONS, Events, Nexmark
from coordinator.model.errors import InvalidRequestError

N = 200_000
#: Of the first 1,000 events of seed 1. If it changes, every number measured with these data is of other data.
GOLDEN = "66c47a0f434c3679731457300a0cf3243c316329b9aa6f84d705c16516e6794b"

Column = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def events() -> Events:
    return Nexmark(extra=False).events(0, N)


def ints(batch: pa.RecordBatch, name: str) -> Column:
    """Return a column as integers; times in milliseconds."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        column = pc.cast(column, pa.timestamp("ms", tz="UTC"))
    return np.asarray(column.cast(pa.int64()))


def share(condition: npt.NDArray[np.bool_], expected: float) -> None:
    """Check that the share of true values is the expected one within five standard deviations."""
    tolerance = 5 * np.sqrt(expected * (1 - expected) / len(condition))
    assert abs(condition.mean() - expected) < tolerance


def test_the_first_thousand_events_never_change() -> None:
    events = Nexmark(seed=1).events(0, 1000)
    text = json.dumps([batch.to_pylist() for batch in events], default=lambda time: time.isoformat())
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_the_others_bids(events: Events) -> None:
    assert [batch.num_rows for batch in events] == [N // 50, 3 * N // 50, 46 * N // 50]
    assert [batch.schema for batch in events] == [PERSONS, AUCTIONS, BIDS]
    numbers = np.concatenate([ints(batch, "eventNumber") for batch in events])
    assert np.array_equal(np.sort(numbers), np.arange(N))
    for batch, low, high in zip(events, (0, 1, 4), (1, 4, 50), strict=True):
        positions = ints(batch, "eventNumber") % 50
        assert ((positions >= low) & (positions < high)).all()


def test_ids_count_from_a_thousand(events: Events) -> None:
    assert np.array_equal(ints(events.persons, "id"), 1000 + np.arange(N // 50))
    assert np.array_equal(ints(events.auctions, "id"), 1000 + np.arange(3 * N // 50))


def test_half_of_the_bids_go_to_the_hot_auction_and_the_others_to_open_ones(events: Events) -> None:
    newest = 3 * (ints(events.bids, "eventNumber") // 50) + 2
    auction = ints(events.bids, "auction") - 1000
    hot = newest // 100 * 100
    # Of the other half, one of about 111 meets the hot auction by chance.
    share(auction == hot, 0.5 + 0.5 / 111)
    other_auctions, at = auction[auction != hot], newest[auction != hot]
    assert (other_auctions >= np.maximum(at - 100, 0)).all()
    assert (other_auctions <= at + 10).all()
    share(other_auctions > at, 10 / 111)
    share(other_auctions < at - 49, 51 / 111)


@pytest.mark.parametrize(("stream", "column", "offset"), [("bids", "bidder", 1), ("auctions", "seller", 0)])
def test_three_quarters_are_of_the_hot_person_and_the_others_of_active_ones(
    events: Events, stream: str, column: str, offset: int
) -> None:
    batch = getattr(events, stream)
    newest = ints(batch, "eventNumber") // 50
    person = ints(batch, column) - 1000
    hot = newest // 100 * 100 + offset
    settled = newest >= 1000
    share((person == hot)[settled], 0.75 + 0.25 / 1010)
    other_persons, at = person[person != hot], newest[person != hot]
    assert (other_persons >= np.maximum(at - 999, 0)).all()
    assert (other_persons <= at + 10).all()
    share((other_persons > at)[at >= 1000], 10 / 1010)


def test_prices_are_log_uniform_so_each_rank_has_a_third(events: Events) -> None:
    price = ints(events.bids, "price")
    assert price.min() >= 100
    assert price.max() <= 100_000_000
    share(price < 10_000, 1 / 3)
    share((price >= 10_000) & (price < 1_000_000), 1 / 3)
    share(price < 1_000, 1 / 6)
    share(price >= 10_000_000, 1 / 6)


def test_auctions_expire_within_twice_the_time_in_which_a_hundred_begin(events: Events) -> None:
    lasts = ints(events.auctions, "expires") - ints(events.auctions, "dateTime")
    assert lasts.min() >= 1
    assert lasts.max() <= 2 * 167
    assert abs(lasts.mean() - 167) < 3
    reserve, initial = ints(events.auctions, "reserve"), ints(events.auctions, "initialBid")
    assert (reserve - initial >= 100).all()


def test_categories_states_and_channels_are_even(events: Events) -> None:
    category = ints(events.auctions, "category")
    for number in range(10, 15):
        share(category == number, 1 / 5)
    assert set(np.unique(category)) == set(range(10, 15))
    states = np.asarray(events.persons.column("state"))
    assert set(states) == {"AZ", "CA", "ID", "OR", "WA", "WY"}
    share(np.isin(states, ["OR", "ID", "CA"]), 1 / 2)
    channels = np.asarray(events.bids.column("channel"))
    hot = np.isin(channels, ["Google", "Facebook", "Baidu", "Apple"])
    share(hot, 1 / 2)
    share(channels[hot] == "Apple", 1 / 4)
    assert len(np.unique(channels)) > 9_900
    for channel, url in zip(channels[:500], events.bids.column("url").to_pylist(), strict=False):
        assert url.endswith(f"&channel_id={channel.removeprefix('channel-')}" if "-" in channel else "query=1")


@pytest.mark.parametrize("rate", [1, 7, 999, 10_000, 10_000_000])
def test_the_rate_is_the_event_time(rate: int) -> None:
    start = 1_000_000_000_000_000
    events = Nexmark(rate=rate, start=start, extra=False).events(10_000, 11_000)
    for batch in events:
        numbers = ints(batch, "eventNumber")
        assert ints(batch, "dateTime").tolist() == [start // 1000 + int(n) * 1000 // rate for n in numbers]


def test_extra_pads_to_the_mean_sizes_of_the_data_model() -> None:
    # Nexmark counts 8 bytes a number and leaves out a bid's channel and URL.
    events = Nexmark().events(0, N // 4)
    for batch, mean in zip(events, (200, 500, 100), strict=True):
        counted = [f.name for f in batch.schema if f.name not in ("channel", "url", "eventNumber")]
        texts = [c for c in counted if batch.schema.field(c).type == pa.string()]
        letters = sum(pc.sum(pc.utf8_length(batch.column(c))).as_py() for c in texts)
        numbers = (len(counted) - len(texts)) * 8 * batch.num_rows
        assert abs((letters + numbers) / batch.num_rows - mean) < mean * 0.05
        lengths = np.asarray(pc.utf8_length(batch.column("extra")))
        assert lengths.min() < lengths.mean() * 0.85 < lengths.mean() * 1.15 < lengths.max()
    words = np.asarray(events.bids.column("extra"))
    assert len(np.unique(words)) > 0.95 * len(words)
    assert all(text.isascii() and text.isalpha() and text.islower() for text in words[:1000])
    without = Nexmark(extra=False).events(0, 1000)
    assert {text for batch in without for text in batch.column("extra").to_pylist()} == {""}


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


def test_another_seed_makes_other_events_of_the_same_kinds(events: Events) -> None:
    seed_2 = Nexmark(seed=2, extra=False).events(0, N)
    assert ints(seed_2.bids, "eventNumber").tolist() == ints(events.bids, "eventNumber").tolist()
    assert (ints(seed_2.bids, "price") != ints(events.bids, "price")).mean() > 0.99
    assert (
        np.asarray(seed_2.persons.column("emailAddress")) != np.asarray(events.persons.column("emailAddress"))
    ).all()


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


def test_draws_are_splitmix64_and_fields_are_independent() -> None:
    # By plain integers, from the definition of splitmix64.
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    for seed, field in ((0, 0), (1, 5), (2**63, 3)):
        start = mix((mix(seed) + field) % 2**64)
        expected = [mix((start + n * 0x9E3779B97F4A7C15) % 2**64) for n in range(10)]
        assert draw(seed, field, np.arange(10)).tolist() == expected
    first, second = (below(draw(1, field, np.arange(N)), 1000) for field in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02
    counts = np.bincount(first, minlength=1000)
    assert len(counts) == 1000
    assert ((counts - N / 1000) ** 2 / (N / 1000)).sum() < 1000 + 5 * np.sqrt(2000)


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

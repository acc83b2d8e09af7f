"""The hottest keys of a shard: a key with many rows is found, reported with at most its share, and dropped when it cools down."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store_actors.serving.hot_key_tracker import COUNTERS, SHARE_COLUMN, HotKeys, HotKeyTracker


def rows_of(keys: list[int | None]) -> pa.Table:
    return pa.table({"x": keys, "k": pa.array(keys, pa.int64()), "day": pa.array([None] * len(keys), pa.string())})


def shares_of(heat: HotKeys, most: int = COUNTERS) -> dict[int | None, float]:
    hottest = heat.hottest(most)
    return (
        {} if hottest is None else dict(zip(hottest["k"].to_pylist(), hottest[SHARE_COLUMN].to_pylist(), strict=True))
    )


@settings(deadline=None)
@given(batches=st.lists(st.lists(st.none() | st.integers(0, 200), max_size=60), max_size=30))
def test_a_key_is_reported_with_no_more_than_its_share(batches: list[list[int | None]]) -> None:
    """Batches small enough to be counted row by row, and few enough to be counted at once."""
    heat = HotKeys(["k", "day"])
    for keys in batches[:16]:
        heat.add(rows_of(keys))
    counts = Counter(key for keys in batches[:16] for key in keys)
    total, shares = counts.total(), shares_of(heat)
    left_out = total / (COUNTERS + 1)
    for key, count in counts.items():
        assert shares.get(key, 0.0) * total <= count + 1e-6
        assert shares.get(key, 0.0) * total >= count - left_out - 1e-6
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


@pytest.mark.parametrize("part", [1.0, 0.125])
def test_a_hot_key_among_many_is_found_and_replaced_by_the_next(part: float) -> None:
    random, heat = np.random.default_rng(7), HotKeys(["k"], part)
    for hot in (7, 8):
        for _ in range(int(200 / part)):
            keys = random.integers(1000, 1_000_000, 500)
            keys[random.random(500) < 0.3] = hot
            heat.add(pa.concat_tables([rows_of(list(keys[:100])), rows_of(list(keys[100:]))]))
        (first,) = shares_of(heat, 1).items()
        assert first[0] == hot
        assert 0.2 < first[1] < 0.4
    assert shares_of(heat).get(7, 0.0) < 0.05
    assert heat.hottest(3).column_names == ["k", SHARE_COLUMN]  # type: ignore[union-attr]


def test_keys_that_cannot_be_counted_or_are_too_long_cost_nothing() -> None:
    lists, no_columns, long = HotKeys(["k"]), HotKeys([]), HotKeys(["k"])
    for _ in range(40):
        lists.add(pa.table({"k": pa.array([[1], [2]])}))
        no_columns.add(rows_of([1]))
        long.add(pa.table({"k": ["x" * 100_000]}))
    assert [keys.hottest(1) for keys in (lists, no_columns, long)] == [None, None, None]


def test_a_process_counts_by_shard_and_survives_other_columns() -> None:
    heat = HotKeyTracker(threading.RLock())
    heat.written("s", 0, ["k"], [rows_of([1, 1, 2]), rows_of([1])])
    heat.looked_up("s", 0, pa.table({"k": [5]}))
    heat.written("s", 1, ["k"], [rows_of([9])])
    hottest = heat.hottest("s", 0, 1)
    assert hottest.written is not None
    assert hottest.looked_up is not None
    assert (hottest.written["k"].to_pylist(), hottest.looked_up["k"].to_pylist()) == ([1], [5])
    assert hottest.written[SHARE_COLUMN].to_pylist() == [0.75]
    heat.written("s", 0, ["k"], [pa.table({"k": ["a text"]})])
    assert heat.hottest("s", 0, 1).written is None
    heat.written("s", 0, ["k"], [pa.table({"k": ["a text"]})])
    assert heat.hottest("s", 0, 1).written["k"].to_pylist() == ["a text"]  # type: ignore[index]
    assert heat.hottest("s", 2, 1).written is None

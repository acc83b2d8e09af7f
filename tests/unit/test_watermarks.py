"""Watermarks of several sources, of chained operators, and of batches without data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.model.watermarks import Watermarks

SOURCES = ("a", "b")


def after(base: Watermarks, policy: str = "min", upstream: tuple[Watermarks, ...] = (), **newest_ms: int) -> Watermarks:
    return base.after(newest_ms, upstream, sources=SOURCES, policy=policy, is_fed_directly=not upstream)


def test_the_smallest_source_counts_and_one_without_data_is_at_zero() -> None:
    first = after(Watermarks(), a=10)
    assert (first.input_ms, dict(first.sources)) == (0, {"a": 10})
    assert after(first, b=15).input_ms == 10
    assert after(after(first, b=15), a=7, b=40).input_ms == 10


def test_by_policy_the_largest_counts() -> None:
    assert after(Watermarks(), "max", a=10).input_ms == 10
    assert after(after(Watermarks(), "max", a=10), "max", b=15).input_ms == 15


def test_a_fed_operator_takes_the_smallest_output_watermark_of_its_upstream_operators() -> None:
    upstream = (Watermarks(50, 30, {"a": 50}), Watermarks(40, 40, {"b": 40}))
    fed = after(Watermarks(), upstream=upstream)
    assert (fed.input_ms, dict(fed.sources)) == (30, {"a": 50, "b": 40})


def test_without_any_source_time_stands_still() -> None:
    none = Watermarks().after({}, (), sources=(), policy="min", is_fed_directly=False)
    assert none == Watermarks()


@given(
    st.lists(st.dictionaries(st.sampled_from(SOURCES), st.integers(-50, 100)), max_size=12),
    st.sampled_from(["min", "max"]),
)
def test_it_is_sparks_watermark_tracker(batches: list[dict[str, int]], policy: str) -> None:
    state, model, tracked = Watermarks(), 0, dict.fromkeys(SOURCES, 0)
    newest: dict[str, int] = {}
    for batch in batches:
        for name, watermark_ms in batch.items():
            newest[name] = max(watermark_ms, newest.get(name, watermark_ms))
            tracked[name] = newest[name]
        model = max(model, (min if policy == "min" else max)(tracked.values()))
        state = state.after(batch, (), sources=SOURCES, policy=policy, is_fed_directly=True)
        assert state.input_ms == model
        assert state.sources == newest

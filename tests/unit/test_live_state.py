"""States that a program reads from files: a look-up has query, shard and version; versions differ as all their rows do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.schema import Field
from statefleet.reads import version_diff
from statefleet.reads.state import LiveState
from store_actors.operators.top_schema import top_schema
from tests.unit.aggregation_fleet import SCHEMA
from tests.unit.offline_states import SHARDS, Rows, batches, of_operator, of_store


def shard_of(state: LiveState, key: str) -> int:
    """Return the shard on which a scan finds a key."""
    rows = state.scan(partition_id=True).to_arrow().to_pylist()
    (shard,) = [row["partition_id"] for row in rows if row["v"] == key]
    return shard


def test_a_key_of_an_operator_is_on_the_shard_of_its_hash_present_or_missing() -> None:
    state = of_operator(SCHEMA, [[(key, None) for key in "abcdefg"], [("a", None)]])
    for key in "abcdefg":
        look_up = state.find({"v": key})
        assert (look_up.state, look_up.query_id, look_up.shard, look_up.version) == (
            "s",
            "query",
            shard_of(state, key),
            2,
        )
        assert look_up.rows == ({"v": key, "n": 2 if key == "a" else 1},)
        before = state.at(1).find({"v": key}, columns=["n"])
        assert (before.shard, before.version, before.rows) == (look_up.shard, 1, ({"n": 1},))
    missing = state.find({"v": "missing"})
    assert (missing.rows, missing.version) == ((), 2)
    assert missing.shard in range(SHARDS)


def test_a_key_of_a_programs_store_is_on_the_shard_that_has_it() -> None:
    state = of_store([[("a", 1.0)]])
    assert [state.find({"k": key}).shard for key in "ab"] == [0, 0]
    assert state.find({"k": "a"}).rows == ({"k": "a", "n": 1},)


#: Two rows of each key; a third one pushes one of them out.
TOP = top_schema(
    [Field("v", "string")], [Field("x", "float64")], 2, [{"column": "x", "descending": True, "nulls_first": False}]
)


def counted(rows: pa.Table) -> Counter[str]:
    return Counter(str(row) for row in rows.to_pylist())


def check(state: LiveState, before: int, after: int) -> None:
    difference = state.diff(before, after)
    rows_before, rows_after = (counted(state.at(version).scan().to_arrow()) for version in (before, after))
    kinds = {
        kind: difference.filter(pa.compute.field("_change_type") == kind).drop_columns(["_change_type"])
        for kind in ("delete", "insert")
    }
    assert counted(kinds["delete"]) == rows_before - rows_after
    assert counted(kinds["insert"]) == rows_after - rows_before
    assert state.diff(before, after, limit=2).num_rows == min(2, difference.num_rows)


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(["counts", "top", "keyed"]), batches=batches, data=st.data(), keys=st.sampled_from([1, 2, 100])
)
def test_the_difference_equals_that_of_all_rows(kind: str, batches: list[Rows], data: Any, keys: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(version_diff, "_KEYS", keys)
        # All rows of a shard are compared where its commits have more rows than the shard.
        patched.setattr(version_diff, "_FEW_ROWS", data.draw(st.sampled_from([0, 100])))
        patched.setattr(version_diff, "_TIMES_ROWS", data.draw(st.sampled_from([0, 1])))
        state = of_store(batches) if kind == "keyed" else of_operator(TOP if kind == "top" else SCHEMA, batches)
        versions = st.integers(1, state.version)
        check(state, data.draw(versions), data.draw(versions))


def test_only_keys_that_commits_touched_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    state = of_operator(
        SCHEMA, [[(f"key-{number}", None) for number in range(300)], [("key-7", None), ("key-8", None)]]
    )
    looked_up: list[str] = []
    of_keys = version_diff.Side.of_keys

    def recorded(side: version_diff.Side, shards: Sequence[int], keys: pa.Table) -> pa.Table:
        looked_up.extend(keys["v"].to_pylist())
        return of_keys(side, shards, keys)

    monkeypatch.setattr(version_diff.Side, "of_keys", recorded)
    monkeypatch.setattr(version_diff.Side, "of_shards", lambda *_: pytest.fail("all rows are compared"))
    rows = sorted((row["v"], row["n"], row["_change_type"]) for row in state.diff(1, 2).to_pylist())
    assert rows == [("key-7", 1, "delete"), ("key-7", 2, "insert"), ("key-8", 1, "delete"), ("key-8", 2, "insert")]
    assert sorted(looked_up) == ["key-7", "key-7", "key-8", "key-8"]

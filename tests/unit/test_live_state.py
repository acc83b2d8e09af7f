"""A look-up returns the query, the shard and the version of its rows, also for a missing key."""

from __future__ import annotations

from statefleet.reads.state import LiveState
from tests.unit.aggregation_fleet import SCHEMA
from tests.unit.offline_states import SHARDS, of_operator, of_store


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

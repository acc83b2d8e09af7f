"""A look-up tells the query, the shard and the version of what it found, also of a key that is not there."""

from __future__ import annotations

from statefleet.reads.state import LiveState
from tests.unit.aggregation_fleet import SCHEMA
from tests.unit.offline_states import SHARDS, of_operator, of_store


def shard_of(state: LiveState, key: str) -> int:
    """The shard that a scan finds a key on."""
    rows = state.scan(partition_id=True).to_arrow().to_pylist()
    (shard,) = [row["partition_id"] for row in rows if row["v"] == key]
    return shard


def test_a_key_of_an_operator_is_on_the_shard_of_its_hash_whether_it_is_there_or_not() -> None:
    state = of_operator(SCHEMA, [[(key, None) for key in "abcdefg"], [("a", None)]])
    for key in "abcdefg":
        found = state.find({"v": key})
        assert (found.state, found.query_id, found.shard, found.version) == ("s", "query", shard_of(state, key), 2)
        assert found.rows == ({"v": key, "n": 2 if key == "a" else 1},)
        before = state.at(1).find({"v": key}, columns=["n"])
        assert (before.shard, before.version, before.rows) == (found.shard, 1, ({"n": 1},))
    nobody = state.find({"v": "nobody"})
    assert (nobody.rows, nobody.version) == ((), 2)
    assert nobody.shard in range(SHARDS)


def test_a_key_of_a_programs_store_is_on_the_shard_that_has_it() -> None:
    state = of_store([[("a", 1.0)]])
    assert [state.find({"k": key}).shard for key in "ab"] == [0, 0]
    assert state.find({"k": "a"}).rows == ({"k": "a", "n": 1},)

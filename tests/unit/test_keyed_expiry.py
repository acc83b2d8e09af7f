"""Rows of a keyed store that fall due, through aborts, rollbacks and reloads."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.errors import InvalidRequestError
from coordinator.model.schema import Field
from store_actors.engine import expiry_queue
from store_actors.keyed.shard import KeyedShard
from store_actors.keyed.update_handle import UpdateHandle

KEYS, VALUES = (Field("k", "int64"),), (Field("name", "string"), Field("at", "int64"))


def new() -> KeyedShard:
    return KeyedShard(KEYS, VALUES, "at")


def put(handle: UpdateHandle, **times: int | None) -> None:
    keys = [int(name[1:]) for name in times]
    handle.put(
        pa.table({"k": keys, "name": list(times), "at": pa.array(times.values(), pa.int64())}).cast(
            pa.schema([("k", pa.int64()), ("name", pa.string()), ("at", pa.int64())])
        )
    )


def due(handle: UpdateHandle, limit: int) -> dict[int, int]:
    rows = handle.due(limit)
    return dict(zip(rows["k"].to_pylist(), rows["at"].to_pylist(), strict=True))


def key(*numbers: int) -> pa.Table:
    return pa.table({"k": pa.array(numbers, pa.int64())})


def test_a_loaded_shard_knows_its_due_rows() -> None:
    first, second = new(), new()
    handle = first.begin(0)
    put(handle, k1=10, k2=20, k3=None)
    second.load(handle.prepare().delta, 1)
    handle.commit()
    handle = first.begin(1)
    put(handle, k1=40)
    handle.remove(key(2))
    second.load(handle.prepare().delta, 2)
    handle.commit()
    assert due(second.begin(2), 39) == {}
    assert second.rollback(2)
    assert due(second.begin(2), 40) == {1: 40}


def test_rows_that_are_written_often_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry_queue, "_SMALL", 16)
    shard = new()
    for version in range(200):
        handle = shard.begin(version)
        put(handle, k1=1000 + version, k2=None, k3=5000 - version)
        handle.commit()
    assert shard._table._due_queue.entries < 40
    assert due(shard.begin(200), 1199) == {1: 1199}


def test_only_a_store_with_a_due_column_can_be_asked() -> None:
    with pytest.raises(InvalidRequestError, match="without a column"):
        KeyedShard(KEYS, VALUES).begin(0).due(5)
    for column in ("name", "k", "x"):
        with pytest.raises(InvalidRequestError, match="int64"):
            KeyedShard(KEYS, VALUES, column)


@pytest.mark.parametrize("seed", range(20))
def test_due_rows_always_agree_with_the_times_in_the_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry_queue, "_SMALL", 8)
    chance, shard = random.Random(seed), new()
    for _ in range(60):
        handle = shard.begin(shard.version)
        for _ in range(chance.randrange(4)):
            keys = chance.sample(range(12), 4)
            if chance.random() < 0.3:
                handle.remove(key(*keys))
            else:
                put(handle, **{f"k{number}": chance.choice([None, chance.randrange(50)]) for number in keys})
            limit = chance.randrange(50)
            rows: list[Any] = handle.iterator().read_all().to_pylist()
            expected = {row["k"]: row["at"] for row in rows if row["at"] is not None and row["at"] <= limit}
            assert due(handle, limit) == expected
        if chance.random() < 0.3:
            handle.abort()
        else:
            handle.commit()
        if chance.random() < 0.2:
            assert shard.rollback(chance.choice(shard.retained()))

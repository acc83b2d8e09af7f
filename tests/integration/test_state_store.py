"""The public StateStore on real Ray and Spark: from plain Python, and open in each partition of a streaming query."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import statefleet as sf
from tests.integration.streams import Feed, Run

KEYS = pa.schema([("user", pa.string()), ("day", pa.int64())])
VALUES = pa.schema([("total", pa.int64())])


def rows(*items: tuple[str, int, int]) -> pa.RecordBatch:
    users, days, totals = zip(*items, strict=True)
    return pa.record_batch([users, days, totals], names=["user", "day", "total"])


def test_a_store_from_plain_python(fleet: sf.Fleet, name: str) -> None:
    with fleet.state_store(name, keys=KEYS, values=VALUES) as store:
        assert store.version == 0
        store.put(rows(("ann", 1, 10), ("ann", 2, 20), ("bob", 1, 30)))
        store.put(user="cid", day=3, total=40)
        assert store.get("ann", 2) == {"total": 20}
        assert store.get("nobody", 2) is None
        assert store.commit() == 1
        assert store.has_committed
        with pytest.raises(sf.OperationOutOfOrderError):
            store.put(user="x", day=1, total=1)
        with pytest.raises(sf.OperationOutOfOrderError):
            store.commit()
    with fleet.state_store(name, keys=KEYS, values=VALUES) as store:
        assert store.remove(("bob", 1)) == 1
        assert store.remove(pc.field("total") >= 40) == 1
        assert store.remove(lambda batch: pc.equal(batch.column("day"), 99)) == 0
        store.put(user="ann", day=1, total=11)
        changes = {(row["user"], row["day"]): row["__change"] for row in store.updates().to_pylist()}
        assert changes == {("ann", 1): "changed", ("bob", 1): "removed", ("cid", 3): "removed"}
        prefix = pa.record_batch({"user": ["ann"]})
        totals = [row["total"] for batch in store.prefix_scan(prefix) for row in batch.to_pylist()]
        assert sorted(totals) == [11, 20]
        ordered = [row["user"] for batch in store.range_scan("user", "a", "b") for row in batch.to_pylist()]
        assert ordered == ["ann", "ann"]
        with pytest.raises(sf.WriterBusyError):
            fleet.state_store(name, keys=KEYS, values=VALUES)
        reader = fleet.read_state_store(name, keys=KEYS, values=VALUES)
        assert store.commit() == 2
        assert reader.get("bob", 1) == {"total": 30}
        reader.release()
    with fleet.read_state_store(name, keys=KEYS, values=VALUES) as reader:
        assert reader.version == 2
        assert reader.metrics["num_keys"] == 2
        table = reader.multi_get(pa.record_batch({"user": ["ann", "bob"], "day": [1, 1]}))
        assert table.column("__found").to_pylist() == [True, False]
    with pytest.raises(sf.VersionNotFoundError):
        fleet.read_state_store(name, keys=KEYS, values=VALUES, version=3)
    with pytest.raises(sf.InvalidRequestError, match="either keys and values"):
        fleet.state_store(name)


EVENTS = pa.schema([("user", pa.string()), ("amount", pa.int64())])


def largest_so_far(store: sf.StateStore, batches: Iterator[pa.RecordBatch], mark: Path) -> Iterator[pa.RecordBatch]:
    """Emit every amount that is larger than all of its user's before; fail at 666 unless `mark` exists."""
    for batch in batches:
        best = pa.Table.from_batches([batch]).group_by("user").aggregate([("amount", "max")])
        previous = store.multi_get(best.select(["user"])).column("top")
        larger = pc.fill_null(pc.greater(best.column("amount_max"), previous), True)
        changed = best.filter(larger).rename_columns(["user", "top"])
        if pc.any(pc.equal(changed.column("top"), 666)).as_py() and not mark.exists():
            mark.touch()
            raise RuntimeError("fails once")
        store.put(changed)
        yield from changed.to_batches()


def test_a_function_with_an_open_store_in_each_partition(fleet: sf.Fleet, tmp_path: Path, name: str) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    mark = tmp_path / "failed-once"
    tops = sf.map_partitions_with_state_store(
        feed.stream(),
        partial(largest_so_far, mark=mark),
        "user STRING, top BIGINT",
        fleet=fleet,
        name=name,
        partition_by=["user"],
        keys=pa.schema([("user", pa.string())]),
        values=pa.schema([("top", pa.int64())]),
        shards=3,
    )
    with Run(tops, "append", tmp_path / "ck") as run:
        feed.add([("ann", 5), ("bob", 7), ("ann", 3), (None, 1)])
        assert sorted(map(tuple, run.take()), key=str) == [("ann", 5), ("bob", 7), (None, 1)]
        feed.add([("ann", 4), ("bob", 8)])
        assert [tuple(row) for row in run.take()] == [("bob", 8)]
        feed.add([("ann", 666)])
        assert [tuple(row) for row in run.take()] == [("ann", 666)]
        assert mark.exists(), "the first attempt failed after it had read the store"
        with pytest.raises(sf.InvalidRequestError, match="function's or a program's own"):
            fleet.rescale(name, 4)
    tops = {}
    for partition in range(3):
        keys, values = pa.schema([("user", pa.string())]), pa.schema([("top", pa.int64())])
        with fleet.read_state_store(name, partition, keys=keys, values=values) as reader:
            tops |= {row["user"]: row["top"] for batch in reader.iterator() for row in batch.to_pylist()}
    assert tops == {"ann": 666, "bob": 8, None: 1}
    with pytest.raises(sf.StateMismatchError, match="another query"):
        fleet.state_store(name, keys=pa.schema([("user", pa.string())]), values=VALUES, shards=3)

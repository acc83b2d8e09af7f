"""Order rules, checks and edge cases of the keyed store; `test_shard_machines.py` compares it with plain dicts."""

from __future__ import annotations

import gc
import math
import pickle
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from coordinator.model.errors import (
    InvalidRequestError,
    OperationOutOfOrderError,
    VersionNotFoundError,
    WriterBusyError,
)
from coordinator.model.schema import Field
from store_actors.engine import expiry_queue
from store_actors.keyed.read_handle import FOUND_COLUMN, HandleState, ReadHandle
from store_actors.keyed.shard import KeyedShard
from store_actors.keyed.update_handle import UpdateHandle

K = (Field("k", "int64"),)
V = (Field("v", "int64"),)


def rows(**columns: list[Any]) -> pa.Table:
    return pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})


def filled(versions: int) -> KeyedShard:
    """Return a store whose version n has the keys 0..n-1, each with the value n: each version writes all keys."""
    shard = KeyedShard(K, V)
    for version in range(versions):
        handle = shard.begin(version)
        handle.put(rows(k=list(range(version + 1)), v=[version + 1] * (version + 1)))
        handle.commit()
    return shard


def content(handle: ReadHandle | UpdateHandle) -> dict[Any, Any]:
    return {row["k"]: row["v"] for row in handle.iterator().read_all().to_pylist()}


# -- order rules ------------------------------------------------------------------------------------------------------

WRITES: list[Callable[[UpdateHandle], object]] = [
    lambda handle: handle.put(rows(k=[1], v=[1])),
    lambda handle: handle.remove(rows(k=[1])),
    lambda handle: handle.remove_where(pc.field("v") > 0),
]
READS: list[Callable[[Any], object]] = [
    lambda handle: handle.get((1,)),
    lambda handle: handle.multi_get(rows(k=[1])),
    lambda handle: handle.iterator(),
    lambda handle: handle.prefix_scan(rows(k=[1])),
    lambda handle: handle.range_scan("k"),
    lambda handle: handle.metrics(),
    len,
]


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("use", [*WRITES, *READS, lambda handle: handle.updates(), lambda handle: handle.prepare()])
def test_a_handle_cannot_be_used_after_commit_or_abort(end: str, use: Callable[[UpdateHandle], object]) -> None:
    handle = filled(1).begin(1)
    getattr(handle, end)()
    with pytest.raises(OperationOutOfOrderError, match="open a new handle"):
        use(handle)


def test_rows_that_fall_due_are_refused_of_a_store_without_such_a_column_which_stays_whole() -> None:
    shard = filled(1)
    with pytest.raises(InvalidRequestError, match="without a column by which its rows fall due"):
        shard.begin(1).due(7)
    assert not shard.is_broken
    for column in ("name", "k", "x"):
        with pytest.raises(InvalidRequestError, match="int64"):
            KeyedShard(K, (Field("name", "string"), *V), column)


def test_a_handle_ends_once_but_an_abort_may_come_twice() -> None:
    shard = filled(1)
    committed = shard.begin(1)
    committed.commit()
    assert committed.state is HandleState.COMMITTED
    for end in (committed.commit, committed.abort):
        with pytest.raises(OperationOutOfOrderError, match="on a handle that is committed"):
            end()
    aborted = shard.begin(2)
    aborted.abort()
    aborted.abort()  # a task's completion hook may come twice
    with pytest.raises(OperationOutOfOrderError):
        aborted.commit()
    assert shard.version == 2


@pytest.mark.parametrize("use", READS)
def test_a_released_reader_cannot_be_used(use: Callable[[ReadHandle], object]) -> None:
    reader = filled(1).read()
    reader.release()
    reader.release()
    assert reader.state is HandleState.RELEASED
    with pytest.raises(OperationOutOfOrderError, match="released"):
        use(reader)


@pytest.mark.parametrize("write", WRITES)
def test_a_prepared_change_is_read_but_not_added_to(write: Callable[[UpdateHandle], object]) -> None:
    shard = filled(1)
    handle = shard.begin(1)
    handle.put(rows(k=[7], v=[7]))
    change = handle.prepare()
    assert content(handle) == {0: 1, 7: 7}
    with pytest.raises(OperationOutOfOrderError, match="prepared"):
        write(handle)
    assert handle.commit() is change


def test_there_is_one_writer_and_readers_do_not_keep_it_out() -> None:
    shard = filled(2)
    reader = shard.read(1)
    writer = shard.begin(2)
    with pytest.raises(WriterBusyError) as error:
        shard.begin(2)
    assert error.value.context["writing"] == 3
    with pytest.raises(WriterBusyError):
        shard.load(pa.table({}), 9)
    writer.abort()
    shard.begin(2).abort()
    assert content(reader) == {0: 1}


@pytest.mark.parametrize("call", [KeyedShard.begin, KeyedShard.read, KeyedShard.snapshot, KeyedShard.rollback])
def test_versions_are_not_negative(call: Callable[[KeyedShard, int], object]) -> None:
    with pytest.raises(VersionNotFoundError, match="counted from 0"):
        call(filled(1), -1)


@pytest.mark.parametrize("call", [KeyedShard.begin, KeyedShard.read, KeyedShard.snapshot])
@pytest.mark.parametrize("version", [1, 6])
def test_a_version_that_memory_does_not_hold_is_named(call: Callable[[KeyedShard, int], object], version: int) -> None:
    with pytest.raises(VersionNotFoundError) as error:
        call(filled(5), version)
    assert error.value.context == {"version": version, "retained": [3, 4, 5]}
    copy = pickle.loads(pickle.dumps(error.value))
    assert str(copy) == str(error.value)


def test_an_older_version_is_not_written_before_a_rollback() -> None:
    with pytest.raises(InvalidRequestError, match="rollback"):
        filled(2).begin(1)


def test_a_reader_keeps_its_version_until_memory_drops_it() -> None:
    shard = filled(2)
    reader = shard.read(2)
    for version in (2, 3):
        shard.begin(version).commit()
        assert content(reader) == {0: 2, 1: 2}
    shard.begin(4).commit()
    with pytest.raises(VersionNotFoundError, match="no longer holds"):
        content(reader)


def test_a_handle_of_an_empty_version_is_not_false() -> None:
    shard = KeyedShard(K, V)
    assert shard.read()
    assert len(shard.read()) == 0


def test_an_empty_version_commits() -> None:
    shard = filled(1)
    change = shard.begin(1).commit(watermark_ms=5000)
    assert (change.version, change.delta.num_rows, change.watermark_ms, shard.watermark_ms) == (2, 0, 5000, 5000)
    assert shard.rollback(1)
    assert shard.watermark_ms == 0


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "column", "type_name"),
    [
        (rows(v=[1]), "k", "int64"),
        (rows(k=[1]), "v", "int64"),
        (pa.table({"k": pa.array(["1"]), "v": pa.array([1])}), "k", "int64"),
        (pa.table({"k": pa.array([1]), "v": pa.array([1], pa.int32())}), "v", "int64"),
        (pa.table([pa.array([1])] * 3, ["k", "v", "k"]), "k", "int64"),
    ],
)
def test_put_names_the_column_and_the_types(batch: pa.Table, column: str, type_name: str) -> None:
    shard = filled(1)
    handle = shard.begin(1)
    with pytest.raises(InvalidRequestError) as error:
        handle.put(batch)
    assert (error.value.context["column"], error.value.context["type"]) == (column, type_name)
    assert content(handle) == {0: 1}


@pytest.mark.parametrize("column", ["k", "v"])
def test_nulls_are_refused_only_where_the_field_says_so(column: str) -> None:
    batch = rows(k=[1, 2], v=[1, 2]).set_column(["k", "v"].index(column), column, pa.array([None, 2], pa.int64()))
    loose = KeyedShard(K, V).begin(0)
    loose.put(batch)
    assert len(loose) == 2
    strict = KeyedShard((Field("k", "int64", False),), (Field("v", "int64", False),)).begin(0)
    with pytest.raises(InvalidRequestError, match="nulls") as error:
        strict.put(batch)
    assert error.value.context["column"] == column
    assert len(strict) == 0


def test_a_missing_key_of_a_value_that_is_never_null_is_null_and_flagged() -> None:
    shard = KeyedShard(K, (Field("v", "int64", False),))
    rows_of_key = shard.read().multi_get(rows(k=[1]))
    assert rows_of_key.to_pylist() == [{"k": 1, "v": None, FOUND_COLUMN: False}]
    assert shard.read().multi_get(rows(k=[])).num_rows == 0


def test_rows_are_copied_out_of_the_callers_batch() -> None:
    values = np.array([1, 2])
    handle = KeyedShard(K, V).begin(0)
    handle.put(pa.table({"k": pa.array(values), "v": pa.array(values)}))
    values[:] = 0
    assert content(handle) == {1: 1, 2: 2}


@pytest.mark.parametrize(
    ("keys", "values"),
    [((), V), (K, K), ((Field("__k", "int64"),), V), ((Field("k", "list<int64>"),), V), (K * 32, ())],
)
def test_columns_that_no_store_can_have_are_refused(keys: tuple[Field, ...], values: tuple[Field, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        KeyedShard(keys, values)


def test_a_set_of_keys_needs_no_values() -> None:
    shard = KeyedShard(K, ())
    handle = shard.begin(0)
    handle.put(rows(k=[1, 1, None]))
    assert handle.get((None,)) == {}
    assert handle.get((2,)) is None
    assert handle.commit().rows_updated == 2


@pytest.mark.parametrize("key", [(), (1, 2), ("one",), (2**64,)])
def test_a_key_that_does_not_fit_is_refused(key: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        filled(1).read().get(key)


@pytest.mark.parametrize(
    "condition",
    [
        pc.field("w") > 1,
        pc.field("v") + pc.scalar("x") > 1,
        lambda batch: [True],
        lambda batch: np.arange(batch.num_rows),
    ],
)
def test_a_condition_that_cannot_be_evaluated_removes_nothing(condition: Any) -> None:
    handle = filled(3).begin(3)
    with pytest.raises(InvalidRequestError, match="nothing was removed"):
        handle.remove_where(condition)
    assert len(handle) == 3


# -- scans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [{}, {"n": [1]}, {"a": [1], "n": [1], "v": [1]}])
def test_a_prefix_is_made_of_leftmost_key_columns(columns: dict[str, list[int]]) -> None:
    shard = KeyedShard((Field("a", "int64"), Field("n", "int64")), V)
    with pytest.raises(InvalidRequestError, match="leftmost"):
        shard.read().prefix_scan(rows(**columns))


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ORDERED: list[tuple[str, list[Any]]] = [
    ("bool", [False, True]),
    ("int8", [-128, -1, 0, 127]),
    ("int64", [-(2**63), -1, 0, 1, 2**63 - 1]),
    ("float32", [-math.inf, -1.5, 0.0, 1.5, math.inf, math.nan]),
    ("float64", [-math.inf, -1e300, -0.0, 5e-324, 2.0, math.inf, math.nan]),
    ("decimal(38,2)", [Decimal("-1e30"), Decimal("-0.01"), Decimal(0), Decimal("1e30")]),
    ("timestamp", [NOON - timedelta(days=40000), NOON, NOON + timedelta(microseconds=1)]),
    ("timestamp_ntz", [NOON.replace(tzinfo=None), NOON.replace(tzinfo=None) + timedelta(1)]),
    ("date32", [date(1960, 1, 1), date(1970, 1, 1), date(2026, 1, 1)]),
    ("duration", [timedelta(-1), timedelta(0), timedelta(1)]),
    ("string", ["", "Z", "a", "aa", "b", "ä", "日本", "😀"]),
    ("binary", [b"", b"\x00", b"\x00\x01", b"\x7f", b"\x80", b"\xff"]),
]


@pytest.mark.parametrize(("type_name", "values"), ORDERED)
@pytest.mark.parametrize("pending", [False, True])
def test_range_scan_orders_every_type_of_key(type_name: str, values: list[Any], pending: bool) -> None:
    field = Field("k", type_name)
    shard = KeyedShard((field,), V)
    keys = pa.array([*values[::-1], None], field.arrow().type)
    handle = shard.begin(0)
    handle.put(pa.table({"k": keys, "v": pa.array(range(len(keys)))}))
    handle.commit()
    reader: Any = shard.read()
    writer = shard.begin(1)
    if pending:  # the reader finds its rows under what the writer overwrote
        writer.remove(pa.table({"k": keys.slice(0, 2)}))
        writer.put(pa.table({"k": keys.slice(2), "v": pa.array([-1] * (len(keys) - 2))}))

    def scan(start: Any, end: Any) -> list[int]:
        return reader.range_scan("k", start, end, batch_rows=2).read_all().column("v").to_pylist()

    count = len(values)
    ascending = list(range(count - 1, -1, -1))
    assert scan(None, None) == [*ascending, count]
    for begin in range(count):
        assert scan(values[begin], None) == [*ascending[begin:], count]
        for end in range(count):
            assert scan(values[begin], values[end]) == ascending[begin:end]


def test_ranges_are_scanned_by_key_columns_with_ends_of_their_type() -> None:
    reader = filled(1).read()
    with pytest.raises(InvalidRequestError, match="key column"):
        reader.range_scan("v")
    with pytest.raises(InvalidRequestError) as error:
        reader.range_scan("k", start="a")
    assert error.value.context["type"] == "int64"


def test_a_closed_scan_gives_nothing() -> None:
    scan = filled(3).read().iterator(batch_rows=1)
    assert next(scan).num_rows == 1
    scan.close()
    assert list(scan) == []


# -- what changed -----------------------------------------------------------------------------------------------------


def test_metrics_count_net_changes() -> None:
    shard = filled(4)
    handle = shard.begin(4)
    handle.put(rows(k=[0, 1, 2, 50, 51], v=[4, 9, 9, 9, 9]))  # 0 as it was
    handle.remove(rows(k=[2, 50, 77]))
    handle.remove(rows(k=[3]))
    handle.put(rows(k=[3], v=[4]))  # removed and put back as it was
    metrics, change = handle.metrics(), handle.commit()
    assert (metrics.num_keys, metrics.rows_updated, metrics.rows_removed) == (4, 4, 1)
    assert (change.rows_in, change.rows_updated, change.rows_removed) == (10, 4, 1)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_what_readers_hold_besides_the_table_counts_as_memory_of_the_store() -> None:
    def write(sign: int) -> None:
        handle = shard.begin(shard.version)
        keys, numbers = [str(number) for number in range(5000)], [sign * number for number in range(5000)]
        handle.put(pa.table({"key": keys, "n": numbers}))
        handle.commit()

    shard = KeyedShard((Field("key", "string"),), (Field("n", "int64"),))
    write(1)
    before = shard.nbytes
    reader = shard.read()
    scan = reader.iterator()
    write(-1)
    assert len(reader) == 5000
    with_scan = shard.nbytes - before
    del scan
    gc.collect()
    without_scan = shard.nbytes - before
    del reader
    gc.collect()
    undo = shard.nbytes - before
    row = 5000 * 8 * 3
    assert with_scan - without_scan >= row, "rows that a scan has yet to give out"
    assert without_scan - undo >= row, "rows as they were in the version that is read"


def test_entries_of_rows_that_are_written_often_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry_queue, "_SMALL", 16)
    shard = KeyedShard(K, V, "v")
    for version in range(200):
        handle = shard.begin(version)
        handle.put(rows(k=[1, 2, 3], v=[1000 + version, None, 5000 - version]))
        handle.commit()
    assert shard._table._due_queue.entries < 40
    assert shard.begin(200).due(1199).to_pylist() == [{"k": 1, "v": 1199}]

"""Serialisation of look-ups and their answers, and which of several readers asks the coordinator."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec import structs

from coordinator.model.errors import InvalidRequestError, StateStoreError
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import Field, StateSchema
from coordinator.runtime.runtime import Runtime
from statefleet.reads.projections import Projection
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.messages.key_queries import FoundRows, KeyQuery, KeyResult, KeyResults
from store_actors.messages.requests import ReadProjection, ReadRequest, is_json
from store_actors.operators.view_columns import ViewColumns
from tests.clocks import LaterClock, until

NESTED = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64()), ("amount", pa.decimal128(38, 10)), ("nested", NESTED)])


def rows(count: int, begin: int = 0) -> pa.Table:
    """Return rows; each third row has nulls in some columns."""
    values = [
        {"key": f"key-{number}", "n": number, "amount": None, "nested": None}
        if number % 3 == 0
        else {"key": None, "n": -number, "amount": 10**27 + number, "nested": {"a": None, "b": ["x", None]}}
        for number in range(begin, begin + count)
    ]
    return pa.Table.from_pylist(values, SCHEMA)


def request(partition: int) -> ReadRequest:
    return ReadRequest(StateStoreId("root", 0, partition), 3, "attempt", b'{"form": 1}')


def found_rows(table: pa.Table) -> FoundRows:
    return FoundRows(3, 4, np.arange(table.num_rows), table)


def by_ray(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def by_a_connection(value: Any) -> Any:
    return type(value).decoded(value.encoded())


Way = Callable[[Any], Any]


@pytest.fixture(params=[by_ray, by_a_connection])
def travelled(request: pytest.FixtureRequest) -> Way:
    """The way from sender to receiver: returns a look-up or its results as they arrive."""
    way: Way = request.param
    return way


@pytest.mark.parametrize("counts", [(1,), (3, 0, 2), (0,), (0, 0), (5000, 1)], ids=str)
def test_keys_arrive_as_they_were_sent(travelled: Way, counts: tuple[int, ...]) -> None:
    keys = [rows(count, 10 * partition) for partition, count in enumerate(counts)]
    arrived = travelled(KeyQuery([request(partition) for partition in range(len(keys))], keys))
    assert [received for received, _ in arrived] == [request(partition) for partition in range(len(keys))]
    assert [received_keys for _, received_keys in arrived] == keys
    assert all(received_keys.schema == SCHEMA for _, received_keys in arrived)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_results_of_every_kind_arrive_in_their_order(travelled: Way, count: int) -> None:
    error = InvalidRequestError("no such column", column="m")
    results: list[KeyResult] = [None, found_rows(rows(count)), error, found_rows(rows(2, 7)), None]
    arrived = travelled(KeyResults(results)).each
    assert [type(result) for result in arrived] == [type(result) for result in results]
    for index in (1, 3):
        sent, received = results[index], arrived[index]
        assert isinstance(sent, FoundRows)
        assert (received.version, received.newest, received.places.tolist()) == (3, 4, sent.places.tolist())
        assert received.rows == sent.rows
    assert str(arrived[2]) == str(error)
    (not_asked, _) = travelled(KeyResults([None, error])).each
    assert not_asked is None


def test_rows_of_other_columns_arrive_with_their_own(travelled: Way) -> None:
    """A keyed store may have been changed between two of its partitions."""
    results = [found_rows(rows(1)), found_rows(rows(1).append_column("m", pa.array([1])))]
    arrived = travelled(KeyResults(results)).each
    assert [result.rows for result in arrived] == [result.rows for result in results]


def test_few_rows_travel_small_and_many_are_not_copied(travelled: Way) -> None:
    large = rows(20_000)
    small = KeyQuery([request(0), request(1)], [large.slice(3, 1), large.slice(17_000, 2)])
    assert small.is_small
    assert len(small.encoded()) < 4096
    assert [received_keys for _, received_keys in travelled(small)] == [large.slice(3, 1), large.slice(17_000, 2)]
    big = KeyQuery([request(0)], [large])
    assert not big.is_small
    buffers: list[Any] = []
    pickle.dumps(big, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) >= large.nbytes


@pytest.mark.parametrize("count", [1, 40, 5000])
@pytest.mark.parametrize("on", [1, 4])
def test_each_shard_is_asked_for_its_keys(count: int, on: int) -> None:
    """Few and many keys, on one shard and on several shards, of which one was never written."""
    schema = StateSchema((Field("k", "int64"),), (), (), None, None, "update")
    form = Projection(ReadProjection(schema), "", ViewColumns.of(schema), ("k",), True)
    view: Any = SimpleNamespace(written=[0, 1, 3], versions=[1, 1, 0, 1])
    leaves = pa.record_batch({"k": np.arange(count)})
    shards = np.random.default_rng(count).integers(0, on, count)
    keys_by_shard = form.by_shard(view, leaves, shards)
    assert sorted(keys_by_shard) == sorted({*shards.tolist()} - {2})
    for shard, (indices, shard_keys) in keys_by_shard.items():
        assert indices.tolist() == np.flatnonzero(shards == shard).tolist()
        assert shard_keys.column("k").to_pylist() == indices.tolist()


class GatedViews:
    """A source of views that counts requests; answers wait for `resume`."""

    def __init__(self) -> None:
        self.requests = 0
        self.resume = Event()
        self.resume.set()

    def view(self, name: str, version: int | None, known: object) -> Any:
        self.requests += 1
        number = self.requests
        assert self.resume.wait(30)
        return SimpleNamespace(id=number)


def test_one_of_many_readers_asks_for_the_view_and_no_reader_waits_for_it_long() -> None:
    views, clock = GatedViews(), LaterClock()
    runtime = Runtime(clock=clock)
    reads = ShardReads(views, "clicks", runtime, runtime.threads.pool(1, "scan"))  # type: ignore[arg-type]
    newest = ReadVersion()
    with ThreadPoolExecutor(8) as threads:
        assert reads.cached_view(newest).id == 1  # type: ignore[comparison-overlap]
        clock.later_s += 1.2
        views.resume.clear()
        first = threads.submit(reads.cached_view, newest)
        until(lambda: views.requests == 2)
        # The other readers use the cached view, ...
        assert [threads.submit(reads.cached_view, newest).result(30).id for _ in range(5)] == [1] * 5  # type: ignore[comparison-overlap]
        assert views.requests == 2
        # ... but not when an answer takes too long.
        clock.later_s += 1.0
        late = threads.submit(reads.cached_view, newest)
        until(lambda: views.requests == 3)
        views.resume.set()
        assert [first.result(30).id, late.result(30).id] == [2, 3]  # type: ignore[comparison-overlap]
    assert reads.cached_view(newest).id == 3  # type: ignore[comparison-overlap]
    assert views.requests == 3


def test_bytes_that_are_no_look_up_are_refused_and_nothing_of_them_is_run() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("a pickle was loaded",)

    for content in (pickle.dumps(Bomb()), b"", b"\x05\0\0\0{}", b"\xff\xff\xff\xff"):
        for kind in (KeyQuery, KeyResults):
            with pytest.raises((ValueError, KeyError, struct.error)):
                kind.decoded(content)
    pickled = structs.replace(request(0), projection=pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="form is JSON"):
        KeyQuery.decoded(KeyQuery([pickled], [rows(1)]).encoded())


def test_an_unknown_error_arrives_as_a_state_store_error() -> None:
    class ElseError(StateStoreError):
        """An error that callers do not know."""

    known_error = InvalidRequestError("no such column", column="x", count=3, where=None)
    arrived = by_a_connection(KeyResults([known_error, ElseError("odd"), None])).each
    assert [type(error) for error in arrived] == [InvalidRequestError, StateStoreError, type(None)]
    assert str(arrived[0]) == str(known_error)


def test_projections_are_data_except_for_filters() -> None:
    schema = StateSchema((Field("k", "int64"),), (), (), None, None, "update")
    for form in (
        ReadProjection(schema, "left", ("a", "b")),
        ReadProjection(None),
        ReadProjection(schema, columns=()),
    ):
        assert is_json(form.encoded())
        assert ReadProjection.decoded(form.encoded()) == form
    filtering = ReadProjection(schema, filter=pc.field("k") > 1)
    assert not is_json(filtering.encoded())
    assert str(ReadProjection.decoded(filtering.encoded()).filter) == str(filtering.filter)

"""How look-ups and their answers travel, and who of several readers asks the coordinator."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from coordinator.model.errors import InvalidRequestError, StateStoreError
from coordinator.model.identities import StateStoreId
from coordinator.model.schema import Field, StateSchema
from coordinator.runtime.runtime import Runtime
from statefleet.reads.projections import Projection
from statefleet.reads.shard_reads import ReadVersion, ShardReads
from store_actors.key_queries import FoundRows, KeyQuery, KeyResult, KeyResults
from store_actors.messages import ReadProjection, ReadRequest, is_json
from store_actors.operators.view_columns import ViewColumns
from tests.clocks import LaterClock, until

NESTED = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64()), ("amount", pa.decimal128(38, 10)), ("nested", NESTED)])


def rows(count: int, begin: int = 0) -> pa.Table:
    """Of each third row some columns are null."""
    made = [
        {"key": f"key-{place}", "n": place, "amount": None, "nested": None}
        if place % 3 == 0
        else {"key": None, "n": -place, "amount": 10**27 + place, "nested": {"a": None, "b": ["x", None]}}
        for place in range(begin, begin + count)
    ]
    return pa.Table.from_pylist(made, SCHEMA)


def request(partition: int) -> ReadRequest:
    return ReadRequest(StateStoreId("root", 0, partition), 3, "attempt", b'{"form": 1}')


def found(table: pa.Table) -> FoundRows:
    return FoundRows(3, 4, np.arange(table.num_rows), table)


def by_ray(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def by_a_connection(value: Any) -> Any:
    return type(value).decoded(value.encoded())


Way = Callable[[Any], Any]


@pytest.fixture(params=[by_ray, by_a_connection])
def travelled(request: pytest.FixtureRequest) -> Way:
    """What arrives of a look-up, or of its outcomes."""
    way: Way = request.param
    return way


@pytest.mark.parametrize("counts", [(1,), (3, 0, 2), (0,), (0, 0), (5000, 1)], ids=str)
def test_keys_arrive_as_they_were_sent(travelled: Way, counts: tuple[int, ...]) -> None:
    keys = [rows(count, 10 * place) for place, count in enumerate(counts)]
    arrived = travelled(KeyQuery([request(place) for place in range(len(keys))], keys))
    assert [asked for asked, _ in arrived] == [request(place) for place in range(len(keys))]
    assert [own for _, own in arrived] == keys
    assert all(own.schema == SCHEMA for _, own in arrived)


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_outcomes_arrive_in_their_order_whatever_became_of_each(travelled: Way, count: int) -> None:
    error = InvalidRequestError("no such column", column="m")
    each: list[KeyResult] = [None, found(rows(count)), error, found(rows(2, 7)), None]
    arrived = travelled(KeyResults(each)).each
    assert [type(one) for one in arrived] == [type(one) for one in each]
    for place in (1, 3):
        sent, got = each[place], arrived[place]
        assert isinstance(sent, FoundRows)
        assert (got.version, got.newest, got.places.tolist()) == (3, 4, sent.places.tolist())
        assert got.rows == sent.rows
    assert str(arrived[2]) == str(error)
    (nothing, _) = travelled(KeyResults([None, error])).each
    assert nothing is None


def test_rows_of_other_columns_arrive_with_their_own(travelled: Way) -> None:
    """A keyed store may have been changed between two of its partitions."""
    each = [found(rows(1)), found(rows(1).append_column("m", pa.array([1])))]
    arrived = travelled(KeyResults(each)).each
    assert [one.rows for one in arrived] == [one.rows for one in each]


def test_few_rows_travel_small_and_many_are_not_copied(travelled: Way) -> None:
    large = rows(20_000)
    few = KeyQuery([request(0), request(1)], [large.slice(3, 1), large.slice(17_000, 2)])
    assert few.is_small
    assert len(pickle.dumps(few, protocol=5)) < 4096
    assert [own for _, own in travelled(few)] == [large.slice(3, 1), large.slice(17_000, 2)]
    many = KeyQuery([request(0)], [large])
    assert not many.is_small
    buffers: list[Any] = []
    pickle.dumps(many, protocol=5, buffer_callback=buffers.append)
    assert sum(one.raw().nbytes for one in buffers) >= large.nbytes


@pytest.mark.parametrize("count", [1, 40, 5000])
@pytest.mark.parametrize("on", [1, 4])
def test_each_shard_is_asked_for_its_keys(count: int, on: int) -> None:
    """Few and many, on one shard and on several, of which one was never written."""
    schema = StateSchema((Field("k", "int64"),), (), (), None, None, "update")
    form = Projection(ReadProjection(schema), "", ViewColumns.of(schema), ("k",), True)
    view: Any = SimpleNamespace(written=[0, 1, 3], versions=[1, 1, 0, 1])
    leaves = pa.record_batch({"k": np.arange(count)})
    shards = np.random.default_rng(count).integers(0, on, count)
    made = form.by_shard(view, leaves, shards)
    assert sorted(made) == sorted({*shards.tolist()} - {2})
    for shard, (places, own) in made.items():
        assert places.tolist() == np.flatnonzero(shards == shard).tolist()
        assert own.column("k").to_pylist() == places.tolist()


class GatedViews:
    """Where views are asked for; answers wait until they may go."""

    def __init__(self) -> None:
        self.asked = 0
        self.goes_on = Event()
        self.goes_on.set()

    def view(self, name: str, version: int | None, known: object) -> Any:
        self.asked += 1
        number = self.asked
        assert self.goes_on.wait(30)
        return SimpleNamespace(id=number)


def test_one_of_many_readers_asks_for_the_view_and_nobody_waits_for_it_long() -> None:
    views, clock = GatedViews(), LaterClock()
    runtime = Runtime(clock=clock)
    reads = ShardReads(views, "clicks", runtime, runtime.threads.pool(1, "scan"))  # type: ignore[arg-type]
    newest = ReadVersion()
    with ThreadPoolExecutor(8) as threads:
        assert reads.cached_view(newest).id == 1  # type: ignore[comparison-overlap]
        clock.later_s += 1.2
        views.goes_on.clear()
        first = threads.submit(reads.cached_view, newest)
        until(lambda: views.asked == 2)
        # The others go by what is known, ...
        assert [threads.submit(reads.cached_view, newest).result(30).id for _ in range(5)] == [1] * 5  # type: ignore[comparison-overlap]
        assert views.asked == 2
        # ... but for too long an answer nobody does.
        clock.later_s += 1.0
        late = threads.submit(reads.cached_view, newest)
        until(lambda: views.asked == 3)
        views.goes_on.set()
        assert [first.result(30).id, late.result(30).id] == [2, 3]  # type: ignore[comparison-overlap]
    assert reads.cached_view(newest).id == 3  # type: ignore[comparison-overlap]
    assert views.asked == 3


def test_what_is_no_look_up_is_refused_and_nothing_of_it_is_run() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("a pickle was loaded",)

    for content in (pickle.dumps(Bomb()), b"", b"\x05\0\0\0{}", b"\xff\xff\xff\xff"):
        for kind in (KeyQuery, KeyResults):
            with pytest.raises((ValueError, KeyError, struct.error)):
                kind.decoded(content)
    pickled = replace(request(0), form=pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="form is JSON"):
        KeyQuery.decoded(KeyQuery([pickled], [rows(1)]).encoded())


def test_an_error_of_a_connection_is_one_of_ours_whatever_it_is_called() -> None:
    class ElseError(StateStoreError):
        """Not among the errors that callers know."""

    known = InvalidRequestError("no such column", column="x", count=3, where=None)
    arrived = by_a_connection(KeyResults([known, ElseError("odd"), None])).each
    assert [type(one) for one in arrived] == [InvalidRequestError, StateStoreError, type(None)]
    assert str(arrived[0]) == str(known)


def test_forms_are_data_but_for_filters() -> None:
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

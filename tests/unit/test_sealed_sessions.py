"""Sessions of epochs: a version is sealed, and committed while the next one is made."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.model.errors import FencedError, StorageUnavailableError
from coordinator.model.watermarks import Watermarks
from store_actors.messages.requests import BatchFacts
from tests.clocks import until
from tests.memory_store import MemoryObjectStore
from tests.unit.keyed_fleet import KeyedFleet

FACTS = BatchFacts(Watermarks(0, 0), 1, 0, None)


class SlowStore(MemoryObjectStore):
    """A store that writes no delta before it is let.

    Attributes
    ----------
    waiting
        Number of deltas that wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.let, self.waiting = threading.Event(), 0
        self.let.set()
        self.error: Exception | None = None

    def put(self, path: str, data: bytes) -> None:
        self.waiting += 1
        assert self.let.wait(20)
        if self.error is not None:
            raise self.error
        super().put(path, data)


class SealingFleet(KeyedFleet):
    """Keyed stores over a slow store, and the errors of which a worker was told."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: SlowStore = SlowStore()
        self.coordinator = type(self.coordinator)(self.objects)
        self.stores = self.new_stores()
        self.told: list[BaseException] = []

    def seal(self, session: str) -> int:
        return self.stores.seal(session, FACTS, (), self.told.append)

    def counts(self, version: int) -> dict[str, int]:
        return {row["k"]: row["n"] for row in self.read(version)}


def test_the_next_version_is_made_while_one_is_committed_and_sealed_after_that() -> None:
    fleet = SealingFleet()
    session = fleet.open(0)
    fleet.put(session, a=1)
    fleet.objects.let.clear()
    assert fleet.seal(session) == 1
    until(lambda: fleet.objects.waiting == 1)
    fleet.put(session, a=2, b=1)
    assert fleet.call(session, "get", ("a",)) == {"n": 2}
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(fleet.seal, session)
        assert fleet.counts(0) == {}, "what is not committed is not read"
        assert fleet.objects.waiting == 1
        assert not second.done()
        fleet.objects.let.set()
        assert second.result(20) == 2
    assert fleet.stores.commit(session) == 3
    fleet.stores = fleet.new_stores()
    assert [fleet.counts(version) for version in range(4)] == [{}, {"a": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 1}]
    assert fleet.told == []


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), max_size=6), st.integers(0, 6))
def test_sealed_versions_are_as_committed_ones(epochs: list[dict[str, int]], kept: int) -> None:
    """A run is ended after some epochs, with writes of the next one; another run goes on, as nothing of these counts."""
    fleet, model = SealingFleet(), [dict[str, int]()]
    session = fleet.open(0)
    for number, written in enumerate(epochs):
        if number == kept:
            fleet.put(session, a=9, b=9, c=9)
            until(lambda due=number: fleet.metrics.commits == due)
            fleet.stores.end(session)
            fleet.run = "run-2"
            session = fleet.open(number, fleet.run)
        assert {key: fleet.call(session, "get", (key,)) for key in "abc"} == {
            key: {"n": model[-1][key]} if key in model[-1] else None for key in "abc"
        }
        if written:
            fleet.put(session, **written)
        assert fleet.seal(session) == number + 1
        model.append(model[-1] | written)
    fleet.stores.commit(session)
    for stores in (fleet.stores, fleet.new_stores()):
        fleet.stores = stores
        assert [fleet.counts(version) for version in range(len(model))] == model


def test_a_version_that_is_not_committed_ends_the_session_and_tells_its_worker() -> None:
    fleet = SealingFleet()
    session = fleet.open(0)
    fleet.put(session, a=1)
    fleet.seal(session)
    fleet.put(session, a=2)
    until(lambda: fleet.metrics.commits == 1)
    fleet.objects.error = StorageUnavailableError("the disk is full")
    fleet.seal(session)
    until(lambda: bool(fleet.told))
    assert fleet.told == [fleet.objects.error]
    for use in (lambda: fleet.put(session, a=3), lambda: fleet.seal(session), lambda: fleet.stores.commit(session)):
        with pytest.raises(FencedError, match=r"the version before was not committed: the disk is full"):
            use()
    fleet.objects.error = None
    after = fleet.open(1, "run-2")
    assert fleet.call(after, "get", ("a",)) == {"n": 1}


def test_a_seal_right_after_one_that_fails_raises_why() -> None:
    fleet = SealingFleet()
    session = fleet.open(0)
    fleet.objects.let.clear()
    fleet.objects.error = StorageUnavailableError("the disk is full")
    fleet.seal(session)
    until(lambda: fleet.objects.waiting == 1)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(fleet.seal, session)
        fleet.objects.let.set()
        with pytest.raises((StorageUnavailableError, FencedError), match="the disk is full"):
            second.result(20)


@pytest.mark.parametrize("counts", [False, True])
def test_a_run_that_ends_during_a_commit_leaves_what_counts(counts: bool) -> None:
    """Memory is at a version of which nobody knows whether it counts: the next run reads what does."""
    fleet = SealingFleet()
    session = fleet.open(0)
    fleet.put(session, a=1)
    fleet.objects.let.clear()
    fleet.seal(session)
    until(lambda: fleet.objects.waiting == 1)
    fleet.put(session, a=2)
    fleet.stores.end(session)
    assert not fleet.stores.partitions.cache.of(fleet.request(0).lease.store_id).stores
    fleet.objects.error = None if counts else StorageUnavailableError("the disk is full")
    fleet.objects.let.set()
    until(lambda: fleet.metrics.commits == 1 if counts else bool(fleet.told))
    fleet.objects.error = None
    after = fleet.open(int(counts), "run-2")
    assert fleet.call(after, "get", ("a",)) == ({"n": 1} if counts else None)


def test_a_run_that_takes_over_during_a_commit_fences_it() -> None:
    fleet = SealingFleet()
    session = fleet.open(0)
    fleet.put(session, a=1)
    fleet.objects.let.clear()
    fleet.seal(session)
    until(lambda: fleet.objects.waiting == 1)
    fleet.run = "run-2"
    after = fleet.open(0, fleet.run)
    fleet.objects.let.set()
    until(lambda: bool(fleet.told))
    assert isinstance(fleet.told[0], FencedError)
    assert fleet.call(after, "get", ("a",)) is None
    fleet.put(after, a=7)
    assert fleet.stores.commit(after) == 1
    assert fleet.counts(1) == {"a": 7}

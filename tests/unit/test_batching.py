"""Look-ups of several threads: which are one call, and what one of them may cost the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest

from coordinator.runtime.runtime import Runtime
from statefleet.reads import batching
from statefleet.reads.batching import Batcher
from tests.clocks import until


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


class GatedCalls:
    """Finds the double of a key; calls wait where they are told to, and those with some keys fail."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []
        self.goes_on = Event()
        self.held: set[int] = set()
        self.bad: set[int] = set()

    def __call__(self, keys: Sequence[int]) -> list[int]:
        self.made.append(list(keys))
        if self.held & set(keys):
            assert self.goes_on.wait(30)
        if bad := self.bad & set(keys):
            raise ValueError(f"bad: {sorted(bad)}")
        return [2 * key for key in keys]


@pytest.fixture
def calls() -> GatedCalls:
    return GatedCalls()


@pytest.fixture
def look_ups(calls: GatedCalls) -> Batcher[int, int]:
    return Batcher(calls, Runtime().threads)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_MAX_WAIT_FOR_TURN_S", 60.0)
    monkeypatch.setattr(batching, "_MAX_WAIT_FOR_BATCH_S", 60.0)


def waiting(look_ups: Batcher[int, int]) -> int:
    return 0 if look_ups._open is None else len(look_ups._open.keys)


def meet(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls, keys: Sequence[int]
) -> list[Future[int]]:
    """Have the first key's call wait until all the others were asked for."""
    calls.held = {keys[0]}
    first = threads.submit(look_ups.find, keys[0])
    until(lambda: bool(calls.made))
    others = []
    for number, key in enumerate(keys[1:], start=1):
        others.append(threads.submit(look_ups.find, key))
        until(lambda number=number: waiting(look_ups) == number)  # type: ignore[misc]
    calls.goes_on.set()
    return [first, *others]


def test_a_key_alone_goes_at_once(look_ups: Batcher[int, int], calls: GatedCalls) -> None:
    assert [look_ups.find(key) for key in (3, 4)] == [6, 8]
    assert calls.made == [[3], [4]]


@pytest.mark.usefixtures("patient")
def test_keys_that_come_while_a_call_is_under_way_are_the_next_one(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls
) -> None:
    found = meet(threads, look_ups, calls, [1, 2, 3, 2, 4])
    assert [one.result(30) for one in found] == [2, 4, 6, 4, 8]
    assert calls.made == [[1], [2, 3, 2, 4]]
    # And whoever comes then goes at once again.
    assert look_ups.find(5) == 10
    assert calls.made[2:] == [[5]]


@pytest.mark.usefixtures("patient")
def test_a_key_that_cannot_be_found_fails_for_who_asked(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls
) -> None:
    calls.bad = {3}
    first, second, third = meet(threads, look_ups, calls, [1, 2, 3])
    assert (first.result(30), second.result(30)) == (2, 4)
    with pytest.raises(ValueError, match=r"bad: \[3\]"):
        third.result(30)
    assert sorted(map(sorted, calls.made)) == [[1], [2], [2, 3], [3]]
    with pytest.raises(ValueError, match="bad"):
        look_ups.find(3)
    assert calls.made[4:] == [[3]]  # and is not tried twice


def test_a_call_that_hangs_holds_up_its_own_key_only(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls
) -> None:
    calls.held = {1}
    hung = threads.submit(look_ups.find, 1)
    until(lambda: bool(calls.made))
    assert [one.result(30) for one in [threads.submit(look_ups.find, key) for key in range(2, 40)]] == [
        2 * key for key in range(2, 40)
    ]
    assert not hung.done()
    calls.goes_on.set()
    assert hung.result(30) == 2


def test_a_key_is_asked_for_alone_if_the_others_of_its_call_take_long(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_MAX_WAIT_FOR_TURN_S", 60.0)
    monkeypatch.setattr(batching, "_MAX_WAIT_FOR_BATCH_S", 0.01)
    calls.held, held = {1}, Event()
    found = [threads.submit(look_ups.find, 1)]
    until(lambda: bool(calls.made))
    for number, key in enumerate((2, 3, 4), start=1):
        found.append(threads.submit(look_ups.find, key))
        until(lambda number=number: waiting(look_ups) == number)  # type: ignore[misc]
    first_call, calls.goes_on = calls.goes_on, held
    calls.held = {2}
    first_call.set()
    assert [found[0].result(30), found[2].result(30), found[3].result(30)] == [2, 6, 8]
    assert not found[1].done()
    held.set()
    assert found[1].result(30) == 4
    assert calls.made[1] == [2, 3, 4]


@pytest.mark.usefixtures("patient")
def test_whoever_is_interrupted_leaves_the_others_to_ask_by_themselves(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls
) -> None:
    calls.held = {1}
    first = threads.submit(look_ups.find, 1)
    until(lambda: bool(calls.made))
    interrupted = threads.submit(look_ups.find, 2)
    until(lambda: waiting(look_ups) == 1)
    other = threads.submit(look_ups.find, 3)
    until(lambda: waiting(look_ups) == 2)
    assert look_ups._open is not None
    look_ups._open.turn.set_exception(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        interrupted.result(30)
    assert other.result(30) == 6
    calls.goes_on.set()
    assert first.result(30) == 2
    assert look_ups.find(7) == 14
    assert look_ups._calls == 0


def test_every_thread_is_given_its_own(threads: ThreadPoolExecutor) -> None:
    made = []

    def find_all(keys: Sequence[int]) -> list[int]:
        made.append(len(keys))
        time.sleep(0.0005)
        if len(keys) > 1 and made[-1] % 5 == 0:
            raise ValueError("not together")
        return [2 * key for key in keys]

    look_ups: Batcher[int, int] = Batcher(find_all, Runtime().threads)

    def ask(thread: int) -> bool:
        return all(look_ups.find(key) == 2 * key for key in range(1000 * thread, 1000 * thread + 100))

    assert all(threads.map(ask, range(24)))
    assert look_ups._calls == 0
    assert look_ups._open is None
    assert len(made) < 24 * 100

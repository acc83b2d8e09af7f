"""Look-ups of several threads: which of them share a call, and how far one may delay or fail the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest

from coordinator.runtime.runtime import Runtime
from statefleet.reads.batching import Batcher
from tests.clocks import until


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


class GatedCalls:
    """Doubles keys; calls with a key in `blocked` wait for `resume`, and calls with a key in `bad` fail."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.resume = Event()
        self.blocked: set[int] = set()
        self.bad: set[int] = set()

    def __call__(self, keys: Sequence[int]) -> list[int]:
        self.batches.append(list(keys))
        if self.blocked & set(keys):
            assert self.resume.wait(30)
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
def patient(calls: GatedCalls) -> Batcher[int, int]:
    return Batcher(calls, Runtime().threads, turn_s=60, batch_s=60)


def waiting(look_ups: Batcher[int, int]) -> int:
    return 0 if look_ups._open is None else len(look_ups._open.keys)


def held_up(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls, *keys: int
) -> list[Future[int]]:
    """Request keys one after the other; the call of the first one waits, and so do the others meanwhile."""
    calls.blocked = {keys[0]}
    requested = [threads.submit(look_ups.find, keys[0])]
    until(lambda: bool(calls.batches))
    for number, key in enumerate(keys[1:], start=1):
        requested.append(threads.submit(look_ups.find, key))
        until(lambda number=number: waiting(look_ups) == number)  # type: ignore[misc]
    return requested


def test_a_key_alone_goes_at_once(look_ups: Batcher[int, int], calls: GatedCalls) -> None:
    assert [look_ups.find(key) for key in (3, 4)] == [6, 8]
    assert calls.batches == [[3], [4]]


def test_keys_that_come_while_a_call_is_under_way_are_the_next_one(
    threads: ThreadPoolExecutor, patient: Batcher[int, int], calls: GatedCalls
) -> None:
    futures = held_up(threads, patient, calls, 1, 2, 3, 2, 4)
    calls.resume.set()
    assert [future.result(30) for future in futures] == [2, 4, 6, 4, 8]
    assert calls.batches == [[1], [2, 3, 2, 4]]
    # A later key is sent at once again.
    assert patient.find(5) == 10
    assert calls.batches[2:] == [[5]]


def test_a_key_that_cannot_be_found_fails_for_its_caller_only(
    threads: ThreadPoolExecutor, patient: Batcher[int, int], calls: GatedCalls
) -> None:
    calls.bad = {3}
    first, second, third = held_up(threads, patient, calls, 1, 2, 3)
    calls.resume.set()
    assert (first.result(30), second.result(30)) == (2, 4)
    with pytest.raises(ValueError, match=r"bad: \[3\]"):
        third.result(30)
    assert sorted(map(sorted, calls.batches)) == [[1], [2], [2, 3], [3]]
    with pytest.raises(ValueError, match="bad"):
        patient.find(3)
    assert calls.batches[4:] == [[3]]  # and is not tried twice


def test_a_call_that_hangs_holds_up_its_own_key_only(
    threads: ThreadPoolExecutor, look_ups: Batcher[int, int], calls: GatedCalls
) -> None:
    (hung,) = held_up(threads, look_ups, calls, 1)
    assert [future.result(30) for future in [threads.submit(look_ups.find, key) for key in range(2, 40)]] == [
        2 * key for key in range(2, 40)
    ]
    assert not hung.done()
    calls.resume.set()
    assert hung.result(30) == 2


def test_a_key_is_asked_for_alone_if_the_others_of_its_call_take_long(
    threads: ThreadPoolExecutor, calls: GatedCalls
) -> None:
    look_ups = Batcher(calls, Runtime().threads, turn_s=60, batch_s=0.01)
    futures, resume = held_up(threads, look_ups, calls, 1, 2, 3, 4), Event()
    first_call, calls.resume = calls.resume, resume
    calls.blocked = {2}
    first_call.set()
    assert [futures[0].result(30), futures[2].result(30), futures[3].result(30)] == [2, 6, 8]
    assert not futures[1].done()
    resume.set()
    assert futures[1].result(30) == 4
    # In any order: a key may be asked for alone before the call of all begins.
    assert sorted(calls.batches) == [[1], [2, 3, 4], [3], [4]]


def test_an_interrupted_thread_leaves_the_others_to_ask_by_themselves(
    threads: ThreadPoolExecutor, patient: Batcher[int, int], calls: GatedCalls
) -> None:
    first, interrupted, later = held_up(threads, patient, calls, 1, 2, 3)
    assert patient._open is not None
    patient._open.turn.set_exception(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        interrupted.result(30)
    assert later.result(30) == 6
    calls.resume.set()
    assert first.result(30) == 2
    assert patient.find(7) == 14
    assert patient._calls == 0


def test_every_thread_gets_its_own_values(threads: ThreadPoolExecutor) -> None:
    sizes = []

    def find_all(keys: Sequence[int]) -> list[int]:
        sizes.append(len(keys))
        time.sleep(0.0005)
        if len(keys) > 1 and sizes[-1] % 5 == 0:
            raise ValueError("not together")
        return [2 * key for key in keys]

    look_ups: Batcher[int, int] = Batcher(find_all, Runtime().threads)

    def ask(thread: int) -> bool:
        return all(look_ups.find(key) == 2 * key for key in range(1000 * thread, 1000 * thread + 100))

    assert all(threads.map(ask, range(24)))
    assert look_ups._calls == 0
    assert look_ups._open is None
    assert len(sizes) < 24 * 100

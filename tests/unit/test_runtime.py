"""A process's clock, ids, threads, and pauses between attempts."""

from __future__ import annotations

import time

import pytest

from coordinator.runtime.runtime import Clock, Retry, Runtime, Threads


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has such a clock")
def test_ages_are_measured_by_a_clock_that_does_not_stop_while_the_machine_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {time.CLOCK_BOOTTIME: 5000.0, time.CLOCK_MONOTONIC: 1000.0}
    monkeypatch.setattr(time, "clock_gettime", seconds.__getitem__)
    assert Clock().elapsed_s() == 5000.0


def test_a_holder_may_take_its_lock_again() -> None:
    lock = Threads().lock()
    with lock:
        assert lock.acquire(blocking=False)
        lock.release()


def test_ids_are_unique_and_have_32_digits() -> None:
    runtime = Runtime()
    ids = {runtime.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(id_) == 32 and int(id_, 16) >= 0 for id_ in ids)


class SteppedClock:
    """Time that passes only while it sleeps."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []

    def now_s(self) -> float:
        raise AssertionError("ages are measured by elapsed time")

    def elapsed_s(self) -> float:
        return sum(self.pauses_s)

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)


def test_pauses_double_up_to_a_limit_and_end_at_the_deadline() -> None:
    clock = SteppedClock()
    retry = Retry(clock, 10.0, first_pause_s=0.5, longest_pause_s=3.0)
    while not retry.is_over:
        retry.pause()
    assert clock.pauses_s == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_the_time_begins_with_the_first_attempt() -> None:
    clock = SteppedClock()
    clock.sleep(100.0)
    assert not Retry(clock, 1.0, first_pause_s=1.0, longest_pause_s=1.0).is_over

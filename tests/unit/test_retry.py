"""Pauses between attempts, on a clock of the test."""

from __future__ import annotations

from coordinator.runtime.runtime import Retry


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

"""Clocks that tests set, and waiting by the real one."""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.runtime.runtime import Clock


class LaterClock(Clock):
    """This machine's clock, to which elapsed seconds are added."""

    later_s = 0.0

    def elapsed_s(self) -> float:
        return super().elapsed_s() + self.later_s


def until(
    is_so: Callable[[], bool],
    within_s: float = 90,
    failure: str | Callable[[], str] = "it did not happen in time",
    every_s: float = 0.005,
) -> float:
    """Wait for what others do; return for how long."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < within_s, failure if isinstance(failure, str) else failure()
        time.sleep(every_s)
    return time.monotonic() - begun

"""Clocks that tests set."""

from __future__ import annotations

from coordinator.surroundings import MachineClock


class LaterClock(MachineClock):
    """This machine's clock, to which elapsed seconds are added."""

    later_s = 0.0

    def elapsed_s(self) -> float:
        return super().elapsed_s() + self.later_s

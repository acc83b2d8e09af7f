"""Repeated attempts: how long to pause between them, and when to give up."""

from __future__ import annotations

from coordinator.runtime.runtime import Clock


class Retry:
    """Paces the attempts of one call, by pauses that double up to a limit.

    Parameters
    ----------
    within_s
        Seconds after which no further attempt is to be made.
    first_pause_s, longest_pause_s
        The first pause, and the limit, in seconds.
    """

    def __init__(self, clock: Clock, within_s: float, *, first_pause_s: float, longest_pause_s: float) -> None:
        self._clock = clock
        self._deadline_s = clock.elapsed_s() + within_s
        self._pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s

    @property
    def is_over(self) -> bool:
        """Whether the time for attempts is over."""
        return self._clock.elapsed_s() > self._deadline_s

    def pause(self) -> None:
        """Wait before the next attempt."""
        self._clock.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)

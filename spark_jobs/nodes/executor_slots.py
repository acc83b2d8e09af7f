"""When RayDP is to be asked for executors: on nodes that joined, and in place of those that were lost. Pure but for the log."""

from __future__ import annotations

import logging

__all__ = ["ExecutorPlaces"]

log = logging.getLogger(__name__)

#: Seconds that a place is left to RayDP, which starts most lost executors anew by itself.
_LEFT_ALONE_S = 8.0
#: Seconds within which an executor that was asked for should be there: a JVM starts in some.
_STARTED_S = 60.0


class ExecutorPlaces:
    """Counts executors against the nodes that have room for one.

    Parameters
    ----------
    limit
        How many executors there shall be at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free_since_s: float | None = None
        #: How many there were when some were asked for, and when.
        self._asked: tuple[int, float] | None = None
        #: How often nobody came.
        self._in_vain = 0

    def due(self, now_s: float, present: int, free: int) -> int:
        """How many executors to ask for now.

        Of what is asked for again and again there is one more each time: RayDP's master starts the difference to those that it knows,
        and may know some that never came.

        Parameters
        ----------
        now_s
            Time, of a clock that only goes on.
        present
            Executors that live.
        free
            Nodes with room for one.
        """
        wanted = min(self._limit - present, free)
        if wanted <= 0:
            self._free_since_s = self._asked = None
            self._in_vain = 0
            return 0
        if self._asked is not None:
            before, asked_s = self._asked
            if present <= before and now_s - asked_s < _STARTED_S:
                return 0
            if present <= before:
                self._in_vain += 1
                log.warning(
                    "an executor that RayDP was asked for has not come in %.0f s; it is asked again: %d of at most %d executors are "
                    "there, and %d nodes have room for one; see `ray list actors` and the logs of the actors named raydp-executor-*",
                    now_s - asked_s,
                    present,
                    self._limit,
                    free,
                )
            self._asked = None
        if self._free_since_s is None:
            self._free_since_s = now_s
        if now_s - self._free_since_s < _LEFT_ALONE_S:
            return 0
        self._asked = (present, now_s)
        return wanted + self._in_vain

"""Requests of executors of RayDP: for nodes that joined, and in place of lost executors. Pure except for the log."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

#: Seconds for which a free slot is left to RayDP, which by itself restarts most lost executors.
_GRACE_S = 8.0
#: Seconds within which a requested executor should have started.
_START_S = 60.0


class ExecutorSlots:
    """Compares the executors with the nodes that have resources for one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free_since_s: float | None = None
        #: Number of executors at the last request, and the time of that; None without an open request.
        self._requested: tuple[int, float] | None = None
        #: Number of requests that no executor followed.
        self._failed_requests = 0

    def due(self, now_s: float, present: int, free: int) -> int:
        """Return how many executors to request now.

        Each repeated request asks for one more: RayDP's master starts the difference to the executors that it knows, and may know
        executors that never came.

        Parameters
        ----------
        now_s
            Time of a monotonic clock.
        free
            Number of nodes with resources for an executor.
        """
        missing = min(self._limit - present, free)
        if missing <= 0:
            self._free_since_s = self._requested = None
            self._failed_requests = 0
            return 0
        if self._requested is not None:
            before, requested_s = self._requested
            if present <= before and now_s - requested_s < _START_S:
                return 0
            if present <= before:
                self._failed_requests += 1
                log.warning(
                    "an executor that RayDP was asked for has not come in %.0f s; it is asked again: %d of at most %d executors are "
                    "there, and %d nodes have room for one; see `ray list actors` and the logs of the actors named raydp-executor-*",
                    now_s - requested_s,
                    present,
                    self._limit,
                    free,
                )
            self._requested = None
        if self._free_since_s is None:
            self._free_since_s = now_s
        if now_s - self._free_since_s < _GRACE_S:
            return 0
        self._requested = (present, now_s)
        return missing + self._failed_requests

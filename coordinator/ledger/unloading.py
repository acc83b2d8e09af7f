"""Ended queries leave memory: first their shards the store actors', then their ledger the coordinator's. No I/O, no Ray."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.ledger.state_ledger import StateLedger
from coordinator.model.identities import PYTHON_QUERY_ID
from coordinator.runtime.runtime import Clock


class EndedQueries:
    """Finds the states whose query ended a while ago.

    A query has ended if its driver said so, or if no driver that reports has its run: a driver that was killed says nothing. When it
    ended is not in the log, so the time counts from when that was first seen.

    Parameters
    ----------
    after_s
        Seconds after which shards of an ended query leave memory; see
        :class:`Maintenance.unload_after_s <coordinator.model.maintenance.Maintenance>`.
    """

    def __init__(self, clock: Clock, after_s: float, is_running: Callable[[StateLedger], bool]) -> None:
        self._clock = clock
        self._after_s = after_s
        self._is_running = is_running
        #: Seconds of the clock, by state.
        self._seen_ended_s: dict[str, float] = {}

    def used(self, state_name: str) -> None:
        """Note that a task of a state's query was answered: the query runs, also if its driver reports that it ended."""
        self._seen_ended_s.pop(state_name, None)

    def is_due(self, ledger: StateLedger) -> bool:
        """Return whether a state's query ended so long ago that no process should have its shards in memory.

        States that Python programs own have no query that could end.
        """
        name = ledger.state_name
        if self._is_running(ledger) or ledger.query_id in ("", PYTHON_QUERY_ID):
            self._seen_ended_s.pop(name, None)
            return False
        now_s = self._clock.elapsed_s()
        return now_s - self._seen_ended_s.setdefault(name, now_s) >= self._after_s

"""The order in which results of several shards leave by one task of a continuous query. No Ray."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.runtime.runtime import Threads


class ResultEpochs:
    """Sends results by epoch: none before all shards of the connection have answered the markers of the epochs before. Thread-safe.

    Shards of a store actor do not end an epoch at one moment, and rows of the next one may already be there. The task takes all that
    comes before the last answer for results of its epoch.

    Parameters
    ----------
    first_epoch, shards
        First epoch of the run, and how many shards answer each marker.
    """

    def __init__(self, first_epoch: int, shards: int, threads: Threads) -> None:
        self._guard = threads.lock()
        self._epoch, self._shards, self._answers = first_epoch, shards, 0
        #: What sends results of the next epoch.
        self._held: list[Callable[[], None]] = []

    def emit(self, epoch: int, send: Callable[[], None]) -> None:
        """Have results of an epoch sent, now or by :meth:`end_epoch`: of the present epoch or the one after it."""
        with self._guard:
            if epoch > self._epoch:
                self._held.append(send)
            else:
                send()

    def end_epoch(self, send: Callable[[], None]) -> None:
        """Have a shard's answer to a marker sent; after the last one follow the results of the next epoch."""
        with self._guard:
            send()
            self._answers += 1
            if self._answers == self._shards:
                self._epoch, self._answers = self._epoch + 1, 0
                held, self._held = self._held, []
                for send_held in held:
                    send_held()

"""Reports of batches that Spark's commit log has, sent to a fleet's coordinator while the next batches run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from ray.exceptions import RayError

from coordinator.model.errors import StateStoreError
from coordinator.service.client import CoordinatorClient

log = logging.getLogger(__name__)

#: Seconds for which a report may wait to be written with the records of the next batch.
_WITHIN_S = 1.0


class _Report(NamedTuple):
    run_id: str
    batch_id: int
    state_names: Sequence[str]


class FinishedBatches:
    """Reports of a fleet: one at a time for each run, repeated while the coordinator restarts, until the states' logs have it."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._guard = threading.Lock()
        #: By run, the newest report that a thread sends or will send.
        self._newest: dict[str, _Report] = {}

    def report(self, run_id: str, batch_id: int, state_names: Sequence[str]) -> None:
        """Report a finished batch from a thread, and return at once."""
        report = _Report(run_id, batch_id, state_names)
        with self._guard:
            is_busy = run_id in self._newest
            self._newest[run_id] = report
        if not is_busy:
            # A daemon: a batch that it could not report is proven finished by the next batch or run.
            threading.Thread(target=self._run, args=(report,), name="statefleet-finished", daemon=True).start()

    def report_now(self, run_id: str, batch_id: int, state_names: Sequence[str]) -> None:
        """Report a finished batch, and return once the logs have it."""
        self._send(_Report(run_id, batch_id, state_names), 0.0)

    def end(self, run_id: str) -> None:
        """Send the open report of a run, and return once the logs have it."""
        with self._guard:
            report = self._newest.get(run_id)
        if report is not None:
            self._send(report, 0.0)

    def _run(self, report: _Report) -> None:
        while True:
            self._send(report, _WITHIN_S)
            with self._guard:
                newest = self._newest[report.run_id]
                if newest is report:
                    del self._newest[report.run_id]
                    return
            report = newest

    def _send(self, report: _Report, within_s: float) -> None:
        try:
            self._coordinator.batch_finished(report.state_names, report.run_id, report.batch_id, within_s)
        except (StateStoreError, RayError) as error:
            # The batch is finished even if readers do not see it.
            log.warning(
                "batch %d of %s is finished, and the fleet could not be told; readers see it once the next one has begun: %s: %s",
                report.batch_id,
                ", ".join(report.state_names),
                type(error).__name__,
                error,
            )

"""Reports of a driver to the coordinators of its fleets: its executors, and the state of its long batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from coordinator.telemetry.drivers import DriverReport

log = logging.getLogger(__name__)

#: Seconds after which an unchanged report is repeated, as a coordinator that has restarted has none.
_REPEAT_S = 10.0


class ReportedTo(Protocol):
    """A coordinator."""

    def report_driver(self, report: DriverReport) -> None:
        """Register a driver's executors, and what its long batches wait for."""


class DriverReports:
    """Sends a changed report at once, and repeats an unchanged one periodically."""

    def __init__(self) -> None:
        self._last: DriverReport | None = None
        self._reported_s = 0.0

    def report(self, report: DriverReport, coordinators: Iterable[ReportedTo], now_s: float) -> None:
        """Send a report if it is due.

        Parameters
        ----------
        now_s
            Time of a monotonic clock.
        """
        if report == self._last and now_s - self._reported_s < _REPEAT_S:
            return
        for coordinator in coordinators:
            coordinator.report_driver(report)
        self._last, self._reported_s = report, now_s

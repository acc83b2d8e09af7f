"""What a driver reports to the coordinators of its fleets: its executors, and what its batches wait for that take long."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from coordinator.telemetry.drivers import DriverReport

__all__ = ["DriverReports", "ReportedTo"]

log = logging.getLogger(__name__)

#: Seconds after which a report is repeated that says nothing new: a coordinator that started anew knows of none.
_REPEAT_S = 10.0


class ReportedTo(Protocol):
    """A coordinator."""

    def report_driver(self, report: DriverReport) -> None:
        """See :meth:`Coordinator.report_driver <coordinator.service.coordinator.Coordinator.report_driver>`."""


class DriverReports:
    """Reports at once what is new, and repeats it now and then."""

    def __init__(self) -> None:
        self._last: DriverReport | None = None
        self._reported_s = 0.0

    def report(self, report: DriverReport, coordinators: Iterable[ReportedTo], now_s: float) -> None:
        """Send a report, if that is due.

        Parameters
        ----------
        now_s
            Time, of a clock that only goes on.
        """
        if report == self._last and now_s - self._reported_s < _REPEAT_S:
            return
        for coordinator in coordinators:
            coordinator.report_driver(report)
        self._last, self._reported_s = report, now_s

"""Reports of Spark's drivers on their executors and running batches: kept in memory, until the driver reports again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.model.text import clock_text

#: Seconds without a report after which a driver is taken for dead. It reports every ten seconds.
_SILENT_S = 30.0
#: Newest losses that are remembered.
_LOSSES = 100


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """An executor of Spark's, as its driver knows it."""

    executor_id: str
    #: Address of its node.
    host: str
    #: When Spark gave it up, by the driver's clock; None while it lives.
    lost_at_ms: int | None = None
    reason: str = ""
    #: Whether it was ended on purpose.
    is_expected: bool = False

    def loss_text(self) -> str:
        """Return a sentence about its loss, with the time in UTC."""
        return f"executor {self.executor_id} on {self.host} was lost at {clock_text(self.lost_at_ms or 0)}"


@dataclass(frozen=True, slots=True)
class LongBatch:
    """A batch that has been running for some seconds."""

    run_id: str
    batch_id: int
    #: Since Spark planned it, by the driver's clock.
    running_ms: int
    #: What Spark does at present, as far as the driver knows.
    waits_for: str


@dataclass(frozen=True, slots=True)
class DriverReport:
    """A driver's executors, those that were lost lately included, its runs, and the batches of these that take long."""

    application: str
    executors: tuple[ExecutorState, ...] = ()
    run_ids: tuple[str, ...] = ()
    batches: tuple[LongBatch, ...] = ()
    #: By run, how many records Kafka has for the partition of which most were not read, by Spark's newest progress.
    behind: tuple[tuple[str, int], ...] = ()


class Drivers:
    """The drivers of a fleet."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[DriverReport, float]] = {}
        #: Number of each loss, application, and executor.
        self._losses: list[tuple[int, str, ExecutorState]] = []
        #: Number of executors that were lost since the coordinator started.
        self.lost = 0

    def take(self, report: DriverReport, now_s: float) -> Sequence[ExecutorState]:
        """Take in a report; returns the executors that were not known to be lost before.

        Parameters
        ----------
        now_s
            Time of a clock that never goes back.
        """
        reported = {(application, executor.executor_id) for _, application, executor in self._losses}
        lost = [
            executor
            for executor in report.executors
            if executor.lost_at_ms is not None
            and not executor.is_expected
            and (report.application, executor.executor_id) not in reported
        ]
        for executor in lost:
            self.lost += 1
            self._losses.append((self.lost, report.application, executor))
        del self._losses[:-_LOSSES]
        self._reports[report.application] = report, now_s
        return lost

    def executors(self, now_s: float) -> Iterator[tuple[str, ExecutorState]]:
        """Return the executors of living drivers, with the ids of their applications."""
        for report in self._alive(now_s):
            for executor in report.executors:
                yield report.application, executor

    def lost_since(self, run_id: str, number: int) -> list[ExecutorState]:
        """Return the executors that a run's application has lost, without the first `number` of all losses."""
        applications = {report.application for report, _ in self._reports.values() if run_id in report.run_ids}
        return [lost for loss, application, lost in self._losses if loss > number and application in applications]

    def is_running(self, run_id: str, now_s: float) -> bool:
        """Return whether a living driver reports a run."""
        return any(run_id in report.run_ids for report in self._alive(now_s))

    def batch(self, run_id: str, now_s: float) -> LongBatch | None:
        """Return a run's batch if it has been running for some seconds."""
        batches = (batch for report in self._alive(now_s) for batch in report.batches if batch.run_id == run_id)
        return next(batches, None)

    def behind(self, run_id: str, now_s: float) -> int | None:
        """Return how many records a run's sources are behind; None if they do not say."""
        told = (records for report in self._alive(now_s) for run, records in report.behind if run == run_id)
        return next(told, None)

    def _alive(self, now_s: float) -> list[DriverReport]:
        self._reports = {
            application: (report, heard_s)
            for application, (report, heard_s) in self._reports.items()
            if now_s - heard_s < _SILENT_S
        }
        return [report for report, _ in self._reports.values()]

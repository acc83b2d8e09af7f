"""Processors of ``transformWithState``: classes of the user, as in PySpark 4."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spark_jobs.transform.handle import StatefulProcessorHandle

__all__ = ["ExpiredTimerInfo", "StatefulProcessor", "TimerValues"]


@dataclass(frozen=True, slots=True)
class TimerValues:
    """What time it is in a batch, in milliseconds since the epoch; -1 where there is no such time.

    Attributes
    ----------
    processing_time_ms
        That of the batch, the same on every retry; -1 in time mode None.
    watermark_ms
        -1 in time mode None, and without a watermark.
    """

    processing_time_ms: int = -1
    watermark_ms: int = -1

    def getCurrentProcessingTimeInMs(self) -> int:
        """Processing time of the batch."""
        return self.processing_time_ms

    def getCurrentWatermarkInMs(self) -> int:
        """The watermark: for rows that of the batches before, for timers with this batch included."""
        return self.watermark_ms


@dataclass(frozen=True, slots=True)
class ExpiredTimerInfo:
    """Which timer has expired."""

    expiry_time_ms: int

    def getExpiryTimeInMs(self) -> int:
        """The time that it was registered for, in milliseconds."""
        return self.expiry_time_ms


class StatefulProcessor(ABC):
    """What a query does with the rows, timers and state of each key, as PySpark's ``StatefulProcessor``.

    An object of the class is pickled to the workers; each task of each batch has a copy of its own, so what is to be kept from batch to
    batch belongs in state variables. With ``transformWithStateInPandas`` rows are pandas DataFrames, with ``transformWithState``
    they are Rows. Keys are tuples.
    """

    @abstractmethod
    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the state variables, and keep the handle for timers. Called when the query is built, too."""

    @abstractmethod
    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: TimerValues) -> Iterable[Any]:
        """Work on a key's rows of a batch.

        Parameters
        ----------
        key
            The grouping columns' values.
        rows
            DataFrames, or Rows.
        timerValues
            What time it is.

        Returns
        -------
        iterable
            What to emit: DataFrames, or Rows (tuples) in the order of the output's columns.
        """

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterable[Any]:
        """Work on a key one of whose timers has expired, after the rows of the batch; returns what to emit. By default nothing."""
        return iter(())

    def handleInitialState(  # noqa: B027 - a processor need not have it
        self, key: tuple[Any, ...], initialState: Any, timerValues: TimerValues
    ) -> None:
        """Take a DataFrame (in chunks, if it is large), or a Row, of the initial state of a key in, in the first batch and before the
        rows of any key. By default nothing.
        """

    def close(self) -> None:  # noqa: B027 - nor this
        """Called when a task's work is done. By default nothing."""

"""Processors of ``transformWithState``: the user's classes, as in PySpark 4."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from spark_jobs.plan.spark_version import SPARK
from spark_jobs.transform.handle import StatefulProcessorHandle


@dataclass(frozen=True, slots=True)
class TimerValues:
    """The times of a batch, in milliseconds since the epoch; -1 where there is none.

    Attributes
    ----------
    processing_time_ms
        Processing time of the batch, the same on every retry; -1 in time mode None.
    watermark_ms
        The watermark; -1 in time mode None, and without a watermark.
    """

    processing_time_ms: int = -1
    watermark_ms: int = -1

    def getCurrentProcessingTimeInMs(self) -> int:
        """Return the processing time of the batch."""
        return self.processing_time_ms

    def getCurrentWatermarkInMs(self) -> int:
        """Return the watermark: for rows, that of the batches before; for timers, that which includes this batch."""
        return self.watermark_ms


@dataclass(frozen=True, slots=True)
class ExpiredTimerInfo:
    """The timer that has expired."""

    expiry_time_ms: int

    def getExpiryTimeInMs(self) -> int:
        """Return the time for which the timer was registered, in milliseconds."""
        return self.expiry_time_ms


class StatefulProcessor(ABC):
    """A user's processor of the rows, timers and state of each key, as PySpark's ``StatefulProcessor``.

    With Spark 4, processors that extend PySpark's own class are of this class, too.

    An object of the class is pickled to the workers. Each task of each batch has a copy of its own, so data for later batches
    belongs in state variables. With ``transformWithStateInPandas`` rows are pandas DataFrames, with ``transformWithState`` they are
    Rows. Keys are tuples.
    """

    @abstractmethod
    def init(self, handle: StatefulProcessorHandle) -> None:
        """Request the state variables, and keep the handle for timers. It is also called when the query is built."""

    @abstractmethod
    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: TimerValues) -> Iterable[Any]:
        """Process a key's rows of a batch.

        Parameters
        ----------
        key
            The grouping columns' values.
        rows
            DataFrames, or Rows.
        timerValues
            The times of the batch.

        Returns
        -------
        iterable
            The rows to emit: DataFrames, or Rows (tuples) in the order of the output's columns.
        """

    def handleExpiredTimer(
        self, key: tuple[Any, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterable[Any]:
        """Process an expired timer of a key, after the rows of the batch; return the rows to emit, by default none."""
        return iter(())

    def handleInitialState(  # noqa: B027 - a processor need not have it
        self, key: tuple[Any, ...], initialState: Any, timerValues: TimerValues
    ) -> None:
        """Process the initial state of a key: a DataFrame (in chunks, if it is large), or a Row.

        It is called in the first batch, before the rows of any key; by default it does nothing.
        """

    def close(self) -> None:  # noqa: B027 - nor this
        """End the processor's work in a task; by default this does nothing."""


for processor_class in SPARK.PROCESSOR_CLASSES:
    # They have the same methods, which get the fleet's handle, states and times in place of PySpark's.
    StatefulProcessor.register(processor_class)

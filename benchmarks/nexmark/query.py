"""Nexmark queries in streaming form, and the operators that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.nexmark.files import Inputs
from statefleet.fleet import Fleet

#: How late events may be, as Nexmark defines its streams.
_DELAY: Final = "4 seconds"


class Operators(Protocol):
    """Functions from a streaming DataFrame to its next stateful operator: the fleet's, or Spark's own."""

    def __call__(self, frame: DataFrame, operator: str, mode: str = "append") -> Any:
        """Return `frame` with stateful ``groupBy``, ``join``, ..; `operator` is its name within the query, `mode` its output mode."""


class FleetOperators:
    """Stateful operators of a fleet.

    Parameters
    ----------
    prefix
        Prefix of the names of the states; it belongs to a single checkpoint.

    Attributes
    ----------
    states
        Names of the states so far, those nearest to the sources first.
    """

    def __init__(self, fleet: Fleet, prefix: str, shards: int | None = None) -> None:
        self._fleet, self._prefix, self._shards = fleet, prefix, shards
        self.states: list[str] = []

    def __call__(self, frame: DataFrame, operator: str, mode: str = "append") -> Any:
        """Return `frame` with the fleet's operators; the name of the state is that of the operator, after the prefix."""
        name = f"{self._prefix}-{operator}"
        self.states.append(name)
        return self._fleet.stateful(frame, name=name, outputMode=mode, shards=self._shards)


def _unchanged(table: DataFrame) -> DataFrame:
    return table


@dataclass(frozen=True, slots=True)
class Query:
    """A Nexmark query as a streaming query.

    Attributes
    ----------
    key
        Columns that identify a row: the last row that the stream emits for a key is the valid one.
    closes
        Whether rows are emitted once the watermark has passed them: windows that are open when the stream ends are missing.
    finish
        Function from the table of last rows by key to the query's answer, where a streaming query cannot compute it.
    plain_spark
        Whether Spark's own operators can run it in this form.
    """

    name: str
    build: Callable[[Operators, Inputs], DataFrame]
    key: tuple[str, ...]
    mode: str
    closes: bool = False
    finish: Callable[[DataFrame], DataFrame] = _unchanged
    plain_spark: bool = False


def marked(frame: DataFrame, time: str = "dateTime") -> DataFrame:
    """Return a stream with its watermark."""
    return frame.withWatermark(time, _DELAY)


def unmarked(frame: DataFrame, *columns: str) -> DataFrame:
    """Return the same rows without the marks of event time on some columns."""
    return frame.select(*(F.col(name).alias(name, metadata={}) if name in columns else name for name in frame.columns))

"""What the streaming form of a Nexmark query is, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from benchmarks.nexmark.files import Inputs
from spark_jobs.fleet import Fleet

__all__ = ["FleetOperators", "Operators", "Query", "marked", "unmarked"]

#: How late events may be, as Nexmark defines its streams.
_DELAY: Final = "4 seconds"


class Operators(Protocol):
    """Gives a streaming DataFrame's next stateful operator: one of the fleet, or Spark's own."""

    def __call__(self, frame: DataFrame, operator: str, mode: str = "append") -> Any:
        """What has ``groupBy``, ``join``, .. of `frame`; `operator` names it within its query, `mode` is its output mode."""


class FleetOperators:
    """Stateful operators of a fleet.

    Parameters
    ----------
    fleet
        The fleet.
    prefix
        What the names of the states begin with; one checkpoint belongs to it.
    shards
        Shards of new states; by default the fleet's own choice.

    Attributes
    ----------
    states
        Names of the states given so far, those nearest to the sources first.
    """

    def __init__(self, fleet: Fleet, prefix: str, shards: int | None = None) -> None:
        self._fleet, self._prefix, self._shards = fleet, prefix, shards
        self.states: list[str] = []

    def __call__(self, frame: DataFrame, operator: str, mode: str = "append") -> Any:
        """See :class:`Operators`."""
        name = f"{self._prefix}-{operator}"
        self.states.append(name)
        return self._fleet.stateful(frame, name=name, outputMode=mode, shards=self._shards)


def _as_it_is(table: DataFrame) -> DataFrame:
    return table


@dataclass(frozen=True, slots=True)
class Query:
    """A Nexmark query as a streaming query.

    Attributes
    ----------
    name
        As in Nexmark: ``q3``.
    build
        Makes the streaming DataFrame.
    key
        Columns of it that name a row: the last row that the stream emits for a key stands for it.
    mode
        Output mode to start it with. In ``append`` mode nothing that is emitted changes any more.
    closes
        Whether rows are emitted once the watermark has passed them: what is still open when the stream ends is missing.
    finish
        From the table of last rows by key to the query's answer, where a streaming query cannot go all the way.
    plain_spark
        Whether Spark's own operators can run it, in this form.
    """

    name: str
    build: Callable[[Operators, Inputs], DataFrame]
    key: tuple[str, ...]
    mode: str
    closes: bool = False
    finish: Callable[[DataFrame], DataFrame] = _as_it_is
    plain_spark: bool = False


def marked(frame: DataFrame, time: str = "dateTime") -> DataFrame:
    """A stream with its watermark."""
    return frame.withWatermark(time, _DELAY)


def unmarked(frame: DataFrame, *columns: str) -> DataFrame:
    """The same rows, in which these columns are plain times that no watermark is compared with."""
    return frame.select(*(F.col(one).alias(one, metadata={}) if one in columns else one for one in frame.columns))

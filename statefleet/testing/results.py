"""The content of sinks as values that can be compared, and the error that shows the first difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: Number of rows of each kind that an error shows.
_SHOWN = 5


class ResultsDifferError(AssertionError):
    """A query on the fleet left other rows in its sink than the same query on Spark's own state store.

    Attributes
    ----------
    seed
        The seed that gives the same faults again.
    step
        Number of the batch of the test, from 0, after which the rows differed first.
    missing, extra
        Rows that the sink lacks, and that it has too many of, as tuples.
    """

    def __init__(self, message: str, seed: int, step: int, missing: Sequence[Any], extra: Sequence[Any]) -> None:
        super().__init__(message)
        self.seed, self.step, self.missing, self.extra = seed, step, list(missing), list(extra)


@dataclass(frozen=True, slots=True)
class Difference:
    """Rows of a sink that differ from those that are expected, as tuples, sorted by their text."""

    missing: list[Any]
    extra: list[Any]

    def __str__(self) -> str:
        lines = [*_lines("missing", self.missing), *_lines("too many", self.extra)]
        return "\n".join(lines)


def _lines(kind: str, rows: Sequence[Any]) -> Iterable[str]:
    yield from (f"  {kind}: {row}" for row in rows[:_SHOWN])
    if len(rows) > _SHOWN:
        yield f"  {kind}: {len(rows) - _SHOWN} more"


def difference(expected: Sequence[Any], actual: Sequence[Any]) -> Difference | None:
    """Return how rows differ from the expected ones, in any order; None if they are the same."""
    counts, actual_counts = Counter(expected), Counter(actual)
    missing, extra = counts - actual_counts, actual_counts - counts
    if not missing and not extra:
        return None
    return Difference(sorted(missing.elements(), key=repr), sorted(extra.elements(), key=repr))


def normal(rows: Iterable[Any]) -> list[Any]:
    """Return rows as tuples that can be compared and counted: floats to 12 digits, NaN as equal to itself."""
    return [_value(tuple(row.values()) if isinstance(row, dict) else row) for row in rows]


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(f"{value:.12g}")
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return tuple(sorted(((_value(key), _value(item)) for key, item in value.items()), key=repr))
    if isinstance(value, tuple | list):
        return tuple(_value(part) for part in value)
    return value

"""Random rows by seed, and what happens to the query that they come into."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COLUMNS = {"a": "k string, s double, t timestamp, x int", "b": "k2 string, u timestamp, y int"}


@dataclass(frozen=True)
class Action:
    """Input files, and how they come in.

    Attributes
    ----------
    files
        Rows by input, for each file.
    stops
        Whether the query is stopped before and started after, so that the files are a backlog.
    fails
        When the sink fails once, in the first batch: ``before`` it reads a row, ``after`` it has read all, or ``never``. The query is
        then started again.
    available_now
        Whether the query ends with the input that there is.
    shards
        Shards of the fleet from then on, by a rescale if the query runs.
    """

    files: tuple[Mapping[str, list[tuple[Any, ...]]], ...]
    stops: bool
    fails: str
    available_now: bool
    shards: int


def actions(dice: random.Random) -> list[Action]:
    """Draw what happens to a query, in order."""
    now, drawn, shards, available_now = 40, list[Action](), 2, dice.random() < 0.2
    for step in range(4):
        files = []
        for _ in range(dice.choice((1, 1, 2))):
            now += dice.choice((2, 8, 12, 30))
            files.append({"a": _rows_a(dice, now), "b": _rows_b(dice, now)})
        stops = step > 0 and (available_now or len(files) > 1 or dice.random() < 0.2)
        if step > 0 and dice.random() < (0.4 if stops else 0.15):
            shards = dice.choice((1, 2, 4))
        fails = dice.choice(("before", "after")) if not available_now and dice.random() < 0.2 else "never"
        drawn.append(Action(tuple(files), stops or len(files) > 1 or available_now, fails, available_now, shards))
    return drawn


def _time(dice: random.Random, now: int) -> int | None:
    return None if dice.random() < 0.05 else max(0, now - dice.choice((-3, 0, 0, 1, 2, 4, 7, 12, 30)))


def _rows_a(dice: random.Random, now: int) -> list[tuple[Any, ...]]:
    doubles = (None, 0.0, -0.0, float("nan"), 1.5, 1.5)
    return [
        (
            dice.choice((None, "p", "p", "q", "")),
            dice.choice(doubles),
            _time(dice, now),
            dice.choice((None, 0, 1, 2, 4, 7)),
        )
        for _ in range(12)
    ]


def _rows_b(dice: random.Random, now: int) -> list[tuple[Any, ...]]:
    return [(dice.choice((None, "p", "q", "r")), _time(dice, now), dice.choice((None, 0, 1, 2, 4))) for _ in range(8)]

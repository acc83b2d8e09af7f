"""The faults of a test run, all drawn from its seed: the same seed and batches give the same faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

#: Longest time after the begin of a sink's write at which a store actor is killed, in seconds: a small batch takes less.
_LATEST_KILL_S = 0.5


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of a store actor."""

    #: Number of the store actor, modulo how many there are.
    victim: int
    #: Seconds after the begin of the sink's write; None for before the batch.
    after_s: float | None

    def __str__(self) -> str:
        when = "before the batch" if self.after_s is None else f"{1000 * self.after_s:.0f} ms after its write began"
        return f"a store actor was killed {when}"


class Faults:
    """Faults of the steps of a run, each of which feeds the rows of a batch: of each kind that is asked for at least one.

    `kills`: a store actor is killed; `repeats`: the query ends between the sink's write and Spark's commit, and is started again, which
    repeats the batch; `reorders`: the rows of a batch come in another order.
    """

    def __init__(self, seed: int, steps: int, *, kills: bool, repeats: bool, reorders: bool) -> None:
        self._seed = seed
        self._killed = self._steps("kill", steps) if kills else set()
        self._repeated = self._steps("repeat", steps) if repeats else set()
        self._repeats, self._reorders = repeats, reorders

    def _random(self, *parts: Any) -> Random:
        return Random("/".join(map(str, (self._seed, *parts))))

    def _steps(self, kind: str, steps: int) -> set[int]:
        random = self._random(kind)
        return {step for step in range(steps) if random.random() < 0.5} | {random.randrange(steps)}

    def kill(self, step: int) -> Kill | None:
        """Return the kill of a step; None if there is none."""
        if step not in self._killed:
            return None
        random = self._random("kill", step)
        after_s = None if random.random() < 0.25 else random.uniform(0, _LATEST_KILL_S)
        return Kill(random.randrange(1 << 16), after_s)

    def repeats(self, step: int, batch: int) -> bool:
        """Return whether a batch of a step is repeated after its write; batch 0 has the rows, later ones have none."""
        if batch == 0:
            return step in self._repeated
        return self._repeats and self._random("repeat", step, batch).random() < 0.5

    def ordered(self, step: int, rows: Sequence[Any]) -> list[Any]:
        """Return the rows of a step in the order in which they are fed."""
        fed = list(rows)
        if self._reorders:
            self._random("order", step).shuffle(fed)
        return fed

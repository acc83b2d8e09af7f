"""The surroundings of simulated processes, from the seed: time, ids, locks and threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from coordinator.runtime.runtime import Pool
from tests.simulation.event_loop import run_at_once
from tests.simulation.scheduler import Fiber, Party, Scheduler


class SimulatedClock:
    """Time: a step takes a while, sleeping lets others go on. See :class:`coordinator.runtime.runtime.Clock`."""

    def __init__(self, scheduler: Scheduler, seconds_a_step: float) -> None:
        self._scheduler, self._seconds_a_step = scheduler, seconds_a_step

    def now_s(self) -> float:
        return 1.7e9 + self._scheduler.now * self._seconds_a_step

    def elapsed_s(self) -> float:
        return self._scheduler.now * self._seconds_a_step

    def steps(self, seconds: float) -> int:
        """Return the steps that take so long."""
        return int(seconds / self._seconds_a_step)

    def asleep_s(self, party: Party) -> float:
        """Return for how long a process has been frozen."""
        now = self._scheduler.now
        return sum(min(until, now) - since for since, until in party.frozen) * self._seconds_a_step

    def sleep(self, seconds: float) -> None:
        wake = self._scheduler.now + 1 + self.steps(seconds)
        self._scheduler.pause(wake=lambda: self._scheduler.now >= wake)


class Skew:
    """The difference of a machine's time of day from the true one: it is behind or ahead, is set forward and back, or stands still."""

    def __init__(self, rng: random.Random, unit_s: float) -> None:
        self._offset_s = rng.choice((0.0, -1.0, 1.0)) * unit_s * rng.choice((1, 30))
        self._jump_s = rng.choice((0.0, 0.0, -3.0, 3.0)) * unit_s
        self._period_s = rng.uniform(0.5, 3.0) * unit_s
        self._stands_still = rng.random() < 0.15

    def shown_s(self, now_s: float, elapsed_s: float) -> float:
        """Return the time of day that the machine shows."""
        since = elapsed_s if self._stands_still else 0.0
        is_set = int(elapsed_s / self._period_s) % 2
        return now_s - since + self._offset_s + self._jump_s * is_set


class ProcessClock:
    """The clock as one process sees it: whether it goes on while its machine sleeps is the process's choice.

    Parameters
    ----------
    skew
        Of its machine's time of day; none by default.
    """

    def __init__(self, clock: SimulatedClock, party: Party, skew: Skew | None = None) -> None:
        self._clock, self._party, self._skew = clock, party, skew
        self.sleep = clock.sleep

    def now_s(self) -> float:
        now_s, elapsed_s = self._clock.now_s(), self._clock.elapsed_s()
        return now_s if self._skew is None else self._skew.shown_s(now_s, elapsed_s)

    def elapsed_s(self) -> float:
        return self._clock.elapsed_s()

    def awake_s(self) -> float:
        """Return the time of a clock that stands still while the machine sleeps."""
        return self._clock.elapsed_s() - self._clock.asleep_s(self._party)


class SimulatedIds:
    """Ids from the seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    def aside(self) -> SimulatedIds:
        """Return other ids, which leave these as they are."""
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        return SimulatedIds(rng)


class FairLock:
    """A lock for fibers, which its holder may take again: waiting gives the baton back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Fiber | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        me = self._scheduler.current
        while self._depth and self._owner is not me:
            if not blocking:
                return False
            self._scheduler.pause(wake=lambda: not self._depth)
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedThreads:
    """Threads are fibers of the process that starts them; see :class:`coordinator.runtime.runtime.Threads`."""

    def __init__(self, scheduler: Scheduler, clock: SimulatedClock) -> None:
        self._scheduler, self._clock = scheduler, clock

    def lock(self) -> FairLock:
        return FairLock(self._scheduler)

    def pool(self, size: int, name: str) -> Pool:
        return FiberPool(self._scheduler, self._clock) if name in _SIDE_BY_SIDE else InlinePool()

    def start(self, target: Callable[[], None], name: str) -> None:
        self._scheduler.spawn(self._scheduler.party, target)

    def future(self) -> Future[Any]:
        return _OfFiber(self._scheduler, self._clock)


#: Pools whose work goes on side by side.
_SIDE_BY_SIDE = {"statefleet-apply", "statefleet-epoch", "statefleet-seal", "statefleet-local-call"}


class _OfFiber(Future[Any]):
    """The result of a fiber, or a value that one sets; fibers wait for it."""

    def __init__(self, scheduler: Scheduler, clock: SimulatedClock) -> None:
        super().__init__()
        self._scheduler, self._clock = scheduler, clock

    def result(self, timeout: float | None = None) -> Any:
        if timeout is None:
            self._scheduler.pause(wake=self.done)
        else:
            until = self._clock.elapsed_s() + timeout
            self._scheduler.pause(wake=lambda: self.done() or self._clock.elapsed_s() >= until)
        return super().result(0)


class FiberPool:
    """Work that goes on side by side: each piece is a fiber of the process that gives it."""

    def __init__(self, scheduler: Scheduler, clock: SimulatedClock) -> None:
        self._scheduler, self._clock = scheduler, clock

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _OfFiber(self._scheduler, self._clock)
        self._scheduler.spawn(
            self._scheduler.party,
            lambda: run_at_once(lambda: function(*args, **kwargs), future),  # type: ignore[arg-type]
        )
        return future


class InlinePool:
    """Files that are read or written side by side: done by the caller, one after the other."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        run_at_once(lambda: function(*args, **kwargs), future)  # type: ignore[arg-type]
        return future

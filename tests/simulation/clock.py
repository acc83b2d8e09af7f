"""What the standard library does for the project, from the seed: time, ids, locks and threads."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tests.simulation.event_loop import run_at_once
from tests.simulation.scheduler import Fiber, Scheduler

__all__ = ["HeldShards", "InlinePool", "SimulatedClock", "SimulatedIds", "SimulatedThreading"]


class SimulatedClock:
    """The ``time`` module as the project uses it: a step takes a while, sleeping lets others go on."""

    def __init__(self, scheduler: Scheduler, seconds_a_step: float) -> None:
        self._scheduler, self._seconds_a_step = scheduler, seconds_a_step

    def time(self) -> float:
        return 1.7e9 + self.monotonic()

    def monotonic(self) -> float:
        return self._scheduler.now * self._seconds_a_step

    perf_counter = monotonic

    def steps(self, seconds: float) -> int:
        """Steps that take so long."""
        return int(seconds / self._seconds_a_step)

    def sleep(self, seconds: float) -> None:
        wake = self._scheduler.now + 1 + self.steps(seconds)
        self._scheduler.pause(wake=lambda: self._scheduler.now >= wake)


class SimulatedIds:
    """The ``uuid`` module as the project uses it, from the seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._rng.getrandbits(128), version=4)


class FairLock:
    """``threading.Lock`` for fibers: waiting gives the baton back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._held = scheduler, False

    def acquire(self, blocking: bool = True) -> bool:
        while self._held:
            if not blocking:
                return False
            self._scheduler.pause(wake=lambda: not self._held)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class FairRLock(FairLock):
    """``threading.RLock`` for fibers."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: Fiber | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        if self._depth and self._owner is self._scheduler.current:
            self._depth += 1
            return True
        if not super().acquire(blocking):
            return False
        self._owner, self._depth = self._scheduler.current, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class HeldShards(dict[Any, Any]):
    """A store's shards (or partitions), each with a lock that fibers can wait for."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            default.lock = FairRLock(self._scheduler)
            self[key] = default
        return self[key]


class SimulatedThreading:
    """The ``threading`` module as the project uses it: threads are fibers of the process that starts them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def Lock(self) -> FairLock:
        return FairLock(self._scheduler)

    def RLock(self) -> FairRLock:
        return FairRLock(self._scheduler)

    def Thread(self, target: Callable[[], None], name: str, daemon: bool) -> SimulatedThread:
        return SimulatedThread(self._scheduler, target)


class SimulatedThread:
    def __init__(self, scheduler: Scheduler, target: Callable[[], None]) -> None:
        self._scheduler, self._target = scheduler, target

    def start(self) -> None:
        self._scheduler.spawn(self._scheduler.party, self._target)


class InlinePool:
    """``ThreadPoolExecutor`` for reads: done by the caller, one after the other."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        run_at_once(lambda: function(*args), future)  # type: ignore[arg-type]
        return future

"""What a process takes from the machine that it runs on: time, ids, threads.

All of it is passed in, so that a simulation can put its own in place of it. Nothing else of the coordinator and the store actors
looks at a clock, makes an id or starts a thread by itself, but for the object stores, which wait between their attempts.
"""

from __future__ import annotations

import gc
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

__all__ = [
    "Clock",
    "Future",
    "Lock",
    "MachineClock",
    "Pool",
    "Runtime",
    "Threads",
    "freeze_imports",
    "now_ms",
    "random_id",
    "random_seed",
]

P = ParamSpec("P")
Result = TypeVar("Result")

#: Linux stops the ordinary monotonic clock while a machine sleeps; elsewhere it is the system's to say.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Time as a process sees it."""

    def now_s(self) -> float:
        """Seconds since the epoch; the machine's clock may be set, also back."""

    def elapsed_s(self) -> float:
        """Seconds since some moment. It never goes back, and goes on while the machine sleeps: ages are measured by it."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class Lock(Protocol):
    """A lock as :class:`threading.Lock`."""

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; False if somebody has it and `blocking` is."""

    def release(self) -> None:
        """Give it back."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Pool(Protocol):
    """Threads that work is given to."""

    def submit(self, function: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Have a function called."""


class Threads(Protocol):
    """Where work goes on side by side."""

    def lock(self) -> Lock:
        """A lock that its holder may take again."""

    def pool(self, size: int, name: str) -> Pool:
        """So many threads, whose names begin with `name`."""

    def start(self, target: Callable[[], None], name: str) -> None:
        """Run a function beside everything else, until the process ends."""

    def future(self) -> Future[Any]:
        """What one thread tells another that waits for it."""


class MachineClock:
    """The clock of this machine."""

    def now_s(self) -> float:
        return time.time()

    def elapsed_s(self) -> float:
        return time.clock_gettime(_CLOCK)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class MachineThreads:
    """Threads of this process."""

    def lock(self) -> Lock:
        return threading.RLock()

    def pool(self, size: int, name: str) -> Pool:
        return ThreadPoolExecutor(size, thread_name_prefix=name)

    def start(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def future(self) -> Future[Any]:
        return Future()


def random_id() -> str:
    """32 hexadecimal digits that nobody else has."""
    return uuid.uuid4().hex


def random_seed() -> int:
    """128 bits that nobody can guess."""
    return secrets.randbits(128)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A process's surroundings; by default those that it really has.

    Attributes
    ----------
    new_id
        As :func:`random_id`.
    hash_seed
        What keys are hashed under, so that whoever chooses them cannot choose many with one hash. Nothing that is stored depends on it.
    """

    clock: Clock = field(default_factory=MachineClock)
    new_id: Callable[[], str] = random_id
    threads: Threads = field(default_factory=MachineThreads)
    hash_seed: int = field(default_factory=random_seed, repr=False)


def freeze_imports() -> None:
    """Keep Python's garbage collection from looking at what was imported: a full one would halt each process for 0.2 s."""
    gc.collect()
    gc.freeze()


def now_ms(clock: Clock) -> int:
    """Milliseconds since the epoch."""
    return int(clock.now_s() * 1000)

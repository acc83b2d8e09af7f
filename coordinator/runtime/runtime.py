"""Time, ids and threads of the machine that a process runs on.

All of it is passed in, so that a simulation can replace it. Nothing else of the coordinator and the store actors
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

#: Linux stops the ordinary monotonic clock while a machine sleeps; on other systems it depends.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Time as a process sees it."""

    def now_s(self) -> float:
        """Return seconds since the epoch; the machine's clock may be set, also back."""

    def elapsed_s(self) -> float:
        """Return seconds since a fixed moment. They never go back, and go on while the machine sleeps: ages are measured by them."""

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""


class Lock(Protocol):
    """A lock as :class:`threading.Lock`."""

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; returns False if another thread has it and `blocking` is false."""

    def release(self) -> None:
        """Release the lock."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Pool(Protocol):
    """Threads that run functions."""

    def submit(self, function: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Run a function on one of the threads."""


class Threads(Protocol):
    """Starts threads and makes locks."""

    def lock(self) -> Lock:
        """Return a lock that its holder may acquire again."""

    def pool(self, size: int, name: str) -> Pool:
        """Return a pool of threads, whose names begin with `name`."""

    def start(self, target: Callable[[], None], name: str) -> None:
        """Run a function on a thread of its own, until the process ends."""

    def future(self) -> Future[Any]:
        """Return an event that one thread sets and others wait for."""


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
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def random_seed() -> int:
    """Return 128 random bits that cannot be guessed."""
    return secrets.randbits(128)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The clock, ids and threads of a process; by default the machine's own.

    Attributes
    ----------
    new_id
        As :func:`random_id`.
    hash_seed
        Seed of the hashes of keys, so that a user who chooses keys cannot choose many with one hash. Nothing that is stored
        depends on it.
    """

    clock: Clock = field(default_factory=MachineClock)
    new_id: Callable[[], str] = random_id
    threads: Threads = field(default_factory=MachineThreads)
    hash_seed: int = field(default_factory=random_seed, repr=False)


def freeze_imports() -> None:
    """Exclude imported modules from Python's garbage collection: a full collection would halt each process for 0.2 s."""
    gc.collect()
    gc.freeze()


def now_ms(clock: Clock) -> int:
    """Return milliseconds since the epoch."""
    return int(clock.now_s() * 1000)
